"""Views, permutations, expansion and repetition, split in every way, give what they give whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.placement.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Cuts,
    Placement,
    Shard,
    repeat_cuts,
    scale_cuts,
)
from polylane.placement.rewrite import AxisSplit, rewrite
from polylane.placement.rules.registry import strategies
from polylane.placement.rules.shape import DimensionBlock, convert_cuts, simplify_cuts
from polylane.placement.strategy import Strategy
from tests.placement.split_checks import call_for, check, even_cuts, graph_of, join_cuts, tensor, uneven
from tests.support import subsets

aten = torch.ops.aten
few = settings(max_examples=subsets.examples(12), deadline=None)
DEGREES = st.sampled_from([2, 3])
SIZES = st.integers(1, 5)
VIEWS = ("view", "reshape", "_unsafe_view")


def dims(found: Collection[Strategy]) -> set[tuple[int, int]]:
    """(cut dimension of the first input, of the first output) of the strategies that cut both."""
    return {
        (s.inputs[0].dim, s.outputs[0].dim)
        for s in found
        if isinstance(s.inputs[0], Shard) and isinstance(s.outputs[0], Shard)
    }


def passes(found: Collection[Strategy]) -> bool:
    """Whether there is a strategy that takes summands to summands."""
    return any(s.inputs[0] == PARTIAL and s.outputs[0] == PARTIAL for s in found)


def offers(found: Collection[Strategy], source: Placement, target: Placement) -> bool:
    return any(s.inputs[0] == source and s.outputs[0] == target for s in found)


# ---- views -----------------------------------------------------------------------------------------------------------


@given(
    SIZES, SIZES, st.integers(1, 4), st.integers(1, 3), DEGREES, st.sampled_from(["view", "reshape", "_unsafe_view"])
)
@few
def test_heads_are_split_off_and_laid_together(b: int, t: int, h: int, d: int, degree: int, name: str) -> None:
    operator = getattr(aten, name).default
    apart = check(operator, [tensor(b, t, h * d), [b, t, h, d]], degree=degree)
    heads = Shard(2, even_cuts(h, degree))
    assert passes(apart)
    assert offers(apart, Shard(2, scale_cuts(heads.cuts, d)), heads) == (h > 1)
    together = check(operator, [tensor(b, t, h, d), [b, t, h * d]], degree=degree)
    assert offers(together, heads, Shard(2, scale_cuts(heads.cuts, d))) == (h > 1)
    if t > 1:
        assert (1, 1) in dims(apart) and (1, 1) in dims(together)


@given(SIZES, SIZES, SIZES, DEGREES, st.booleans())
@few
def test_positions_of_every_sample(b: int, t: int, d: int, degree: int, inferred: bool) -> None:
    cuts = {("in", 0, 1): [uneven(t, degree)]} if t > 1 else None
    flat = check(aten.view.default, [tensor(b, t, d), [-1 if inferred else b * t, d]], degree=degree, cuts=cuts)
    rows = simplify_cuts(repeat_cuts(even_cuts(t, degree), t, b))
    assert offers(flat, Shard(1, even_cuts(t, degree)), Shard(0, rows)) == (t > 1)
    assert offers(flat, Shard(0, even_cuts(b, degree)), Shard(0, scale_cuts(even_cuts(b, degree), t))) == (b > 1)
    assert offers(flat, Shard(2, even_cuts(d, degree)), Shard(1, even_cuts(d, degree))) == (d > 1)
    back = check(aten.view.default, [tensor(b * t, d), [b, t, d]], degree=degree, cuts={("in", 0, 0): [rows]})
    assert offers(back, Shard(0, rows), Shard(1, even_cuts(t, degree))) == (t > 1)


@given(st.integers(2, 4), st.integers(2, 5), st.integers(1, 3), DEGREES)
@few
def test_three_projections_in_one(b: int, h: int, d: int, degree: int) -> None:
    fused = join_cuts([scale_cuts(even_cuts(h, degree), d)] * 3)
    apart = check(aten.view.default, [tensor(b, 3 * h * d), [b, 3, h, d]], degree=degree)
    assert offers(apart, Shard(1, simplify_cuts(fused)), Shard(2, even_cuts(h, degree)))
    together = check(aten.reshape.default, [tensor(3, h, d), [3 * h * d]], degree=degree)
    assert offers(together, Shard(1, even_cuts(h, degree)), Shard(0, simplify_cuts(fused)))


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
@settings(max_examples=subsets.examples(40), deadline=None)
def test_any_shapes(shape: list[int], data: st.DataObject) -> None:
    """The same elements in any other shape, with dimensions of 1 anywhere and neighbours that ask for odd cuts."""
    left, other = math.prod(shape), []
    while left > 1 and len(other) < 4:
        factor = data.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        other.append(factor)
        left //= factor
    other += [left] * (left != 1)
    other.insert(data.draw(st.integers(0, len(other))), 1)
    degree = data.draw(DEGREES)
    cuts = {("in", 0, i): [uneven(n, degree)] for i, n in enumerate(shape) if n > 1}
    cuts |= {("out", 0, i): [uneven(n, degree, 2)] for i, n in enumerate(other) if n > 1}
    found = check(aten.reshape.default, [tensor(*shape), other], degree=degree, cuts=cuts)
    assert passes(found)
    if math.prod(shape) > 1:
        same = check(aten.view.default, [tensor(*shape), [1, *shape]], degree=degree)
        assert dims(same) == {(i, i + 1) for i, n in enumerate(shape) if n > 1}


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(
    ("operator", "shape", "args", "expected"),
    [
        (aten.flatten.using_ints, (4, 3, 2), [1, -1], {(0, 0), (1, 1), (2, 1)}),
        (aten.flatten.using_ints, (4, 3, 2), [], {(0, 0), (1, 0), (2, 0)}),
        (aten.ravel.default, (4, 3), [], {(0, 0), (1, 0)}),
        (aten.unflatten.int, (4, 6), [-1, [3, -1]], {(0, 0), (1, 1), (1, 2)}),
        (aten.squeeze.default, (1, 3, 1, 3), [], {(1, 0), (3, 1)}),
        (aten.squeeze.dim, (3, 1, 2), [0], {(0, 0), (2, 2)}),
        (aten.squeeze.dim, (3, 1, 2), [-2], {(0, 0), (2, 1)}),
        (aten.squeeze.dims, (3, 1, 2, 1), [[0, 1]], {(0, 0), (2, 1)}),
        (aten.unsqueeze.default, (3, 2), [-1], {(0, 0), (1, 1)}),
        (aten.unsqueeze.default, (3, 2), [1], {(0, 0), (1, 2)}),
        (aten.atleast_1d.default, (3, 2), [], {(0, 0), (1, 1)}),
        (aten.atleast_2d.default, (3,), [], {(0, 1)}),
        (aten.atleast_3d.default, (3, 2), [], {(0, 0), (1, 1)}),
        (aten.view.default, (), [[1, 1]], set()),
        (aten.reshape.default, (3, 0), [[0, 2]], set()),
    ],
)
def test_forms_of_views(
    operator: Any, shape: tuple[int, ...], args: list[Any], expected: set[Any], degree: int
) -> None:
    found = check(operator, [tensor(*shape), *args], degree=degree)
    assert dims(found) == expected
    assert passes(found)


@pytest.mark.parametrize("operator", [aten.view_as.default, aten.reshape_as.default])
def test_like_another(operator: Any) -> None:
    found = check(operator, [tensor(4, 6), tensor(4, 2, 3, seed=1)])
    assert dims(found) == {(0, 0), (1, 1), (1, 2)}
    assert {type(s.inputs[1]) for s in found if isinstance(s.outputs[0], Shard)} == {
        Shard,
        type(REPLICATE_PARTIAL_GRAD),
    }


def test_what_is_not_contiguous_on_a_rank() -> None:
    """A part of a matrix is laid out otherwise than the whole: a view of it may not be one."""
    check(aten.view.default, [tensor(4, 6), [24]], cuts={("in", 0, 1): [even_cuts(6, 2)]})
    x = tensor(3, 4, 5).detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    check(aten.view.default, [x, [3, 2, 2, 5]])


def test_bytes_as_another_type() -> None:
    x = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    assert dims(check(aten.view.dtype, [x, torch.float32], tolerance=0)) == {(0, 0), (1, 1)}
    assert dims(check(aten.view.dtype, [x, torch.int64])) == {(0, 0)}


def test_complex_views() -> None:
    found = check(aten.view_as_complex.default, [tensor(3, 4, 2)])
    assert dims(found) == {(0, 0), (1, 1)} and passes(found)
    z = torch.complex(tensor(3, 4).detach(), tensor(3, 4, seed=1).detach()).requires_grad_()
    found = check(aten.view_as_real.default, [z], degree=3)
    assert dims(found) == {(0, 0), (1, 1)} and passes(found)


# ---- permutations ----------------------------------------------------------------------------------------------------


@given(st.lists(SIZES, min_size=1, max_size=4), st.data(), DEGREES)
@few
def test_permute(shape: list[int], data: st.DataObject, degree: int) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    cuts = {("in", 0, i): [uneven(n, degree), join_cuts([even_cuts(n - 1, degree), even_cuts(1, degree)])]
            for i, n in enumerate(shape) if n > 1}  # fmt: skip
    found = check(aten.permute.default, [tensor(*shape), [order[0] - len(shape), *order[1:]]], degree=degree, cuts=cuts)
    assert dims(found) == {(i, o) for o, i in enumerate(order) if shape[i] > 1}
    assert passes(found)


@pytest.mark.parametrize(
    ("operator", "args", "order"),
    [
        (aten.transpose.int, [-1, 0], (2, 1, 0)),
        (aten.swapaxes.default, [0, 1], (1, 0, 2)),
        (aten.swapdims.default, [1, -1], (0, 2, 1)),
        (aten.numpy_T.default, [], (2, 1, 0)),
        (aten.mT.default, [], (0, 2, 1)),
        (aten.mH.default, [], (0, 2, 1)),
        (aten.adjoint.default, [], (0, 2, 1)),
        (aten.movedim.int, [0, -1], (1, 2, 0)),
        (aten.movedim.intlist, [[0, 1], [2, 0]], (1, 2, 0)),
        (aten.moveaxis.int, [2, 0], (2, 0, 1)),
        (aten.moveaxis.intlist, [[2], [1]], (0, 2, 1)),
    ],
)
def test_forms_of_permutations(operator: Any, args: list[Any], order: tuple[int, ...]) -> None:
    found = check(operator, [tensor(2, 3, 4), *args])
    assert dims(found) == {(i, o) for o, i in enumerate(order)}
    assert passes(found)


def test_matrices() -> None:
    assert dims(check(aten.t.default, [tensor(4, 3)], degree=3)) == {(0, 1), (1, 0)}
    assert dims(check(aten.t.default, [tensor(4)])) == {(0, 0)}
    assert dims(check(aten.matrix_H.default, [tensor(4, 3)])) == {(0, 1), (1, 0)}


# ---- expansion and repetition ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=3), st.integers(0, 3), DEGREES, st.booleans())
@few
def test_expand(each: list[tuple[int, bool]], new: int, degree: int, kept: bool) -> None:
    out = [*([new] if new else []), *(n for n, _ in each)]
    size = out if kept else [*out[: len(out) - len(each)], *(n if expanded else -1 for n, expanded in each)]
    x = tensor(*(1 if expanded else n for n, expanded in each))
    found = check(aten.expand.default, [x, size], degree=degree)
    assert passes(found)
    cut = {s.outputs[0].dim for s in found if isinstance(s.outputs[0], Shard)}
    assert cut == {i for i, n in enumerate(out) if n > 1}
    first = len(out) - len(each)
    assert dims(found) == {(i, i + first) for i, (n, expanded) in enumerate(each) if n > 1 and not expanded}


def test_expand_like_another() -> None:
    found = check(aten.expand_as.default, [tensor(4, 1), tensor(3, 4, 5, seed=1)])
    assert dims(found) == {(0, 1)} and passes(found)
    check(aten.broadcast_to.default, [tensor(4, 1), [3, 4, 5]], degree=3)
    several = check(aten.broadcast_tensors.default, [[tensor(4, 1), tensor(5, seed=1), tensor(3, 4, 5, seed=2)]])
    assert {s.outputs[0].dim for s in several if isinstance(s.outputs[0], Shard)} == {0, 1, 2}
    assert passes(several)


@given(st.lists(SIZES, min_size=1, max_size=2), st.integers(0, 1), st.data(), DEGREES, st.booleans())
@few
def test_repeat(shape: list[int], new: int, data: st.DataObject, degree: int, tile: bool) -> None:
    times = data.draw(st.lists(st.integers(1, 4), min_size=len(shape) + new, max_size=len(shape) + new))
    fewer = tile and not new and len(times) > 1 and times[0] == 1
    cuts = {("in", 0, i): [uneven(n, degree)] for i, n in enumerate(shape) if n > 1}
    for o, (n, k) in enumerate(zip([1] * new + shape, times, strict=True)):
        if n * k > 1:
            cuts["out", 0, o] = [scale_cuts(even_cuts(k, degree), n)]
    operator = aten.tile.default if tile else aten.repeat.default
    found = check(operator, [tensor(*shape), times[1:] if fewer else times], degree=degree, cuts=cuts)
    assert passes(found)
    assert {(i, i + new) for i, n in enumerate(shape) if n > 1 and times[i + new] == 1} <= dims(found)
    for i, n in enumerate(shape):
        if n > 1:
            copies = simplify_cuts(repeat_cuts(even_cuts(n, degree), n, times[i + new]))
            assert offers(found, Shard(i, even_cuts(n, degree)), Shard(i + new, copies))
    whole = {
        s.outputs[0].dim for s in found if s.inputs[0] == REPLICATE_PARTIAL_GRAD and isinstance(s.outputs[0], Shard)
    }
    assert whole == {o for o, k in enumerate(times) if k > 1}


@given(SIZES, st.integers(2, 4), SIZES, st.integers(1, 3), DEGREES, st.booleans())
@few
def test_repeat_interleave(b: int, h: int, d: int, times: int, degree: int, sized: bool) -> None:
    kwargs = {"output_size": h * times} if sized else {}
    found = check(aten.repeat_interleave.self_int, [tensor(b, h, d), times, -2], kwargs, degree=degree)
    assert passes(found)
    assert offers(found, Shard(1, even_cuts(h, degree)), Shard(1, scale_cuts(even_cuts(h, degree), times)))
    assert {i for i, _ in dims(found)} == {1, *([0] if b > 1 else []), *([2] if d > 1 else [])}
    flat = check(aten.repeat_interleave.self_int, [tensor(b, h), times], degree=degree)
    assert offers(
        flat,
        Shard(1, even_cuts(h, degree)),
        Shard(0, simplify_cuts(repeat_cuts(scale_cuts(even_cuts(h, degree), times), h * times, b))),
    )


def test_repeat_interleave_by_a_tensor() -> None:
    found = check(aten.repeat_interleave.self_Tensor, [tensor(3, 4), torch.tensor([2, 0, 1]), 0])
    assert dims(found) == {(1, 1)}
    check(aten.repeat_interleave.self_Tensor, [tensor(3, 4), torch.full((12,), 2)])


# ---- within dimensions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(
    ("operator", "args", "expected"),
    [
        (aten.roll.default, [[1], [1]], {0, 2}),
        (aten.roll.default, [[1, -2], [0, -1]], {1}),
        (aten.roll.default, [[2]], set()),
        (aten.flip.default, [[0, -1]], {1}),
        (aten.flip.default, [[]], {0, 1, 2}),
        (aten.fliplr.default, [], {0, 2}),
        (aten.flipud.default, [], {1, 2}),
        (aten.rot90.default, [2, [0, 1]], {2}),
        (aten.rot90.default, [1, [0, 1]], set()),
    ],
)
def test_turned(operator: Any, args: list[Any], expected: set[int], degree: int) -> None:
    found = check(operator, [tensor(4, 3, 5), *args], degree=degree)
    assert dims(found) == {(d, d) for d in expected}
    assert passes(found)


@given(SIZES, SIZES, st.integers(-3, 3), DEGREES, st.sampled_from([aten.tril.default, aten.triu.default]))
@few
def test_triangles(rows: int, columns: int, diagonal: int, degree: int, operator: Any) -> None:
    cuts = {
        ("in", 0, 1): [uneven(rows, degree)],
        ("in", 0, 2): [uneven(columns, degree), join_cuts([even_cuts(2, degree)] * 2)],
    }
    cuts = {place: each for place, each in cuts.items() if (rows, columns)[place[2] - 1] == 4}
    found = check(operator, [tensor(2, rows, columns), diagonal], degree=degree, cuts=cuts)
    assert dims(found) == {(0, 0), *([(1, 1)] if rows > 1 else []), *([(2, 2)] if columns > 1 else [])}
    assert passes(found)


def test_diagonals() -> None:
    found = check(aten.diagonal.default, [tensor(3, 4, 2, 5), 1, 0, -1], degree=3)
    assert dims(found) == {(1, 0), (2, 1)} and passes(found)
    found = check(aten.diag_embed.default, [tensor(3, 4, 2), -1, 0, 2])
    assert dims(found) == {(0, 1), (1, 3)} and passes(found)


def test_windows() -> None:
    found = check(aten.unfold.default, [tensor(3, 7, 2), 1, 3, 2], degree=3)
    assert dims(found) == {(0, 0), (2, 2)} and passes(found)


# ---- constants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 3])
def test_constants(degree: int) -> None:
    x = tensor(4, 3)
    for operator, more in ((aten.zeros_like, []), (aten.ones_like, []), (aten.full_like, [2.5])):
        found = check(operator.default, [x, *more], degree=degree)
        assert dims(found) == {(0, 0), (1, 1)}
        assert offers(found, PARTIAL, REPLICATE)
    for operator, more in ((aten.new_zeros, []), (aten.new_ones, []), (aten.new_full, [2.5])):
        found = check(operator.default, [x, [4, 5], *more], {"dtype": torch.float32}, degree=degree)
        assert {s.outputs[0].dim for s in found if isinstance(s.outputs[0], Shard)} == {0, 1}
        assert dims(found) == {(0, 0)}
        assert all(offers(found, Shard(d, even_cuts(n, degree)), REPLICATE) for d, n in enumerate(x.shape))


# ---- cuts ------------------------------------------------------------------------------------------------------------


@st.composite
def some_cuts(draw: st.DrawFn, degree: int = 3) -> Cuts:
    result, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        inner = sorted(draw(st.lists(st.integers(0, 4), min_size=degree, max_size=degree)))
        result.append((at, *(at + p for p in inner)))
        at += inner[-1]
    return tuple(result)


def owners(cuts: Cuts) -> list[int]:
    shard = Shard(0, cuts)
    ranges = {(a, b): i for i in range(len(cuts[0]) - 1) for a, b in shard.ranges(i)}
    return [next(i for (a, b), i in ranges.items() if a <= p < b) for p in range(shard.size)]


@given(some_cuts())
def test_shortest(cuts: Cuts) -> None:
    """Of the same parts, and in one form only: that which is built from their owners one by one."""
    short = simplify_cuts(cuts)
    assert owners(short) == owners(cuts) and short[-1][-1] == cuts[-1][-1]
    one_by_one = [tuple(int(i > owner) + p for i in range(4)) for p, owner in enumerate(owners(cuts))]
    if one_by_one:
        assert simplify_cuts(tuple(one_by_one)) == short
    assert all(len(s) == 4 and list(s) == sorted(s) for s in short)


@given(some_cuts(), st.integers(1, 3), st.integers(1, 3), st.data())
def test_across(cuts: Cuts, outer: int, inner: int, data: st.DataObject) -> None:
    """The other dimension's cuts give every element to the same rank; and where there are none, there are none."""
    size = cuts[-1][-1]
    total = outer * size * inner
    if total == 0:
        return
    b = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    c = data.draw(st.sampled_from([n for n in range(1, total // b + 1) if total // b % n == 0]))
    a, to = DimensionBlock(outer, size, inner), DimensionBlock(total // b // c, b, c)
    first = [owners(cuts)[p // inner % size] for p in range(total)]
    made = convert_cuts(cuts, a, to)
    if made is not None:
        assert first == [owners(made)[p // c % b] for p in range(total)]
        return
    seen: dict[int, set[int]] = {}
    for p, owner in enumerate(first):
        seen.setdefault(p // c % b, set()).add(owner)
    assert any(len(each) > 1 for each in seen.values())


def test_too_many_segments_are_no_cut() -> None:
    assert convert_cuts(even_cuts(4, 2), DimensionBlock(5000, 4, 1), DimensionBlock(1, 20000, 1)) is None
    assert convert_cuts(even_cuts(4, 2), DimensionBlock(5, 4, 1), DimensionBlock(1, 20, 1)) is not None


# ---- two axes at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "shape", "args", "first", "second"),
    [
        (aten.view.default, (4, 5, 6), [[4, 5, 3, 2]], (1, 1), (2, 2)),
        (aten.view.default, (4, 5, 6), [[20, 6]], (1, 0), (2, 1)),
        (aten.expand.default, (4, 1, 6), [[3, 4, 5, 6]], (0, 1), (2, 3)),
        (aten.repeat.default, (4, 6), [[2, 3]], (0, 0), (1, 1)),
        (aten.tril.default, (5, 4), [1], (0, 0), (1, 1)),
        (aten.new_zeros.default, (5, 4), [[5, 4]], (0, 0), (1, 1)),
    ],
)
def test_two_axes(
    operator: Any, shape: Sequence[int], args: list[Any], first: tuple[int, int], second: tuple[int, int]
) -> None:
    """Sizes in a call are those of the part along all axes, whichever of them changes the call."""
    x = tensor(*shape, grad=False)
    whole = operator(x, *args)
    graph, _ = graph_of(operator, [x, *args], {}, whole)
    found = strategies(call_for(graph, 2, False))
    chosen = [next(s for s in found if dims([s]) == {pair}) for pair in (first, second)]
    splits = {
        name: AxisSplit(2, {"op": s}, {("input:0", 0): s.inputs[0]}) for name, s in zip("ab", chosen, strict=True)
    }
    for i in range(2):
        for j in range(2):
            own = rewrite(graph, {"op": call_for(graph, 2, False)}, splits, 1, {"a": i, "b": j}, leaving=("op",))
            node = next(n for n in own.nodes if n.op == "call_function" and n.meta["stands"])
            part = _part(_part(x, chosen[0].inputs[0], i), chosen[1].inputs[0], j)
            wanted = _part(_part(whole, chosen[0].outputs[0], i), chosen[1].outputs[0], j)
            assert torch.equal(node.target(part, *node.args[1:], **node.kwargs), wanted)


def _part(x: torch.Tensor, placement: Placement, index: int) -> torch.Tensor:
    assert isinstance(placement, Shard)
    return torch.cat([x.narrow(placement.dim, a, b - a) for a, b in placement.ranges(index)], placement.dim)


def test_several_tensors_of_a_form_stay_whole() -> None:
    assert not dims(check(aten.atleast_2d.Sequence, [[tensor(3), tensor(2, 3)]]))
