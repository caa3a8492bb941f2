"""Optimizers of a prepared script: their hooks are the script's, and so is their state, of whole parameters.

the script                      what it finds
optimizer.state[p]              gathered from the workers that have parts of p, when it is asked for
... writes into it              each worker takes its part, before anything else runs
hooks on step()                 called by the script, with whole gradients before and whole weights behind
state_dict, load_state_dict     of whole parameters
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.gathered_optimizer import ParameterOrder, cut_state, having_whole_parameters
from polylane.runtime.stale_weights import track_guards
from polylane.script.role import ScriptJob, ScriptRole

T = TypeVar("T")

_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


class _WholeState(defaultdict[Any, Any]):
    """State of an optimizer for whole parameters, gathered when it is first looked at; collective.

    Args:
        gather: returns the state, by the script's parameters.
    """

    def __init__(self, gather: Callable[[], Mapping[Any, Any]]) -> None:
        super().__init__(dict)
        self._gather: Callable[[], Mapping[Any, Any]] | None = gather

    @property
    def is_filled(self) -> bool:
        """Whether the script has looked at it."""
        return self._gather is None

    def fill(self) -> None:
        """Gather the state, unless this was done."""
        if self._gather is not None:
            state, self._gather = self._gather(), None
            self.update(state)


def _fill_before(name: str) -> Callable[..., Any]:
    plain_method = getattr(defaultdict, name)

    @wraps(plain_method)
    def method(self: _WholeState, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return plain_method(self, *args, **kwargs)

    return method


for _name in """
    __getitem__ __setitem__ __delitem__ __contains__ __iter__ __len__ __eq__ __repr__ __or__ __ior__ __reduce__
    keys items values get pop popitem clear update setdefault copy
""".split():  # noqa: SIM905
    setattr(_WholeState, _name, _fill_before(_name))


class Turns(Protocol):
    """Who runs at present: see :class:`polylane.script.tape_runner.TapeRunner`."""

    is_running: bool

    def running(self) -> AbstractContextManager[None]:
        """Return a context manager for what the library does itself."""


class PreparedOptimizers:
    """The optimizers of a loop, whose states are of whole parameters while the script runs.

    Args:
        optimizers: the optimizers that step under the plan.
        turns: says whether the script runs, or the library.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], turns: Turns) -> None:
        self._optimizers, self._turns = list(optimizers), turns
        self._job: ScriptJob | None = None
        self._orders = dict[torch.optim.Optimizer, ParameterOrder]()
        self._parameters = dict[str, nn.Parameter]()
        # While the script runs: by optimizer its local state, and the whole one; while the library runs, its hooks.
        self._states = dict[torch.optim.Optimizer, tuple[Any, _WholeState]]()
        self._hooks = dict[torch.optim.Optimizer, list[Any]]()
        self._owner = nn.Module()

    def track(self) -> None:
        """Follow script and library in their turns, after the parameters, whose shapes are those of parts by then."""
        track_guards(self._owner, self)

    def attach(
        self,
        job: ScriptJob,
        orders: Mapping[torch.optim.Optimizer, ParameterOrder],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Answer for the parts that workers hold from now on.

        Args:
            job: the training under the plan.
            orders: of each optimizer, its parameters as the script has given them.
            parameters: the script's parameters, by name.
        """
        self._job, self._orders, self._parameters = job, dict(orders), dict(parameters)

    def release(self) -> None:
        """Leave the optimizers to the script for good; inside of what the library does itself."""
        for optimizer in self._optimizers:
            self._put_hooks(optimizer)
        self._optimizers, self._job = [], None

    @property
    def _role(self) -> ScriptRole:
        assert self._job is not None
        role = self._job.worker
        assert isinstance(role, ScriptRole)
        return role

    # ---- while the script runs ---------------------------------------------------------------------------------------

    def guard(self) -> None:
        """Give the optimizers whole states and their hooks: the script runs now."""
        for optimizer in self._optimizers:
            self._put_hooks(optimizer)
            if self._job is not None and not self._role.has_whole_gradients and optimizer not in self._states:
                whole_state = _WholeState(partial(self._gather, optimizer))
                self._states[optimizer] = optimizer.state, whole_state
                optimizer.state = whole_state

    def unguard(self) -> None:
        """Give the optimizers the state of what this worker holds, with what the script has changed."""
        for optimizer in self._optimizers:
            self._hooks[optimizer] = [vars(optimizer).get(name) for name in _HOOKS]
            vars(optimizer).update({name: OrderedDict() for name in _HOOKS})
        states, self._states = self._states, {}
        for optimizer, (local_state, whole_state) in states.items():
            script_state, optimizer.state = optimizer.state, local_state
            if script_state is whole_state and not whole_state.is_filled:
                continue
            for name, part in self._role.parts_of(self._orders[optimizer]).items():
                local_state.pop(part.parameter, None)
                if values := script_state.get(self._parameters[name]):
                    local_state[part.parameter] = cut_state(values, part)

    def _put_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        for name, hooks in zip(_HOOKS, self._hooks.pop(optimizer, ()), strict=False):
            if hooks is not None:
                vars(optimizer)[name] = hooks

    def _gather(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Return the state for whole parameters; collective."""
        assert self._job is not None
        whole_state = optimizer.state
        with self._turns.running():
            state = self._job.optimizer_state(optimizer, self._orders[optimizer])
        self._states[optimizer] = self._states[optimizer][0], whole_state  # type: ignore[assignment]
        optimizer.state = whole_state  # this one again, which the script is looking at
        return {self._parameters[name]: values for name, values in state.items()}

    def call_hooks(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Call the script's hooks on ``step()``: "pre", before it, or "post".

        Raises:
            PolylaneError: a hook changes the arguments of ``step()``.
        """
        for hook in list(vars(optimizer).get(f"_optimizer_step_{name}_hooks", {}).values()):
            if hook(optimizer, (optimizer,), {}) is not None:
                raise PolylaneError("a hook on optimizer.step() changes its arguments: a prepared script's has none")

    # ---- state dicts -------------------------------------------------------------------------------------------------

    def call_with_whole_state(self, optimizer: torch.optim.Optimizer, call: Callable[[], T]) -> T:
        """Return what a function returns while an optimizer has the state of whole parameters; collective."""
        if self._job is None or self._turns.is_running:
            return call()
        with self._turns.running():
            order = self._orders[optimizer]
            with having_whole_parameters(optimizer, order, self._job.optimizer_state(optimizer, order)):
                return call()

    def load_whole_state(self, optimizer: torch.optim.Optimizer, load: Callable[[], None]) -> None:
        """Have a function load the state of whole parameters, of which each worker takes its part."""
        if self._job is None or self._turns.is_running:
            load()
            return
        with self._turns.running():
            order = self._orders[optimizer]
            with having_whole_parameters(optimizer, order, {}) as stand_ins:
                load()
                state = {name: optimizer.state[p] for name, p in stand_ins.items() if optimizer.state.get(p)}
            optimizer.state.clear()
            for name, part in self._role.parts_of(order).items():
                if name in state:
                    optimizer.state[part.parameter] = cut_state(state[name], part)
