"""Operators whose ranks communicate inside give what they give whole on two axes at a time, and on three."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.keyed_random import attention as dropped
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.placement.operator_view import with_neighbour_cuts
from polylane.placement.placement import REPLICATE, Cuts, Shard
from polylane.placement.rewrite import AxisSplit, rewrite
from polylane.placement.rules.registry import composable_operators, strategies
from polylane.placement.strategy import Strategy
from polylane.sharding.admissible import axes_collide
from polylane.sharding.layout import local_part
from tests.placement.split_checks import ThreadAxis, call_for, even_cuts, graph_of, join_cuts, tensor, uneven
from tests.placement.whole_graphs import on_mesh
from tests.support import subsets

aten = torch.ops.aten
MOST = 8  # combinations of strategies that are tried of one case
PART = SampleSlice(4, batch=4, step=3, seed=5)


@dataclass(frozen=True)
class Case:
    """A call of an operator, by the name that rules know it by."""

    op: str
    target: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def classes(*shape: int, most: int) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(sum(shape)))


# ---- what is tried ---------------------------------------------------------------------------------------------------

NONE, MEAN, SUM = 0, 1, 2


def _losses(random: Random) -> Case:
    shape = [random.randint(2, 4), random.randint(2, 7), *(random.randint(2, 4) for _ in range(random.choice([1, 2])))]
    base = random.choice(["cross_entropy_loss", "cross_entropy_loss", "nll_loss_nd"])
    soft = base == "cross_entropy_loss" and random.random() < 0.4
    where = [shape[0], *shape[2:]]
    target = tensor(*shape, seed=3, grad=False).softmax(1) if soft else classes(*where, most=shape[1])
    if not soft and random.random() < 0.5:
        target[classes(*where, most=3) == 0] = -100
    weight = random.choice([None, tensor(shape[1], seed=2, grad=False).abs()])
    more = [random.choice([0.0, 0.2])] if base == "cross_entropy_loss" else []
    reduction = random.choice([NONE, MEAN, MEAN, SUM])
    return Case(base, getattr(aten, base).default, [tensor(*shape), target, weight, reduction, -100, *more])


def _likelihoods(random: Random) -> Case:
    many = random.random() < 0.5
    shape = [random.randint(2, 4), random.randint(2, 5), *((2, 3) if many else ())]
    base = "nll_loss2d" if many else "nll_loss"
    target = classes(shape[0], *shape[2:], most=shape[1])
    return Case(base, getattr(aten, base).default, [tensor(*shape), target, None, random.choice([1, 2]), -100])


def _reductions(random: Random) -> Case:
    x = tensor(random.randint(2, 4), random.randint(2, 5), random.randint(2, 3))
    dims, keep = random.choice([[0, 1], [0, 2], [0, 1, 2], [1]]), random.random() < 0.5
    calls: dict[str, tuple[Any, list[Any]]] = {
        "amax": (aten.amax.default, [dims, keep]),
        "amin": (aten.amin.default, [dims, keep]),
        "max": (aten.max.default, []),
        "min": (aten.min.default, []),
        "any": (aten.any.dims, [dims, keep]),
        "all": (aten.all.dims, [dims, keep]),
        "logsumexp": (aten.logsumexp.default, [dims, keep]),
        "special_logsumexp": (aten.special_logsumexp.default, [dims, keep]),
        "var": (aten.var.correction, [dims]),
        "std": (aten.std.correction, [dims]),
        "var_mean": (aten.var_mean.correction, [dims]),
        "std_mean": (aten.std_mean.correction, [dims]),
        "norm": (aten.norm.ScalarOpt_dim, [random.choice([2, 3]), dims, keep]),
        "linalg_vector_norm": (aten.linalg_vector_norm.default, [random.choice([2, 0.5, 3]), dims, keep]),
    }
    base = random.choice(list(calls))
    target, args = calls[base]
    return Case(base, target, [x > 0.3 if base in ("any", "all") else x, *args])


def _normalizations(random: Random) -> Case:
    shape = [random.randint(2, 4), 2 * random.randint(1, 3), random.randint(2, 5), random.randint(2, 4)]
    behind = shape[random.choice([1, 2, 3]) :]
    of, per = ([tensor(*s, seed=1), tensor(*s, seed=2)] for s in (behind, shape[1:2]))
    means = [tensor(shape[1], seed=4, grad=False), tensor(shape[1], seed=5, grad=False).abs() + 0.5]
    x = tensor(*shape)
    return random.choice(
        [
            Case("layer_norm", aten.layer_norm.default, [x, behind, *of, 1e-3]),
            Case("rms_norm", aten.rms_norm.default, [x, behind, of[0], 1e-3]),
            Case("group_norm", aten.group_norm.default, [x, shape[1] // random.choice([1, 2]), *per, 1e-3]),
            Case("instance_norm", aten.instance_norm.default, [x, *per, None, None, True, 0.1, 1e-3, True]),
            Case("batch_norm", batch_norm, [PART, x, *per, *means, True, 0.1, 1e-3, True]),
        ]
    )


def _attention(random: Random) -> Case:
    heads, few = random.choice([(4, 4), (4, 2), (3, 1)])
    q = random.randint(2, 7)
    causal = random.random() < 0.5
    k = q if causal else random.randint(2, 7)
    args = [tensor(2, heads, q, 3), tensor(2, few, k, 3, seed=1), tensor(2, few, k, 2, seed=2)]
    mask = random.choice([None, tensor(2, heads, q, k, seed=3, grad=False), tensor(q, k, seed=3, grad=False) > -0.8])
    more, options = [None if causal else mask, random.choice([0.0, 0.0, 0.4]), causal], {"enable_gqa": few < heads}
    base = "scaled_dot_product_attention"
    if more[1]:
        return Case(base, dropped, [PART, 7, 0, *args, *more], options)
    return Case(base, aten.scaled_dot_product_attention.default, [*args, *more], options)


def _convolutions(random: Random) -> Case:
    groups, spatial = random.choice([1, 2]), random.choice([1, 2, 2, 3])
    x = tensor(2, 2 * groups, *(random.randint(5, 8 if spatial < 3 else 6) for _ in range(spatial)))

    def each(low: int, high: int) -> list[int]:
        return [random.randint(low, high) for _ in range(spatial)]

    kernel, stride, padding, dilation = each(1, 3), each(1, 2), each(0, 1), each(1, 2)
    if random.random() < 0.4:
        base = f"conv_transpose{spatial}d"
        target = getattr(aten, base).default if spatial == 1 else getattr(aten, base).input
        weight = tensor(2 * groups, 3, *kernel, seed=1)
        return Case(
            base, target, [x, weight, tensor(3 * groups, seed=2), stride, padding, [0] * spatial, groups, dilation]
        )
    weight = tensor(3 * groups, 2, *kernel, seed=1)
    bias = tensor(3 * groups, seed=2)
    if random.random() < 0.3:
        args = [x, weight, bias, stride, padding, dilation, False, [0] * spatial, groups]
        if random.random() < 0.5:
            return Case("_convolution", aten._convolution.default, [*args, False, False, False, False])
        return Case("convolution", aten.convolution.default, args)
    base = f"conv{spatial}d"
    return Case(base, getattr(aten, base).default, [x, weight, bias, stride, padding, dilation, groups])


def _pooling(random: Random) -> Case:
    spatial = random.choice([1, 2, 2, 3])
    x = tensor(2, 3, *(random.randint(4, 9 if spatial < 3 else 5) for _ in range(spatial)))
    kernel, stride = ([random.randint(low, 3) for _ in range(spatial)] for low in (2, 1))
    base = f"{random.choice(['max', 'avg'])}_pool{spatial}d"
    return Case(base, getattr(aten, base).default, [x, kernel, stride, [random.randint(0, 1) for _ in range(spatial)]])


FAMILIES = [_losses, _likelihoods, _reductions, _normalizations, _attention, _convolutions, _pooling]


# ---- trying it -------------------------------------------------------------------------------------------------------


def odd_cuts(size: int, degree: int) -> tuple[Cuts, ...]:
    """As neighbours may ask for: uneven, with an empty part, in two segments."""
    two = [join_cuts([even_cuts(size // 2, degree)] * 2)] if size % 2 == 0 and size > 2 else []
    return (uneven(size, degree), ((*[0] * degree, size),), *two)


class Trial:
    """One call, whole, and everything that may be chosen for it on axes of some degrees."""

    def __init__(self, case: Case, degrees: Sequence[int]) -> None:
        leaves = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in case.args]
        value = case.target(*leaves, **case.kwargs)
        self.outs = [value] if isinstance(value, Tensor) else list(value)
        self.seeds = [tensor(*o.shape, seed=8, grad=False) if o.requires_grad else None for o in self.outs]
        flowing = [(o, s) for o, s in zip(self.outs, self.seeds, strict=True) if s is not None]
        if flowing:
            torch.autograd.backward([o for o, _ in flowing], [s for _, s in flowing])
        self.whole = [a for a in leaves if isinstance(a, Tensor)]
        own = isinstance(case.target, torch._ops.OpOverload)
        self.graph, self.tensors = graph_of(case.target, case.args, case.kwargs, value)
        self.degrees, self.name = degrees, case.op
        self.calls = []
        for degree in degrees:
            call = call_for(self.graph, degree, bool(flowing), None if own else f"aten.{case.op}.default")
            places = [(v.side, v.index, d, n) for v in (*call.inputs, *call.outputs) for d, n in enumerate(v.shape)]
            asked = {(part, i, d): odd_cuts(n, degree) for part, i, d, n in places if n > 1}
            self.calls.append(with_neighbour_cuts(call, asked))

    def choices(self) -> list[tuple[Strategy, ...]]:
        """All that may be chosen together and of which one communicates inside."""
        found = product(*([s for s in strategies(call) if _cuts(s)] for call in self.calls))
        return [
            chosen
            for chosen in found
            if any(s.sent or s.messages for s in chosen)
            and not any(axes_collide(a, b, self.name in composable_operators()) for a, b in combinations(chosen, 2))
        ]

    def check(self, chosen: Sequence[Strategy]) -> None:
        """Every rank's values, gradients and what was written in place, against the whole's."""
        names = "xyz"[: len(chosen)]
        written = self.calls[0].written_inputs
        splits = {
            axis: AxisSplit(
                degree, {"op": s}, {(f"input:{i}", 0): p if i in written else REPLICATE for i, p in enumerate(s.inputs)}
            )
            for axis, degree, s in zip(names, self.degrees, chosen, strict=True)
        }

        def work(axes: dict[str, ThreadAxis]) -> None:
            at = {name: axis.index for name, axis in axes.items()}
            own = rewrite(self.graph, {"op": self.calls[0]}, splits, 1, at)
            lies = [
                {axis: split.source_placements[f"input:{i}", 0] for axis, split in splits.items()}
                for i in range(len(self.tensors))
            ]
            given = [
                local_part(t.detach().clone(), p, at).requires_grad_(t.requires_grad)
                for t, p in zip(self.tensors, lies, strict=True)
            ]
            table = {"axis": axes, "input": given, "part": [PART]}
            placed = [table[kind][key] for kind, key in (n.meta["role"] for n in own.nodes if n.op == "placeholder")]
            results = fx.Interpreter(fx.GraphModule({}, own)).run(*placed)
            roots = [(r, s) for r, s in zip(results, self.seeds, strict=True) if s is not None]
            if roots:
                torch.autograd.backward([r for r, _ in roots], [s for _, s in roots])
            told = f"{self.name}, {', '.join(s.name for s in chosen)}, at {at}"
            for result, right in zip(results, self.outs, strict=True):
                _close(result.detach(), right.detach(), told)
            for mine, right, placed in zip(given, self.whole, lies, strict=True):
                _close(mine.detach(), local_part(right.detach(), placed, at), f"{told}: an input")
                if right.grad is not None:
                    _close(mine.grad, right.grad, f"{told}: a gradient")

        on_mesh(dict(zip(names, self.degrees, strict=True)), work)


def _cuts(strategy: Strategy) -> bool:
    return any(isinstance(p, Shard) for p in (*strategy.inputs, *strategy.outputs))


def _close(value: Any, right: Tensor, told: str) -> None:
    torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-10, equal_nan=True, msg=lambda m: f"{told}: {m}")


def some(random: Random, family: Callable[[Random], Case], degrees: Sequence[int]) -> None:
    """Try some combinations of one random call's strategies."""
    trial = Trial(family(random), degrees)
    every = trial.choices()
    for chosen in random.sample(every, min(MOST, len(every))):
        trial.check(chosen)


@pytest.mark.parametrize(
    "seed", subsets.one_in(2, [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60))])
)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_axes(family: Callable[[Random], Case], seed: int) -> None:
    some(Random(seed), family, [2 + seed % 2, 2])


@pytest.mark.parametrize(
    "seed", subsets.one_in(2, [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_axes(family: Callable[[Random], Case], seed: int) -> None:
    some(Random(seed), family, [2, 2, 2])


def test_all_that_is_said_to_go_together_is_tried() -> None:
    assert {family(Random(seed)).op for family in FAMILIES for seed in range(100)} == composable_operators()


def test_what_is_tried_communicates() -> None:
    for family in FAMILIES:
        assert sum(len(Trial(family(Random(seed)), [2, 2]).choices()) for seed in range(4)) > 4


def test_a_rank_with_nothing_skips_what_others_wait_for() -> None:
    case = Case("max_pool2d", aten.max_pool2d.default, [tensor(2, 3, 6, 4), [3, 3], [1, 1], [1, 1]])
    found = strategies(Trial(case, [3]).calls[0])
    high = next(s for s in found if s.name == "height" and s.messages)
    few = [s for s in found if s.name == "samples"]  # two of them over three ranks
    assert few and all(axes_collide(high, s, together=True) for s in few)
