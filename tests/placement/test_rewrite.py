"""A value that moves along several axes of a mesh arrives: no dimension is ever cut by two of them at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.placement.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Placement, Shard, even_cuts
from polylane.placement.rewrite import AxisSplit, State, rewrite_by_axis
from polylane.placement.strategy import Strategy
from polylane.sharding.layout import assemble_parts, local_part
from tests.placement.split_checks import call_for, graph_of, on_rank
from tests.placement.whole_graphs import on_mesh
from tests.support import subsets

SHAPE = (4, 5, 6)
DEGREES = {"x": 2, "y": 3, "z": 2}


def cut(dim: int, axis: int) -> Shard:
    return Shard(dim, even_cuts(SHAPE[dim], list(DEGREES.values())[axis]))


@st.composite
def states(draw: st.DrawFn, *whole: Placement) -> State:
    """A placement on each of three axes, no dimension cut twice."""
    left, found = [0, 1, 2], list[Placement]()
    for axis in range(3):
        kinds = [cut(dim, axis) for dim in left]
        found.append(draw(st.sampled_from([*kinds, *kinds, *whole])))  # more often cut than not
        left = [dim for dim in left if not (isinstance(p := found[-1], Shard) and p.dim == dim)]
    return tuple(found)


def dims(state: State) -> list[int]:
    return [p.dim for p in state if isinstance(p, Shard)]


@settings(max_examples=subsets.examples(300), deadline=None)
@given(states(REPLICATE, REPLICATE_PARTIAL_GRAD, PARTIAL), states(REPLICATE, REPLICATE_PARTIAL_GRAD))
def test_one_axis_at_a_time(have: State, needed: State) -> None:
    now, moves, detours = list(have), 0, 0
    for i, placement in rewrite_by_axis(have, needed):
        assert placement != now[i]
        now[i] = placement
        assert len(set(dims(tuple(now)))) == len(dims(tuple(now))), f"{now} on the way from {have} to {needed}"
        moves, detours = moves + 1, detours + (placement != needed[i])
    assert tuple(now) == needed
    assert moves - detours == sum(a != b for a, b in zip(have, needed, strict=True))
    assert detours <= 1  # there is one circle at most


CIRCLES = [
    ((0, 1, 2), (1, 2, 0)),
    ((0, 1, 2), (2, 0, 1)),
    ((0, 1, 2), (1, 0, 2)),
    ((0, 1, 2), (0, 2, 1)),
    ((0, 1, None), (1, 2, 0)),  # one after another
    ((2, 0, 1), (None, 2, 0)),
]


@pytest.mark.parametrize(("before", "after"), CIRCLES)
def test_circles(before: tuple[int | None, ...], after: tuple[int | None, ...]) -> None:
    """Values and gradients of an operator that needs its input cut otherwise than it comes."""
    have, needed = (
        tuple(REPLICATE if d is None else cut(d, axis) for axis, d in enumerate(each)) for each in (before, after)
    )
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target = torch.ops.aten.sin.default
    graph, _ = graph_of(target, [x], {}, target(x))
    call = call_for(graph, 2, True)
    splits = {
        axis: AxisSplit(degree, {"op": Strategy("as needed", (needed[i],), (needed[i],))}, {("input:0", 0): have[i]})
        for i, (axis, degree) in enumerate(DEGREES.items())
    }

    def work(axes: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        at = {name: axis.index for name, axis in axes.items()}
        own = local_part(x.detach(), dict(zip(DEGREES, have, strict=True)), at).clone().requires_grad_()
        values: dict[Any, Any] = {}
        for node in on_rank(graph, {"op": call}, splits, 1, at).nodes:
            if node.op == "placeholder":
                kind, key = node.meta["role"]
                values[node] = axes[key] if kind == "axis" else own if kind == "input" else None
            elif node.op == "output":
                (out,) = torch.fx.map_arg(node.args[0], values.__getitem__)
            else:
                values[node] = node.target(*torch.fx.map_arg(node.args, values.__getitem__))
        out.backward(weights)
        assert own.grad is not None
        return out.detach(), own.grad

    ranks = on_mesh(DEGREES, work)
    for value, _ in ranks.values():
        torch.testing.assert_close(value, x.detach().sin(), rtol=0, atol=0)
    grads = assemble_parts({at: grad for at, (_, grad) in ranks.items()}, have, tuple(DEGREES.values()))
    torch.testing.assert_close(grads, weights * x.detach().cos(), rtol=1e-12, atol=0)
