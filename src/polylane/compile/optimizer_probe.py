"""Optimizer probe: which parameters an optimizer must see whole, because it does not update them elementwise.

Sharding a parameter over ranks is exact only if each element's update depends on that element alone. No optimizer
declares that, so each is run on small tensors, whole and in halves, and the results are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import OptimizerFactory
from polylane.compile.optimizer_trace import trace_updates
from polylane.compile.optimizer_trials import (
    Parameters,
    Trial,
    are_equal,
    build_on_trial,
    draw_trial,
    draw_true_trials,
    trying,
)
from polylane.errors import describe_error
from polylane.graph.python_state.gradient_hooks import hooked_names
from polylane.graph.sparse_gradients import densify
from polylane.optim.trust import set_sum_over_holders

ROUNDING = 1e-13  # absolute tolerance for values of the order of one, where norms are summed in another order


LOOKS = "its optimizer looks at all of it at once"
HOOKED = "a hook on its gradient looks at all of it at once"


class UntriedOptimizer(str):
    """Reason why an optimizer could not be probed, so that all its parameters stay whole."""

    __slots__ = ()


def find_whole_parameters(
    parameters: Sequence[tuple[str, nn.Parameter]], optimizers: Iterable[OptimizerFactory], sparse: Collection[str] = ()
) -> dict[str, str]:
    """Find the parameters whose update is not elementwise, and those for which that is not known.

    LARS and LAMB take a parameter's norm (You et al., 2017 and 2020), Adafactor the means of rows and columns (Shazeer
    and Stern, 2018), Muon orthogonalizes a matrix. Each optimizer is tried on parameters of the same names and numbers
    of dimensions, whole and in halves: where the results differ, a shard of the parameter is not enough; nor is it
    where steps, as they are traced, compute an element from others, or read them. Trials are small at first, then as
    large as the model's, for some optimizers go by the size
    (:func:`polylane.compile.optimizer_trials.draw_true_trials`). An optimizer that asks for sums over all shards
    (:class:`polylane.optim.SumOverHolders`) gets them here as it will in the training.

    Args:
        parameters: all parameters of the model, by canonical name.
        optimizers: the user's factories, one for each objective.
        sparse: names of the parameters whose gradients are sparse.

    Returns:
        Name -> why it must stay whole; an :class:`UntriedOptimizer` where the optimizer does not run on trial. The
        user's hooks on gradients see whole ones, too.
    """
    reasons = dict.fromkeys(hooked_names(parameters), HOOKED)
    for factory in optimizers:
        reasons = _try_optimizer([(n, p) for n, p in parameters if p.dim() > 0], factory, sparse) | reasons
    return reasons


def _try_optimizer(parameters: Parameters, factory: OptimizerFactory, sparse: Collection[str]) -> dict[str, str]:
    """Return which parameters an optimizer must see whole, and why; all of them where it cannot be tried."""
    trace, failed = trace_updates(parameters, factory, sparse), None
    # Numbers drawn for a part are not those of the whole.
    different = {name for name, _ in parameters} if trace.draws else set(trace.whole)
    try:
        different |= _find_non_elementwise(draw_trial(parameters, sparse), factory)
    except Exception as error:  # the user's code on tensors that it was not written for: whatever it raises
        failed = f"small parameters ({describe_error(error)})"
    try:
        for trial in draw_true_trials(parameters, factory, different, sparse):
            different |= _find_non_elementwise(trial, factory)
            if trial.is_true:  # one that is written for the shapes of its model runs on these
                failed = None
    except Exception as error:
        failed = failed or f"parts of parameters as large as the model's ({describe_error(error)})"
    if failed is not None:
        return {name: UntriedOptimizer(f"its optimizer does not run on {failed}") for name, _ in parameters}
    return dict.fromkeys(different, LOOKS)


def _find_non_elementwise(trial: Trial, factory: OptimizerFactory) -> set[str]:
    different = set[str]()
    with trying():
        full_values = _train_values(factory, trial)
        # Along every dimension: Adafactor's row means survive a split of the columns' dimension only.
        for dim in trial.cut_dims:
            first, second = _train_in_halves(factory, trial, dim)
            for n, value in full_values.items():
                joined = torch.cat([first[n], second[n]], min(dim, value.dim() - 1))
                # One of length 1 has no halves, and was whole in both.
                if not are_equal(value, first[n] if first[n].shape == value.shape else joined, ROUNDING):
                    different.add(n)
    return different


class _HalfSums:
    """Stand-in for :class:`polylane.optim.SumOverHolders`: sums over both halves for the first calls, where known.

    Later calls return the sums over this half alone.

    Args:
        known_sums: for each of the first calls, the sums over both halves by parameter name.

    Attributes:
        names: names of the half's parameters, by id of the tensor.
        asked: for every call so far, this half's partial sums by parameter name.
    """

    def __init__(self, known_sums: Sequence[dict[str, Tensor]]) -> None:
        self._known = known_sums
        self.names: dict[int, str] = {}
        self.asked: list[dict[str, Tensor]] = []

    def __call__(self, parameters: Sequence[Tensor], values: Tensor) -> Tensor:
        names, call = [self.names[id(parameter)] for parameter in parameters], len(self.asked)
        self.asked.append(dict(zip(names, values.clone(), strict=True)))
        if call >= len(self._known) or not names:
            return values
        return torch.stack([self._known[call][n] for n in names])


def _train_in_halves(factory: OptimizerFactory, trial: Trial, dim: int) -> list[dict[str, Tensor]]:
    """Train both halves as two workers would.

    The halves run one after the other, so the first cannot wait for the second's sums. They are trained again once for
    every call: run n answers the first n calls with the sums that both halves had in the runs before.
    """
    known_sums: list[dict[str, Tensor]] = []
    uncut = {n for n, v in trial.values.items() if v.shape[min(dim, v.dim() - 1)] == 1}  # which count once
    while True:
        sums = (_HalfSums(known_sums), _HalfSums(known_sums))
        first, second = sums
        halves = [_train_values(factory, trial, _Half(dim, index, half_sums)) for index, half_sums in enumerate(sums)]
        call = len(known_sums)
        if len(first.asked) == len(second.asked) == call:
            return halves
        if len(first.asked) != len(second.asked) or first.asked[call].keys() != second.asked[call].keys():
            raise ValueError("sum_over_holders must be called once a step, with the same parameters on every worker")
        addends = second.asked[call]
        known_sums.append({n: value if n in uncut else value + addends[n] for n, value in first.asked[call].items()})


@dataclass(frozen=True)
class _Half:
    """One of the halves of all parameters along a dimension, or along the last one of those that have fewer.

    Attributes:
        dim: index of the dimension that is cut.
        index: 0 for the first half, 1 for the second.
        sums: answers what the optimizer asks of both halves.
    """

    dim: int
    index: int
    sums: _HalfSums

    def take(self, full_tensor: Tensor) -> Tensor:
        """Return a copy of this half of a tensor; all of it where its length is 1."""
        dim = min(self.dim, full_tensor.dim() - 1)
        middle = full_tensor.shape[dim] // 2
        part = (slice(None), slice(0, middle), slice(middle, None))[0 if middle == 0 else 1 + self.index]
        half = densify(full_tensor)[(slice(None),) * dim + (part,)].clone()
        return half.to_sparse(1) if full_tensor.is_sparse else half


def _train_values(factory: OptimizerFactory, trial: Trial, half: _Half | None = None) -> dict[str, Tensor]:
    """Return the values of parameters, or of halves of them, after some steps of an optimizer.

    As in a training the optimizer is built on whole parameters, of which each worker then takes its part.
    """
    parameters, optimizer = build_on_trial(factory, trial.values)
    if half is not None:
        half.sums.names = {id(parameter): n for n, parameter in parameters.items()}
        set_sum_over_holders(optimizer, half.sums)
        for parameter in parameters.values():
            full_tensor = parameter.data
            parameter.data = half.take(full_tensor)
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == full_tensor.shape:
                    state[key] = half.take(value)
    for step in trial.steps:
        for n, parameter in parameters.items():
            parameter.grad = step[n].clone() if half is None else half.take(step[n])
        optimizer.step()
    return {n: parameter.detach() for n, parameter in parameters.items()}
