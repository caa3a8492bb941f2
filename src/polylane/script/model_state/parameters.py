"""Parameters of a prepared script's models: what the script reads and writes of them between its steps.

Workers hold parts of parameters and gradients, or those of their stage, and the script is the same on all of them. So
its parameters are guarded while it runs (:mod:`polylane.runtime.guarded_tensors`), and what it asks is answered for the
whole, by collectives that every worker makes at the same line:

    p.grad, p.norm() under no_grad     the whole values, gathered from the workers that have them
    p.pow(2).sum()                     recorded, as a part of the loss: its gradient flows into p
    p.grad.mul_(0.5), p.clamp_(0, 1)   written by each worker on its part
    clip_grad_norm_(parameters, 1.0)   by norms of parts, which are added up
    optimizer.param_groups             the script's own parameters

Before a plan's programs are compiled, and under plans that replicate all parameters, these are whole everywhere, and
reading one costs no message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from polylane.output import say_at_once
from polylane.runtime.guarded_tensors import Guard, GuardedParameter, GuardedTensor, guard_of, put_guard, remove_guard
from polylane.runtime.parameters.guarded_views import ViewGuard, view_guarded, write_whole
from polylane.runtime.stale_weights import track_guards
from polylane.runtime.workers.world import World
from polylane.script.deferred import DeferredTensor, answer_call
from polylane.script.model_state.pending_calls import PendingCalls
from polylane.script.recording import line_of_script
from polylane.script.role import ScriptRole


def _find_step() -> torch.optim.Optimizer | None:
    """Return the optimizer whose ``step()`` is running; None where there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(owner := frame.f_locals.get("self"), torch.optim.Optimizer):
            return owner
        frame = frame.f_back
    return None


class PreparedParameters:
    """Guards a script's parameters, and answers what it asks of them.

    Args:
        models: the models as one, whose names of parameters are those of the training.
        optimizers: the optimizers of the script, before a plan takes their parameters apart.
        defer: returns the deferred tensor of a parameter, by its name.
        compute: returns the value of a deferred tensor.
        record_write: is called with the name of a parameter that the script has written.
        world: this worker among all workers.
        pending: the calls of models that were not run, which may read and write buffers.

    Attributes:
        names: names of the script's parameters, by their ids.
    """

    def __init__(
        self,
        models: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        defer: Callable[[str], DeferredTensor],
        compute: Callable[[Tensor], Tensor],
        record_write: Callable[[str], None],
        world: World,
        pending: PendingCalls,
    ) -> None:
        self._record_write, self._known_optimizers = record_write, set(optimizers)
        self._tells = world.rank == 0 and world.size > 1
        self._models, self._defer, self._compute, self._pending = models, defer, compute, pending
        self._role: ScriptRole | None = None
        self.names = {id(parameter): name for name, parameter in models.named_parameters()}
        self._guards = {
            parameter: Guard(name, "", parameter.shape, record_write=partial(self._note_write, name), reader=self)
            for name, parameter in models.named_parameters()
        }
        # By optimizer and number of a group, the script's parameters and what the plan has made of them: the groups
        # themselves are others after load_state_dict().
        self._groups = [
            (optimizer, number, list(group["params"]), list(group["params"]))
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
        ]
        self._buffer_names = frozenset(name for name, _ in models.named_buffers())
        self._guarded_buffers = {
            buffer: Guard(name, "", buffer.shape, reader=self) for name, buffer in models.named_buffers()
        }
        self._by_guard = {id(guard): parameter for parameter, guard in self._guards.items()}
        self._is_guarding, self._owner = False, nn.Module()
        self._model_numbers = {name: number for number, (name, _) in enumerate(models.named_children())}
        track_guards(self._owner, self)

    def _note_write(self, name: str, is_fresh: bool) -> None:
        """Record a write of the script's, and say it where an optimizer makes it that prepare() was not given."""
        self._record_write(name)
        optimizer = _find_step()
        if optimizer is not None and optimizer not in self._known_optimizers:
            self._known_optimizers.add(optimizer)
            if self._tells:
                say_at_once(
                    f"{line_of_script()}: every worker makes all of this {type(optimizer).__name__}'s update, since "
                    "prepare() was not given the optimizer: give it to prepare(), and each makes its part"
                )

    def attach(self, role: ScriptRole) -> None:
        """Answer for the parts that workers hold from now on, also by aliases that the script has taken before."""
        self._role = role
        buffers = dict(self._models.named_buffers())
        for tensor, guard in [*self._guards.items(), *self._guarded_buffers.items()]:
            if role.is_part(guard.name):
                # Of a buffer there may be another tensor now.
                local_tensor = buffers.get(guard.name, tensor)
                guard.local = partial(role.local_tensor, guard.name, local_tensor)
                guard.cut = partial(role.local_part, guard.name)
                if local_tensor is not tensor:
                    self._guarded_buffers[local_tensor] = guard

    # ---- while the script runs ---------------------------------------------------------------------------------------

    def guard(self) -> None:
        """Guard the parameters: the script runs now."""
        if self._is_guarding:
            return
        self._is_guarding = True
        # Written out, as in unguard(): this is done several times in a step.
        for parameter, guard in self._guards.items():
            parameter._polylane_guard = guard  # type: ignore[attr-defined]
            parameter.__class__ = GuardedParameter
        for buffer, guard in self._guarded_buffers.items():
            buffer._polylane_guard = guard  # type: ignore[attr-defined]
            buffer.__class__ = GuardedTensor
        for index, (optimizer, number, parameters, _) in enumerate(self._groups):
            group = optimizer.param_groups[number]
            self._groups[index] = optimizer, number, parameters, group["params"]
            group["params"] = parameters

    def unguard(self) -> None:
        """Make all tensors ordinary ones again: the library runs."""
        if not self._is_guarding:
            return
        self._is_guarding = False
        for parameter, guard in self._guards.items():
            if guard.draft is not None:
                guard.finish_draft(parameter)
            if type(parameter) is GuardedParameter:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                del parameter._polylane_guard  # type: ignore[attr-defined]
        for buffer, guard in self._guarded_buffers.items():
            if guard.draft is not None:
                guard.finish_draft(buffer)
            if type(buffer) is GuardedTensor:
                buffer.__class__ = Tensor  # type: ignore[assignment]
                del buffer._polylane_guard  # type: ignore[attr-defined]
        for optimizer, number, parameters, local in self._groups:
            group = optimizer.param_groups[number]
            if group["params"] is parameters:
                group["params"] = local

    def release(self) -> None:
        """Guard nothing any more, and leave their own parameters to the optimizers."""
        self.unguard()
        for optimizer, number, parameters, _ in self._groups:
            optimizer.param_groups[number]["params"] = parameters
        self._guards.clear()
        self._guarded_buffers.clear()
        self._groups.clear()

    def list_hooked(self, names: Collection[str]) -> list[nn.Parameter]:
        """Return the parameters with hooks on their accumulated gradients, as torch reaches them: the last one first.

        Args:
            names: names of the parameters that have got a gradient.
        """
        hooked = [p for p, guard in self._guards.items() if p._post_accumulate_grad_hooks and guard.name in names]
        return hooked[::-1]

    # ---- answers -----------------------------------------------------------------------------------------------------

    def read(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function on the values of guarded tensors; where gradients are recorded, record the call."""
        if getattr(func, "__name__", "") == "__deepcopy__":  # the memo has copies that were made before
            return self.read_value(args[0]).clone()
        guarded = [value for value in tree_leaves((args, kwargs)) if guard_of(value) is not None]
        if torch.is_grad_enabled() and any(isinstance(v, nn.Parameter) and v.requires_grad for v in guarded):
            new_args, new_kwargs = tree_map(self.take_argument, (tuple(args), kwargs))
            return answer_call(func, new_args, new_kwargs)
        name = getattr(func, "__name__", "")
        gradients = [guard_of(value) for value in guarded]
        if all(isinstance(guard, GradientGuard) for guard in gradients) and name in _OF_PARTS:
            return _OF_PARTS[name](self, func, args, kwargs)
        if (view := view_guarded(func, args, kwargs)) is not None:
            return view
        if any(isinstance(value, DeferredTensor) for value in tree_leaves((args, kwargs))):
            return answer_call(func, args, kwargs)
        new_args, new_kwargs = tree_map(self.read_value, (tuple(args), kwargs))
        return func(*new_args, **new_kwargs)

    def begin_write(self, guard: Guard) -> None:
        """Run what reads a buffer, before the script writes it."""
        if guard.name in self._buffer_names:
            self._pending.begin_write(*self._locate(guard.name))

    def _locate(self, name: str) -> tuple[int, str]:
        """Return the number of a tensor's model, and the tensor's name in it."""
        model, _, name_in_model = name.partition(".")
        return self._model_numbers[model], name_in_model

    def write(self, tensor: Tensor, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Make a write that needs a whole parameter, or is one on a view of it."""
        write_whole(self, tensor, func, args, kwargs)

    def read_all(self, values: Any) -> Any:
        """Return nested values with those of guarded and deferred tensors in their place."""
        return tree_map(self.read_value, values)

    def value_of(self, name: str) -> Tensor:
        """Return a parameter's or buffer's value, whole; collective where workers hold parts."""
        if name in self._buffer_names:
            self._pending.begin_read(*self._locate(name))
        tensor = self._tensor(name)
        if self._role is None or not (self._role.is_part(name) or self._role.is_elsewhere(name)):
            return tensor.detach().as_subclass(Tensor)
        return self._role.read_value(name).to(tensor.device)

    def gradient(self, guard: Guard) -> Tensor | None:
        """Return a parameter's gradient: itself where all workers have it whole, else guarded."""
        if (parameter := self._by_guard.get(id(guard))) is None:  # a buffer, or a gradient
            return None
        if self._role is None or self._role.has_whole_gradients:
            return parameter.grad
        name = self.names[id(parameter)]
        if not self._role.has_gradient(name):
            return None
        # Without memory: what a worker has of the gradient is found when it is asked for.
        handle = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(guard.shape)
        local, cut = partial(self._role.local_gradient, name), partial(self._role.gradient_part, name)
        put_guard(handle, GradientGuard(f"{guard.name}.grad", "", guard.shape, local, cut, reader=self, parameter=name))
        return handle

    def set_gradient(self, guard: Guard, gradient: Tensor | None) -> None:
        """Give a parameter a whole gradient, or none."""
        parameter = self._by_guard[id(guard)]
        if gradient is not None and guard_of(gradient) is not None:
            gradient = self.read_value(gradient)
        remove_guard(parameter)
        try:
            if self._role is None or self._role.has_whole_gradients:
                parameter.grad = gradient
            else:
                self._role.set_gradient(self.names[id(parameter)], gradient)
        finally:
            put_guard(parameter, guard)

    def _tensor(self, name: str) -> Tensor:
        path, _, key = name.rpartition(".")
        tensor: Tensor = getattr(self._models.get_submodule(path), key)
        return tensor

    def take_argument(self, value: Any) -> Any:
        """Return what a recorded call takes for a value: a parameter's deferred tensor, or what is read of others."""
        if guard_of(value) is None:
            return value
        if torch.is_grad_enabled() and isinstance(value, nn.Parameter) and value.requires_grad:
            return self._defer(self.names[id(value)])
        return self.read_value(value).clone()  # the script may write it before the call is run

    def read_value(self, value: Any) -> Any:
        """Return the value of a guarded or a deferred tensor; others as they are; collective for parts."""
        if isinstance(value, DeferredTensor):
            return self._compute(value)
        guard = guard_of(value)
        if guard is None:
            return value
        if isinstance(guard, ViewGuard):
            return guard.take(self.read_value(guard.source))
        if isinstance(guard, GradientGuard):
            assert self._role is not None
            return self._role.read_gradient(guard.parameter).to(value.device)
        return self.value_of(guard.name)

    # ---- answers of parts --------------------------------------------------------------------------------------------

    def measure_norms(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the norm of each of several gradients (``torch._foreach_norm``), by sums over parts."""
        tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))
        names = [guard_of(tensor).parameter for tensor in tensors]  # type: ignore[union-attr]
        assert self._role is not None
        if not 0 < order < float("inf"):
            return list(func([self.read_value(tensor) for tensor in tensors], *args[1:], **kwargs))
        norms = self._role.measure_gradients(names, order)
        dtype = kwargs.get("dtype") or tensors[0].dtype
        return [norm.to(tensors[0].device, dtype) for norm in norms]

    def unscale(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Divide gradients by the scale of a GradScaler, and say whether any worker has one that is not finite."""
        gradients, is_infinite, inverse_scale = args
        local = [part for tensor in gradients if (part := guard_of(tensor).local()) is not None]  # type: ignore[union-attr]
        if local:
            func(local, is_infinite, inverse_scale)
        assert self._role is not None
        is_infinite.copy_((self._role.sum_over_workers(is_infinite.clone()) > 0).to(is_infinite.dtype))


class GradientGuard(Guard):
    """Answers for the gradient of a parameter, by the name that the training has for it."""

    def __init__(self, *args: Any, parameter: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parameter = parameter


_OF_PARTS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": PreparedParameters.measure_norms,
    "_amp_foreach_non_finite_check_and_unscale_": PreparedParameters.unscale,
}
