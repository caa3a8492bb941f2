"""What picks, cuts and joins, split in every way, gives what it gives whole."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.placement.operator_view import with_neighbour_cuts
from polylane.placement.placement import PARTIAL, REPLICATE_PARTIAL_GRAD, Cuts, Placement, Shard, scale_cuts
from polylane.placement.rules.registry import strategies
from polylane.placement.rules.shape import simplify_cuts
from polylane.placement.strategy import Strategy
from tests.placement.split_checks import call_for, check, even_cuts, graph_of, join_cuts, tensor, uneven
from tests.support import subsets

aten = torch.ops.aten
few = settings(max_examples=subsets.examples(12), deadline=None)
DEGREES = st.sampled_from([2, 3])
SIZES = st.integers(1, 5)


def positions(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def dims(found: Collection[Strategy], index: int = 0) -> set[tuple[int, int]]:
    """(cut dimension of an input, of the first output) of the strategies that cut both."""
    return {
        (s.inputs[index].dim, s.outputs[0].dim)
        for s in found
        if isinstance(s.inputs[index], Shard) and isinstance(s.outputs[0], Shard)
    }


def cut(found: Collection[Strategy], index: int = 0) -> set[int]:
    """Which dimensions of an output are cut by any strategy."""
    return {s.outputs[index].dim for s in found if isinstance(s.outputs[index], Shard)}


def passes(found: Collection[Strategy], *inputs: int) -> bool:
    """Whether there is a strategy that takes summands (of just these inputs) to summands."""
    return any(
        all((p == PARTIAL) == (i in (inputs or (0,))) for i, p in enumerate(s.inputs)) and s.outputs[0] == PARTIAL
        for s in found
    )


def offers(found: Collection[Strategy], inputs: list[Placement], outputs: list[Placement]) -> bool:
    return any(list(s.inputs) == inputs and list(s.outputs) == outputs for s in found)


def asking(operator: Any, args: list[Any], cuts: dict[tuple[str, int, int], list[Cuts]], degree: int) -> Any:
    """The strategies of an operator whose neighbours ask for cuts, without running any."""
    graph, _ = graph_of(operator, args, {}, operator(*args))
    return strategies(with_neighbour_cuts(call_for(graph, degree, True), {k: tuple(v) for k, v in cuts.items()}))


# ---- pieces ----------------------------------------------------------------------------------------------------------


@given(SIZES, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2), DEGREES, st.booleans())
@few
def test_pieces_of_any_sizes(b: int, sizes: list[int], dim: int, degree: int, negative: bool) -> None:
    total = sum(sizes)
    shape = [b, 3]
    shape.insert(dim, total)
    cuts: dict[Any, list[Cuts]] = (
        {("in", 0, dim): [uneven(total, degree), even_cuts(total, degree)]} if total > 1 else {}
    )
    if sizes[0] > 1:
        cuts["out", 0, dim] = [uneven(sizes[0], degree)]
    at = dim - 3 if negative else dim
    found = check(aten.split_with_sizes.default, [tensor(*shape), sizes, at], degree=degree, cuts=cuts)
    fused = simplify_cuts(join_cuts([even_cuts(n, degree) for n in sizes]))
    parts: list[Placement] = [Shard(dim, even_cuts(n, degree)) for n in sizes]
    assert offers(found, [Shard(dim, fused)], parts) == (total > 1)
    assert passes(found)
    assert {d for d, n in enumerate(shape) if n > 1 and d != dim} <= cut(found)
    back = [tensor(*(n if d == dim else m for d, m in enumerate(shape)), seed=i) for i, n in enumerate(sizes)]
    back_cuts = {("in" if k[0] == "out" else "out", 0, dim): v for k, v in cuts.items()}
    found = check(aten.cat.default, [back, at], degree=degree, cuts=back_cuts)
    assert offers(found, parts, [Shard(dim, fused)]) == (total > 1)
    assert passes(found, *range(len(sizes)))


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(
    ("operator", "args", "dim"),
    [
        (aten.split.Tensor, [3, 1], 1),
        (aten.split.sizes, [[3, 4], -2], 1),
        (aten.split.default, [[2, 5], 1], 1),
        (aten.chunk.default, [3, 1], 1),
        (aten.chunk.default, [4, -1], 2),
        (aten.unsafe_chunk.default, [2, 1], 1),
        (aten.unsafe_split.Tensor, [4, 1], 1),
        (aten.unsafe_split_with_sizes.default, [[4, 3], 1], 1),
        (aten.tensor_split.sections, [3, 1], 1),
        (aten.tensor_split.indices, [[1, 5], -2], 1),
        (aten.tensor_split.indices, [[3, 3, 9], 1], 1),
        (aten.hsplit.array, [[2]], 1),
        (aten.vsplit.int, [2], 0),
        (aten.dsplit.int, [3], 2),
    ],
)
def test_forms_of_split(operator: Any, args: list[Any], dim: int, degree: int) -> None:
    found = check(operator, [tensor(4, 7, 6), *args], degree=degree)
    assert cut(found) == {0, 1, 2}
    assert passes(found)
    assert any(s.name == "pieces" and s.inputs[0].dim == dim for s in found)


def test_split_where_a_tensor_says() -> None:
    found = check(aten.tensor_split.tensor_indices_or_sections, [tensor(4, 6), torch.tensor([2, 3]), 1])
    assert cut(found) == {0}


def test_grouped_heads_in_one_matrix() -> None:
    """Queries in whole heads, and fewer keys and values, as views of each ask: each cut between its own heads."""
    x, width = tensor(2, 5 * 4), 4
    queries, keys = scale_cuts(even_cuts(3, 2), width), scale_cuts(even_cuts(1, 2), width)
    ask = {("out", 0, 1): [queries], ("out", 1, 1): [keys], ("out", 2, 1): [keys]}
    found = check(aten.split_with_sizes.default, [x, [12, 4, 4], 1], cuts=ask)
    fused = simplify_cuts(join_cuts([queries, keys, keys]))
    assert offers(found, [Shard(1, fused)], [Shard(1, queries), Shard(1, keys), Shard(1, keys)])


def test_what_serves_nobody_is_not_offered() -> None:
    """Cut as one, the first rank has all of the first piece and nothing of the last."""
    ask = {("in", 0, 1): [even_cuts(12, 2)]}
    found = asking(aten.chunk.default, [tensor(2, 12), 3, 1], ask, 2)
    assert not any(s.inputs[0] == Shard(1, even_cuts(12, 2)) for s in found)
    fused = join_cuts([uneven(4, 2)] * 3)
    found = asking(aten.chunk.default, [tensor(2, 12), 3, 1], {("in", 0, 1): [fused]}, 2)
    assert offers(found, [Shard(1, fused)], [Shard(1, uneven(4, 2))] * 3)


def test_many_pieces_of_many_sizes() -> None:
    """There are more ways to combine their cuts than anybody can look at."""
    sizes = list(range(2, 22))
    ask: dict[tuple[str, int, int], list[Cuts]] = {
        ("out", i, 0): [uneven(n, 2, shift) for shift in range(1, 8)] for i, n in enumerate(sizes)
    }
    found = asking(aten.split_with_sizes.default, [tensor(sum(sizes)), sizes, 0], ask, 2)
    assert offers(
        found, [Shard(0, join_cuts([even_cuts(n, 2) for n in sizes]))], [Shard(0, even_cuts(n, 2)) for n in sizes]
    )
    assert len(found) < 30


def test_a_first_position_before_others() -> None:
    """One class token and the patches of an image: as even as one sequence, in one segment."""
    found = check(aten.cat.default, [[tensor(2, 1, 3), tensor(2, 6, 3)], 1])
    assert any(s.outputs[0] == Shard(1, even_cuts(7, 2)) for s in found)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(
    ("operator", "args", "shape", "dim"),
    [
        (aten.concat.default, [0], (4, 3), 0),
        (aten.concatenate.default, [-1], (4, 3), 1),
        (aten.hstack.default, [], (4, 3), 1),
        (aten.hstack.default, [], (4,), 0),
        (aten.vstack.default, [], (4, 3), 0),
        (aten.dstack.default, [], (4, 3, 2), 2),
        (aten.column_stack.default, [], (4, 3), 1),
        (aten.vstack.default, [], (4,), None),
        (aten.dstack.default, [], (4, 3), None),
    ],
)
def test_forms_of_cat(operator: Any, args: list[Any], shape: tuple[int, ...], dim: int | None, degree: int) -> None:
    found = check(operator, [[tensor(*shape), tensor(*shape, seed=1)], *args], degree=degree)
    assert cut(found) == (set() if dim is None else set(range(len(shape))))
    assert passes(found, 0, 1)


def test_cat_passes_over_what_is_empty() -> None:
    check(aten.cat.default, [[tensor(0), tensor(4, 3), tensor(2, 3, seed=1)], 0])
    check(aten.cat.default, [[tensor(0, 3), tensor(4, 3)], 0], degree=3)


@given(st.lists(SIZES, max_size=3), st.integers(1, 3), st.data(), DEGREES)
@few
def test_stack_and_unbind(shape: list[int], times: int, data: st.DataObject, degree: int) -> None:
    dim = data.draw(st.integers(-len(shape) - 1, len(shape)))
    x = [tensor(*shape, seed=i) for i in range(times)]
    stacked = check(aten.stack.default, [x, dim], degree=degree)
    assert passes(stacked, *range(times))
    at = dim % (len(shape) + 1)
    wanted = {(d, d + (d >= at)) for d, n in enumerate(shape) if n > 1}
    assert dims(stacked) == wanted
    apart = check(aten.unbind.int, [torch.stack(x, dim).detach().requires_grad_(), dim], degree=degree)
    assert dims(apart) == {(o, i) for i, o in wanted}
    assert passes(apart)


# ---- one piece -------------------------------------------------------------------------------------------------------


@given(st.integers(2, 9), st.data(), DEGREES)
@settings(max_examples=subsets.examples(30), deadline=None)
def test_slice(size: int, data: st.DataObject, degree: int) -> None:
    end = st.none() | st.integers(-size - 1, size + 1) | st.just(2**63 - 1)
    start, stop, step = data.draw(end), data.draw(end), data.draw(st.integers(1, 3))
    start = None if start == 2**63 - 1 else start
    odd = join_cuts([even_cuts(size // 2, degree), uneven(size - size // 2, degree, 2)])
    cuts: dict[Any, list[Cuts]] = {("in", 0, 1): [uneven(size, degree), odd]}
    length = len(range(size)[start:stop:step])
    if length > 1:
        cuts["out", 0, 1] = [uneven(length, degree)]
    found = check(aten.slice.Tensor, [tensor(3, size, 2), 1, start, stop, step], degree=degree, cuts=cuts)
    assert passes(found)
    assert {(0, 0), (2, 2)} <= dims(found)
    assert ((1, 1) in dims(found)) == (length > 0)
    if length == size:
        assert offers(found, [Shard(1, odd)], [Shard(1, odd)])


def test_narrow() -> None:
    found = check(aten.narrow.default, [tensor(4, 7), -1, 2, 3], degree=3)
    assert dims(found) == {(0, 0), (1, 1)} and passes(found)
    check(aten.narrow.default, [tensor(4, 7), 0, -3, 2])
    found = check(aten.narrow.Tensor, [tensor(4, 7), 1, torch.tensor(2), 3])
    assert dims(found) == {(0, 0)}


def test_shifted_by_one() -> None:
    """A sequence without its first and without its last position: every rank has what it had of it."""
    whole = Shard(1, even_cuts(8, 2))
    found = check(aten.slice.Tensor, [tensor(2, 8), 1, 1, 2**63 - 1])
    assert offers(found, [whole], [Shard(1, ((0, 3, 7),))])
    found = check(aten.slice.Tensor, [tensor(2, 8), 1, 0, -1])
    assert offers(found, [whole], [Shard(1, ((0, 4, 7),))])


def test_projections_taken_by_slices() -> None:
    """What the slices of one matrix ask for, each for itself, comes together: each of them cut evenly."""
    even_ones = even_cuts(4, 2)
    fused = join_cuts([even_ones] * 3)
    middle = check(aten.slice.Tensor, [tensor(2, 12), 1, 4, 8])
    assert offers(middle, [Shard(1, fused)], [Shard(1, even_ones)])
    ask: dict[tuple[str, int, int], list[Cuts]] = {("in", 0, 1): [fused], ("out", 0, 1): [uneven(4, 2)]}
    last = check(aten.slice.Tensor, [tensor(2, 12), 1, 8, 12], cuts=ask)
    assert offers(last, [Shard(1, fused)], [Shard(1, even_ones)])
    mixed = join_cuts([even_ones, even_ones, uneven(4, 2)])
    assert offers(last, [Shard(1, mixed)], [Shard(1, uneven(4, 2))])


@given(st.lists(SIZES, min_size=1, max_size=3), st.data(), DEGREES)
@few
def test_select(shape: list[int], data: st.DataObject, degree: int) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    at = data.draw(st.integers(-shape[dim], shape[dim] - 1))
    cuts = {("in", 0, dim): [uneven(shape[dim], degree)]} if shape[dim] > 1 else None
    found = check(aten.select.int, [tensor(*shape), dim - len(shape), at], degree=degree, cuts=cuts)
    assert passes(found)
    assert dims(found) == {(d, d - (d > dim)) for d, n in enumerate(shape) if n > 1 and d != dim}
    assert offers(found, [Shard(dim, even_cuts(shape[dim], degree))], [PARTIAL]) == (shape[dim] > 1)


def test_scatter_of_a_piece() -> None:
    found = check(aten.slice_scatter.default, [tensor(4, 6), tensor(4, 2, seed=1), 1, 0, 4, 2], degree=3)
    assert cut(found) == {0} and passes(found, 0, 1)
    found = check(aten.select_scatter.default, [tensor(4, 6, 3), tensor(4, 3, seed=1), 1, -2])
    assert cut(found) == {0, 2} and passes(found, 0, 1)


# ---- positions -------------------------------------------------------------------------------------------------------


@given(st.sampled_from([0, 1, 2, 3, 4]), SIZES, SIZES, DEGREES)
@few
def test_index(form: int, n: int, m: int, degree: int) -> None:
    x = tensor(4, 5, 3)
    indices, expected = [
        ([None, positions(5, n, m)], {0, 3, *([1] if n > 1 else []), *([2] if m > 1 else [])}),
        ([positions(4, n)], {1, 2, *([0] if n > 1 else [])}),
        ([positions(4, n, 1), positions(5, m)], {2, *([0] if n > 1 else []), *([1] if m > 1 else [])}),
        ([positions(4, n), None, positions(3, 1)], {1, *([0] if n > 1 else [])}),
        ([None, positions(5), positions(3, m)], {0, *([1] if m > 1 else [])}),
    ][form]
    found = check(aten.index.Tensor, [x, indices], degree=degree)
    assert cut(found) == expected
    assert passes(found)


def test_index_by_masks() -> None:
    mask = torch.tensor([True, False, True, True])
    assert cut(check(aten.index.Tensor, [tensor(4, 5), [mask]])) == {1}
    assert cut(check(aten.index.Tensor, [tensor(3, 4, 5), [None, mask]], degree=3)) == {0, 2}
    assert cut(check(aten.index.Tensor, [tensor(4, 2, 5), [torch.stack([mask, ~mask], 1)]])) == {1}
    assert cut(check(aten.index.Tensor, [tensor(4, 2, 5), [mask, None, torch.tensor([1, 2, 0])]])) == {1}


@given(st.sampled_from([0, 1, 2, 3]), SIZES, st.booleans(), DEGREES)
@few
def test_index_put(form: int, n: int, accumulate: bool, degree: int) -> None:
    x = tensor(4, 5, 3)
    distinct = torch.randperm(4, generator=torch.Generator().manual_seed(n))[: min(n, 4)]
    first = positions(4, n) if accumulate else distinct
    count = len(first)
    indices, values = [
        ([first], tensor(count, 5, 3, seed=1)),
        ([first], tensor(1, 3, seed=1)),
        ([first, None, positions(3)], tensor(count, 5, seed=1)),
        ([None, first[:, None], positions(3, 1)], tensor(seed=1)),
    ][form]
    found = check(aten.index_put.default, [x, indices, values, accumulate], degree=degree)
    last = len([i for i in indices if i is not None]) + 1
    assert passes(found, 0, last)
    assert cut(found) == {i for i in range(3) if i >= len(indices) or indices[i] is None}
    added = [s for s in found if s.outputs[0] == PARTIAL and isinstance(s.inputs[1], Shard)]
    assert bool(added) == (accumulate and count > 1)
    assert all(s.inputs[0] == PARTIAL for s in added)


@given(st.sampled_from([0, 1, 2]), st.sampled_from([(), (1,)]), st.booleans(), DEGREES)
@few
def test_index_put_where_a_mask_says_so(form: int, one: tuple[int, ...], accumulate: bool, degree: int) -> None:
    x = tensor(4, 5, 3)
    indices = [[x > 0], [x[:, :, 0] > 0], [None, x[0] > 0]][form]
    found = check(aten.index_put.default, [x, indices, tensor(*one, seed=1), accumulate], degree=degree)
    assert cut(found) == {0, 1, 2}
    along = [s for s in found if isinstance(s.outputs[0], Shard) and s.outputs[0].dim == 1]
    assert along
    assert all(isinstance(s.inputs[1], Shard) for s in along)  # every mask has the second dimension


@given(SIZES, st.integers(0, 1), DEGREES)
@few
def test_index_select(n: int, dim: int, degree: int) -> None:
    found = check(aten.index_select.default, [tensor(4, 5), dim - 2, positions(4, n)], degree=degree)
    assert passes(found)
    assert cut(found) == {1 - dim, *([dim] if n > 1 else [])}
    assert passes(check(aten.index_select.default, [tensor(4, 5), 0, torch.tensor(2)], degree=degree))


@given(SIZES, st.integers(1, 4), DEGREES)
@few
def test_gather(n: int, rows: int, degree: int) -> None:
    found = check(aten.gather.default, [tensor(4, 6), -1, positions(6, rows, n)], degree=degree)
    assert passes(found)
    assert dims(found) == ({(0, 0)} if rows == 4 else set())
    assert dims(found, 1) == {*([(0, 0)] if rows == 4 else []), *([(1, 1)] if n > 1 else [])}


def test_take_along() -> None:
    found = check(aten.take_along_dim.default, [tensor(4, 1, 6), positions(6, 1, 3, 2), 2])
    assert dims(found) == {(0, 0)} and dims(found, 1) == {(1, 1), (2, 2)} and passes(found)
    check(aten.take_along_dim.default, [tensor(4, 6), positions(24, 3)], degree=3)


@given(st.integers(1, 4), SIZES, st.integers(0, 2), DEGREES, st.sampled_from(["scatter_add", "sum", "mean", "put"]))
@few
def test_scatter(rows: int, n: int, more: int, degree: int, kind: str) -> None:
    x, src = tensor(4, 6), tensor(rows, n + more, seed=1, grad=more == 0)  # torch has no gradient for a larger one
    at = positions(6, rows, n)
    if kind == "put":
        at = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:n] for i in range(rows)])
    operator, rest = {
        "scatter_add": (aten.scatter_add.default, []),
        "put": (aten.scatter.src, []),
    }.get(kind, (aten.scatter_reduce.two, [kind]))
    found = check(operator, [x, 1, at, src, *rest], degree=degree)
    assert passes(found, 0, 2)
    assert cut(found) == ({0} if rows == 4 else set())
    added = [s for s in found if s.outputs[0] == PARTIAL and s.inputs[1:] == (s.inputs[2],) * 2]
    own = [s for s in added if isinstance(s.inputs[2], Shard)]
    assert bool(own) == (kind in ("scatter_add", "sum") and n > 1 and more == 0)
    assert all(s.inputs[0] == PARTIAL for s in own)


def test_other_forms_of_scatter() -> None:
    at = positions(6, 4, 3)
    assert cut(check(aten.scatter.value, [tensor(4, 6), 1, at, 2.5])) == {0}
    found = check(aten.scatter_reduce.two, [tensor(4, 6), 1, at, tensor(4, 3, seed=1), "amax"], degree=3)
    assert cut(found) == {0} and not passes(found, 0, 2)
    found = check(aten.scatter_reduce.two, [tensor(4, 6), 1, at, tensor(4, 3, seed=1), "sum"], {"include_self": False})
    assert cut(found) == {0} and passes(found, 0, 2)
    assert not any(isinstance(s.inputs[1], Shard) and s.outputs[0] == PARTIAL for s in found)
    given = [tensor(4, 6, grad=False), 1, at, tensor(4, 3, seed=1, grad=False)]
    found = check(aten.scatter.reduce, given, {"reduce": "add"})
    assert any(isinstance(s.inputs[1], Shard) and s.outputs[0] == PARTIAL for s in found)
    found = check(aten.scatter.reduce, given, {"reduce": "multiply"})
    assert cut(found) == {0} and not passes(found, 0, 2)
    check(aten.scatter_add.default, [tensor(), 0, torch.tensor(0), tensor(seed=1)])


@given(SIZES, st.sampled_from([1, -0.5]), DEGREES)
@few
def test_index_add(n: int, alpha: float, degree: int) -> None:
    x, source = tensor(4, 6, 2), tensor(4, n, 2, seed=1)
    found = check(aten.index_add.default, [x, 1, positions(6, n), source], {"alpha": alpha}, degree=degree)
    assert cut(found) == {0, 2} and passes(found, 0, 2)
    assert any(s.inputs[0] == PARTIAL and isinstance(s.inputs[2], Shard) for s in found) == (n > 1)
    distinct = torch.randperm(6)[:n]
    found = check(aten.index_copy.default, [x, 1, distinct, source], degree=degree)
    assert cut(found) == {0, 2} and passes(found, 0, 2)
    found = check(aten.index_fill.int_Scalar, [x, 1, distinct, 3.0], degree=degree)
    assert cut(found) == {0, 2} and not passes(found)
    assert cut(check(aten.index_fill.int_Tensor, [x, 1, distinct, tensor(seed=3)], degree=degree)) == {0, 2}


def test_one_hot() -> None:
    found = check(aten.one_hot.default, [positions(5, 3, 4), 5], degree=3)
    assert dims(found) == {(0, 0), (1, 1)}
    assert cut(check(aten.one_hot.default, [positions(5, 3, 4)])) == set()


def test_numbers_are_no_summands() -> None:
    assert not passes(check(aten.slice.Tensor, [positions(5, 4, 6), 1, 2, 5]))
    assert not any(s.outputs[0] == PARTIAL for s in check(aten.select.int, [positions(5, 4, 6), 1, 2]))
    assert all(
        p != REPLICATE_PARTIAL_GRAD for s in check(aten.select.int, [positions(5, 4, 6), 1, 2]) for p in s.inputs
    )


@pytest.mark.parametrize(("sequences", "expected"), [((), {0, 1}), ((4,), {0})])
def test_searches(sequences: tuple[int, ...], expected: set[int]) -> None:
    """Values are looked up one by one: in one sequence all of them, in one for each row the rows."""
    ordered, order = tensor(*sequences, 7, grad=False).sort()
    values = tensor(4, 3, seed=1, grad=False)
    assert cut(check(aten.searchsorted.Tensor, [ordered, values])) == expected
    shuffled = torch.empty_like(ordered).scatter_(-1, order, ordered)
    assert cut(check(aten.searchsorted.Tensor, [shuffled, values], {"sorter": order, "right": True})) == expected
