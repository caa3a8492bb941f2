"""Optimizer probe: which parameters an optimizer must see whole, because it does not update them elementwise.

Sharding a parameter over ranks is exact only if each element's update depends on that element alone. No optimizer
declares that, so each is run on small tensors, whole and in halves, and the results are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from polylane.compile.objectives import OptimizerFactory
from polylane.errors import PolylaneError
from polylane.graph.python_state.gradient_hooks import hooked_names
from polylane.graph.sparse_gradients import densify
from polylane.optim.trust import set_sum_over_holders

SIZE = 4  # length of every dimension of the parameters that an optimizer is tried on
ROUNDING = 1e-13  # absolute tolerance for values of the order of one, where norms are summed in another order
MOST_SAID = 200  # characters of an error message that are quoted


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
    and Stern, 2018), Muon orthogonalizes a matrix. Each optimizer is tried on small parameters of the same names and
    numbers of dimensions, whole and in halves: where the results differ, a shard of the parameter is not enough. An
    optimizer that asks for sums over all shards (:class:`polylane.optim.SumOverHolders`) gets them here as it will in
    the training.

    Args:
        parameters: all parameters of the model, by canonical name.
        optimizers: the user's factories, one for each objective.
        sparse: names of the parameters whose gradients are sparse.

    Returns:
        Name -> why it must stay whole; an :class:`UntriedOptimizer` where the optimizer does not run on small
        parameters. The user's hooks on gradients see whole ones, too.
    """
    found = dict.fromkeys(hooked_names(parameters), HOOKED)
    for factory in optimizers:
        try:
            found = dict.fromkeys(_find_non_elementwise(parameters, factory, sparse), LOOKS) | found
        except Exception as error:  # the user's code on tensors that it was not written for: whatever it raises
            why = UntriedOptimizer(f"its optimizer does not run on small parameters ({describe_error(error)})")
            found = {n: why for n, p in parameters if p.dim() > 0} | found
    return found


def describe_error(error: Exception) -> str:
    """Return what was raised, on one line and shortened."""
    said = " ".join(str(error).split()) or "no message"
    said = said if len(said) <= MOST_SAID else f"{said[:MOST_SAID]}…"
    return said if isinstance(error, PolylaneError) else f"{type(error).__name__}: {said}"


def draw_trial(
    parameters: Sequence[tuple[str, nn.Parameter]], sparse: Collection[str] = ()
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return small values for parameters of these names and numbers of dimensions, and gradients of two steps.

    The gradients of parameters named in ``sparse`` are sparse tensors.
    """
    # Two steps, so that states (moments, momentum) take part; float64, so that only the algorithm makes a difference.
    random = torch.Generator().manual_seed(0)
    values = {n: torch.randn([SIZE] * p.dim(), generator=random, dtype=torch.float64) for n, p in parameters}
    steps = [{n: torch.randn(v.shape, generator=random, dtype=torch.float64) for n, v in values.items()} for _ in "12"]
    return values, [{n: g.to_sparse(1) if n in sparse else g for n, g in step.items()} for step in steps]


def small_parameters(values: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """Return new parameters with these values, by name."""
    return {n: nn.Parameter(v.clone()) for n, v in values.items()}


def build_on_trial(
    factory: OptimizerFactory, values: Mapping[str, torch.Tensor]
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Build an optimizer on new parameters with the values; return both.

    Raises:
        ValueError: the optimizer takes other parameters than those that its factory is given.
    """
    own = small_parameters(values)
    optimizer = factory(list(own.items()))
    given = {id(parameter) for parameter in own.values()}
    if any(id(parameter) not in given for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("optimizer(parameters) takes other parameters than those that it is given")
    return own, optimizer


def _find_non_elementwise(
    parameters: Sequence[tuple[str, nn.Parameter]], factory: OptimizerFactory, sparse: Collection[str]
) -> set[str]:
    values, steps = draw_trial([(n, p) for n, p in parameters if p.dim() > 0], sparse)
    different = set[str]()
    with torch.random.fork_rng(devices=[]):
        whole = _train_values(factory, values, steps)
        # Along every dimension: Adafactor's row means survive a split of the columns' dimension only.
        for dim in range(max(map(len, (v.shape for v in values.values())), default=0)):
            halves = _train_in_halves(factory, values, steps, dim)
            for n, value in whole.items():
                joined = torch.cat([half[n] for half in halves], min(dim, value.dim() - 1))
                if not torch.allclose(value, joined, rtol=1e-9, atol=ROUNDING):
                    different.add(n)
    return different


class _HalfSums:
    """Stand-in for :class:`polylane.optim.SumOverHolders`: sums over both halves for the first calls, where known.

    Later calls return the sums over this half alone.

    Args:
        known: for each of the first calls, the sums over both halves by parameter name.

    Attributes:
        names: names of the half's parameters, by id of the tensor.
        asked: for every call so far, this half's partial sums by parameter name.
    """

    def __init__(self, known: Sequence[dict[str, torch.Tensor]]) -> None:
        self._known = known
        self.names: dict[int, str] = {}
        self.asked: list[dict[str, torch.Tensor]] = []

    def __call__(self, parameters: Sequence[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        names, call = [self.names[id(parameter)] for parameter in parameters], len(self.asked)
        self.asked.append(dict(zip(names, values.clone(), strict=True)))
        if call >= len(self._known) or not names:
            return values
        return torch.stack([self._known[call][n] for n in names])


def _train_in_halves(
    factory: OptimizerFactory, values: dict[str, torch.Tensor], steps: Sequence[dict[str, torch.Tensor]], dim: int
) -> list[dict[str, torch.Tensor]]:
    """Train both halves as two workers would.

    The halves run one after the other, so the first cannot wait for the second's sums. They are trained again once for
    every call: run n answers the first n calls with the sums that both halves had in the runs before.
    """
    known: list[dict[str, torch.Tensor]] = []
    parts = (slice(0, SIZE // 2), slice(SIZE // 2, SIZE))
    while True:
        first, second = (_HalfSums(known), _HalfSums(known))
        halves = [
            _train_values(factory, _take_half(values, dim, part), [_take_half(step, dim, part) for step in steps], sums)
            for part, sums in zip(parts, (first, second), strict=True)
        ]
        call = len(known)
        if len(first.asked) == len(second.asked) == call:
            return halves
        if len(first.asked) != len(second.asked) or first.asked[call].keys() != second.asked[call].keys():
            raise ValueError("sum_over_holders must be called once a step, with the same parameters on every worker")
        known.append({n: own + second.asked[call][n] for n, own in first.asked[call].items()})


def _take_half(values: dict[str, torch.Tensor], dim: int, part: slice) -> dict[str, torch.Tensor]:
    """Slice tensors along a dimension, or along the last one of tensors that have fewer."""
    halves = {}
    for n, v in values.items():
        half = densify(v)[(slice(None),) * min(dim, v.dim() - 1) + (part,)]
        halves[n] = half.to_sparse(1) if v.is_sparse else half
    return halves


def _train_values(
    factory: OptimizerFactory,
    values: dict[str, torch.Tensor],
    gradients: Sequence[dict[str, torch.Tensor]],
    sums: _HalfSums | None = None,
) -> dict[str, torch.Tensor]:
    own, optimizer = build_on_trial(factory, values)
    if sums is not None:
        sums.names = {id(parameter): n for n, parameter in own.items()}
        set_sum_over_holders(optimizer, sums)
    for step in gradients:
        for n, parameter in own.items():
            parameter.grad = step[n].clone()
        optimizer.step()
    return {n: parameter.detach() for n, parameter in own.items()}
