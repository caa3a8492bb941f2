"""Lists with an entry for each sample: which batches have them, and that dividing rows divides entries alike."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.graph.batch import batch_structure, cast_leaves, clone_leaves, flatten, sample_count, take_samples
from polylane.graph.batch_checks import refuse_undividable
from polylane.graph.sample_lists import SampleList
from polylane.runtime.parameters.broadcast import digest_tensor
from tests.support import subsets


def images(count: int) -> list[torch.Tensor]:
    return [torch.full((3, 4 + i % 3, 5), float(i)) for i in range(count)]


def targets(count: int) -> list[dict[str, Any]]:
    return [{"boxes": torch.full((1 + i % 4, 4), float(i)), "id": f"{i}.png"} for i in range(count)]


ROWS = torch.zeros(5, 2)
LISTS: dict[str, Any] = {
    "lists": (images(5), targets(5)),
    "tuples": tuple(zip(*zip(images(5), targets(5), strict=True), strict=True)),
    "named": {"images": images(5), "targets": targets(5), "ids": torch.arange(5)},
    "images of one size": ([torch.zeros(3, 4, 4)] * 5, [{"box": torch.zeros(4)}] * 5),
}
ORDINARY: dict[str, Any] = {
    "pair": [ROWS, ROWS[:, 0]],
    "pairs": [[ROWS, ROWS], [ROWS, ROWS]],
    "two inputs": ({"x": ROWS}, {"y": ROWS[:, 0]}),
    "a graph": [[ROWS, torch.zeros(2, 7, dtype=torch.int64)], [ROWS, torch.zeros(3)]],
    "edges": (ROWS, torch.zeros(2, 9, dtype=torch.int64)),
    "names": {"x": ROWS, "ids": ["a", "b", "c", "d", "e"]},
    "two of each": ({"x": [ROWS, ROWS]}, [{"y": ROWS}, {"y": ROWS}]),
    "one": ROWS,
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_samples_are_leaves(name: str) -> None:
    batch = LISTS[name]
    refuse_undividable(batch)
    leaves, rebuild = flatten(batch)
    assert any(isinstance(leaf, SampleList) for leaf in leaves) and sample_count(leaves) == 5
    again = rebuild(clone_leaves(leaves))
    assert type(again) is type(batch) and repr(again) == repr(batch)
    assert batch_structure(rebuild(take_samples(leaves, 0, 3))) == batch_structure(batch)


@pytest.mark.parametrize("name", ORDINARY)
def test_other_batches_are_as_they_were(name: str) -> None:
    assert not any(isinstance(leaf, SampleList) for leaf in flatten(ORDINARY[name])[0])


@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 6))
@settings(max_examples=subsets.examples(40), deadline=None)
def test_rows_and_entries_are_divided_alike(count: int, start: int, stop: int) -> None:
    start, stop = sorted((min(start, count), min(stop, count)))
    leaves, _ = flatten((images(count), targets(count)))
    whole = list(zip(*(leaf.entries for leaf in leaves), strict=True))
    parts = [take_samples(leaves, *ends) for ends in ((0, start), (start, stop), (stop, count))]
    assert [len(part[0]) for part in parts] == [start, stop - start, count - stop]
    joined = [torch.cat([part[i] for part in parts]) for i in range(2)]
    assert repr(list(zip(*(leaf.entries for leaf in joined), strict=True))) == repr(whole)  # type: ignore[attr-defined]
    turned = leaves[0][torch.arange(count).flip(0)]
    assert repr(turned.entries) == repr([entry for entry, _ in reversed(whole)])


def test_entries_follow_where_rows_go() -> None:
    (leaf, _), _ = flatten((images(4), targets(4)))
    for other in (
        leaf.detach(),
        leaf.to("cpu"),
        leaf.contiguous(),
        copy.deepcopy(leaf),
        pickle.loads(pickle.dumps(leaf)),
    ):
        assert isinstance(other, SampleList) and repr(other.entries) == repr(leaf.entries)
    assert leaf.clone().entries[0] is not leaf.entries[0]
    assert leaf.to("meta").entries[0].is_meta
    (double,) = cast_leaves([leaf], torch.float64)
    assert {entry.dtype for entry in double.entries} == {torch.float64} and double.dtype is torch.int64


@pytest.mark.parametrize("change", [lambda e: e.add_(1), lambda e: e[:, :1].add_(1e-3), lambda e: e.resize_(3, 2, 5)])
def test_other_entries_have_another_digest(change: Any) -> None:
    leaf, other = (flatten((images(4), targets(4)))[0][0] for _ in range(2))
    assert digest_tensor(leaf) == digest_tensor(other)
    entries = other.entries
    change(entries[2])
    assert digest_tensor(SampleList.of(entries)) != digest_tensor(leaf)


X = torch.arange(40.0).reshape(4, 10)


@pytest.mark.parametrize(
    ("entry", "other"),
    [
        (X, X.flip(1)),  # the same words in another order
        (X, X.flip(0)),
        (X.byte(), X.byte().flip(1)),
        (X[0, :3], X[0, :3].flip(0)),
        (X, X.reshape(10, 4)),
        (X.int(), X.int().view(torch.float32)),
        ({"boxes": X}, {"masks": X}),
        ({"a": X, "b": X + 1}, {"b": X, "a": X + 1}),
        ([X, [X]], [[X], X]),
        ({"id": "ab.png"}, {"id": "ba.png"}),
        ({"id": 1}, {"id": 1.0}),
        ({"size": np.array([1, 2])}, {"size": np.array([2, 1])}),
        ({"mask": X.to_sparse()}, {"mask": (X * 2).to_sparse()}),
    ],
)
def test_entries_that_differ_have_other_checksums(entry: Any, other: Any) -> None:
    rows = SampleList.of([entry, copy.deepcopy(entry), other])
    assert rows.dtype == torch.int64 and rows.tolist()[0] == rows.tolist()[1] != rows.tolist()[2]


def test_of_an_object_the_type_counts() -> None:
    rows = SampleList.of([{"about": object()}, {"about": object()}])  # what they show are their addresses
    assert rows.tolist()[0] == rows.tolist()[1]


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([True, False, True, False, True]),
        [False, True, True, False, False],
        torch.tensor([4, 0, 0]),
        [-1, 2],
        np.array([3, 1]),
        slice(1, None, 2),
        Ellipsis,
    ],
    ids=repr,
)
def test_rows_that_are_taken_take_their_entries(rows: Any) -> None:
    (whole, _), _ = flatten(LISTS["lists"])
    taken = whole[rows]
    expected = torch.arange(5)[rows].tolist()
    assert [int(entry[0, 0, 0]) for entry in taken.entries] == expected
    assert taken.tolist() == whole.as_subclass(torch.Tensor)[rows].tolist()
