"""Optimizer trace: from which parameters, and from which of their elements, an optimizer computes each update.

Trials compare results, and so see what an optimizer does with the values that they draw: one that leaves out a step
where the norm of all gradients is large does nothing unusual on others. Here every operator of some steps is followed,
whatever the values are (as in taint tracking), and so is every number that the optimizer's Python reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from polylane.compile.objectives import OptimizerFactory
from polylane.compile.optimizer_trials import (
    Parameters,
    Trial,
    are_equal,
    build_on_trial,
    draw_trial,
    draw_true_trials,
    trying,
)
from polylane.compile.origins import ANSWERS, Origin, Origins, SeenArrays
from polylane.optim.modes import set_mode
from polylane.optim.trust import set_sum_over_holders

# A count that begins behind the length of any warm-up, and is a multiple of most periods: of powers of 2 and of 10.
FAR_COUNT = 2**10 * 3**2 * 5**5 * 7


@dataclass
class UpdateTrace:
    """What the updates of an optimizer depend on.

    Attributes:
        whole: names of the parameters of which an update, or a decision, takes more than the element at its own place.
        joined: by parameter, the others on which its update depends.
        line: a line of the user's at which several parameters are computed with, or read; "" where there is none.
        draws: a line at which random numbers are drawn, "?" if that is not the user's; "" where there is none.
    """

    whole: set[str] = field(default_factory=set)
    joined: dict[str, set[str]] = field(default_factory=dict)
    line: str = ""
    draws: str = ""

    def add(self, name: str, origin: Origin) -> None:
        """Record what a parameter's update was computed from."""
        other_names = origin.names - {name}
        self.whole |= origin.whole | (other_names and origin.names)
        self.joined.setdefault(name, set()).update(other_names)
        self.line = self.line or (origin.line if other_names else "")

    def joins(self, group: Collection[str]) -> bool:
        """Return whether an update of a group's parameters depends on parameters that are not in the group."""
        return any(not other_names.issubset(group) for name, other_names in self.joined.items() if name in group)


def trace_updates(parameters: Parameters, factory: OptimizerFactory, sparse: Collection[str] = ()) -> UpdateTrace:
    """Trace steps of an optimizer on parameters as large as the model's, or on small ones, as far as it runs on these.

    Args:
        parameters: (name, parameter) of what is to be traced.
        factory: the user's optimizer factory.
        sparse: names of the parameters whose gradients are sparse: which of their elements are taken is not followed.
    """
    key = _describe_training(parameters, factory, sparse)
    if key is None:
        return _trace_factory(parameters, factory, sparse)
    if key not in _known:
        _known[key] = _trace_factory(parameters, factory, sparse)
    return _known[key]


_known: dict[Any, UpdateTrace] = {}  # of torch's own optimizers, whose steps depend on nothing but what the key has


def _describe_training(parameters: Parameters, factory: OptimizerFactory, sparse: Collection[str]) -> Any:
    """Return all that a trace of torch's own optimizer depends on; None for one of the user's, or with hooks."""
    try:
        trial_parameters, built = build_on_trial(factory, {n: torch.zeros([1] * p.dim()) for n, p in parameters})
    except Exception:  # a factory that knows the shapes of its own model
        return None
    hooks = [getattr(built, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    if "step" in vars(built) or any(hooks) or not type(built).__module__.startswith("torch.optim."):
        return None
    shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in parameters)
    names = {id(p): n for n, p in trial_parameters.items()}
    groups = [
        ([names[id(p)] for p in g["params"]], sorted((k, repr(v)) for k, v in g.items() if k != "params"))
        for g in built.param_groups
    ]
    return type(built), repr(groups), shapes, frozenset(sparse)


def _trace_factory(parameters: Parameters, factory: OptimizerFactory, sparse: Collection[str]) -> UpdateTrace:
    # On the large first: some optimizers go by the size, and none treats small parameters alone in another way.
    is_half = any(p.dtype in (torch.float16, torch.bfloat16) for _, p in parameters)
    large = islice(draw_true_trials(parameters, factory, (), sparse), 2 if is_half else 1)
    trace = _trace_trials(factory, large, sparse)
    return trace or _trace_trials(factory, [draw_trial(parameters, sparse)], sparse) or UpdateTrace()


def _trace_trials(factory: OptimizerFactory, trials: Iterable[Trial], sparse: Collection[str]) -> UpdateTrace | None:
    """Return what the updates of some trials depend on; None where there are none, or the optimizer does not run."""
    trace = None
    try:
        for trial in trials:
            trace = trace or UpdateTrace()
            _trace_trial(factory, trial, sparse, trace)
    except Exception:  # the user's code on tensors that it was not written for: trials tell of it
        return None
    return trace


def _trace_trial(factory: OptimizerFactory, trial: Trial, sparse: Collection[str], trace: UpdateTrace) -> None:
    mode = Origins({n: v.numel() for n, v in trial.values.items()}, sparse)
    base = _train(factory, trial, mode, trace)
    trace.draws = trace.draws or mode.draws
    for origin in mode.reads:
        trace.whole |= origin.whole
        if len(origin.names) > 1:  # Python may do anything with it
            for name in trial.values:
                trace.add(name, origin)
    if len(trial.values) > 1 and any(len(origin.names) == 1 for origin in mode.reads):
        _find_decisions(factory, trial, base, mode, trace)


def _find_decisions(
    factory: OptimizerFactory, trial: Trial, base: Mapping[str, Tensor], mode: Origins, trace: UpdateTrace
) -> None:
    """Find updates that depend on numbers read of other parameters, by giving other numbers to the optimizer.

    An optimizer may add numbers of single parameters up in Python. So the numbers of half of the parameters are
    replaced, and the other half must be updated as before.
    """
    names, read = list(trial.values), {name for origin in mode.reads for name in origin.names}
    half = len(names) // 2
    for group in ({*names[:half]}, {*names[half:]}, {*names[::2]}, {*names[1::2]}):
        if read.isdisjoint(group):
            continue
        try:
            values = _train(factory, trial, Origins(mode.sizes, mode.sparse, group), None)
        except Exception:  # it may refuse such numbers, wherever they come up
            continue
        for name in set(names) - group:
            if not are_equal(base[name], values[name], 0, 0):
                line = next(origin.line for origin in mode.reads if not origin.names.isdisjoint(group))
                trace.add(name, Origin(whole=frozenset(read & group) | {name}, line=line))


def _train(factory: OptimizerFactory, trial: Trial, mode: Origins, trace: UpdateTrace | None) -> dict[str, Tensor]:
    """Return the values of parameters after a trial's first steps.

    Args:
        factory: the user's optimizer factory.
        trial: initial values and gradients.
        mode: records the operators of every step.
        trace: gets what updates depend on, in these steps and at a far count of steps; None: they are not asked for.
    """
    steps = trial.steps[: len(ANSWERS)]
    with trying(), mode, SeenArrays(mode):
        trial_parameters, optimizer = build_on_trial(factory, trial.values, mode.mark)
        set_sum_over_holders(optimizer, mode.forget)
        counts: list[_Counts] = []
        for mode.number, step in enumerate(steps):
            counts.append(_count(optimizer))
            _take_step(trial_parameters, optimizer, step, mode, trace)
        values = {n: p.detach().clone() for n, p in trial_parameters.items()}
        if trace is not None:
            _move_counts(counts[-1], _count(optimizer))
            try:
                for step in steps[:2]:
                    _take_step(trial_parameters, optimizer, step, mode, trace)
            except Exception:  # a schedule of the optimizer's own may end before such counts
                pass
    return values


def _take_step(
    trial_parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    gradients: Mapping[str, Tensor],
    mode: Origins,
    trace: UpdateTrace | None,
) -> None:
    for name, parameter in trial_parameters.items():
        parameter.grad = gradients[name].clone()
        mode.mark(name, parameter)
        mode.mark(name, parameter.grad)
    set_mode(optimizer, True)
    optimizer.step()
    set_mode(optimizer, False)
    for name, parameter in trial_parameters.items() if trace is not None else ():
        trace.add(name, mode.origin_of(parameter))  # type: ignore[union-attr]


# ---- counts ----------------------------------------------------------------------------------------------------------

_Counts = dict[tuple[Any, ...], tuple[Any, Any]]  # numbers by where they are, each with the container that has it


def _count(optimizer: torch.optim.Optimizer) -> _Counts:
    """Return the numbers that an optimizer keeps: in attributes, options and states, also of optimizers inside it."""
    counts, seen_ids = _Counts(), set[int]()

    def visit(value: Any, path: tuple[Any, ...]) -> None:
        if id(value) in seen_ids:
            return
        seen_ids.add(id(value))
        values = vars(value) if isinstance(value, torch.optim.Optimizer) else value
        for key, item in values.items() if isinstance(values, Mapping) else enumerate(values):
            item_path = (*path, id(key) if isinstance(key, Tensor) else key)
            if isinstance(item, (int, float)) and not isinstance(item, bool):
                counts[item_path] = values, item
            elif isinstance(item, (Mapping, list, torch.optim.Optimizer)):
                visit(item, item_path)

    visit(optimizer, ())
    return counts


def _move_counts(old_counts: _Counts, new_counts: _Counts) -> None:
    """Set the numbers that a step has counted up by one to one before a far count."""
    for path, (values, number) in new_counts.items():
        if path in old_counts and number == old_counts[path][1] + 1:
            values[path[-1]] = type(number)(FAR_COUNT - 1)
