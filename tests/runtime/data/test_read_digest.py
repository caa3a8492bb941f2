"""Read digests are equal where what was read is, and differ where it is not, wherever in a tensor that is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polylane.runtime.data.read_digest import WORDS, digest_leaves

CPU = torch.device("cpu")
X = torch.randn(40, 3, 8, generator=torch.Generator().manual_seed(0))


def digest(*leaves: Any, turn: int = 1) -> int:
    return int(digest_leaves(leaves, turn, CPU))


@pytest.mark.parametrize(
    "value",
    [
        X,
        X.transpose(0, 2),
        X > 0,
        X.bfloat16(),
        torch.complex(X, X).conj(),
        torch.complex(X, X).conj().imag,
        torch.tensor(3),
        torch.zeros(0, 3),
        X.requires_grad_(),
        X.to(torch.float8_e5m2),
        np.arange(6.0)[::2],
        np.arange(24).reshape(2, 3, 4)[:, ::-1],  # as images are flipped
        np.arange(6.0)[::-1].astype(">f8"),
        np.arange(5, dtype=np.longdouble),
        np.arange(6).astype("complex64").reshape(2, 3).T,
        np.array(["2026-11-26", "2026-11-27"], dtype="datetime64[D]"),
        np.array([(1, "a"), (2, "b")], dtype=[("id", "i4"), ("name", "U1")]),
        np.float64(3.5),
    ],
)
@pytest.mark.filterwarnings("error")
def test_equal_values(value: Any) -> None:
    same = value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value.copy()
    assert digest(value, "a", None) == digest(same, "a", None)
    if isinstance(value, np.ndarray):
        same.flags.writeable = False  # of which torch warns
        assert digest(value) == digest(same)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([X], [X.flip(0)]),  # the same samples in another order
        ([X], [X[:39]]),
        ([X], [X.reshape(40, 8, 3)]),
        ([X], [X.double()]),
        ([X, X[0]], [X[0], X]),
        ([X, "a.png"], [X, "b.png"]),
        ([X, 3], [X, 3.0]),
        ([X, torch.tensor(1)], [X, torch.tensor(2)]),
        ([True], [False]),
        ([X.double()], [X.double() * 2]),  # other exponents
        ([X.double()[:1]], [-X.double()[:1]]),
        ([np.arange(24)], [np.arange(24)[::-1]]),
        ([np.array(["a", "b"])], [np.array(["a", "c"])]),
        ([np.arange(3, dtype=np.longdouble)], [np.arange(1, 4, dtype=np.longdouble)]),
        ([np.datetime64("2026-11-26")], [np.datetime64("2026-11-27")]),
        ([np.float32(1)], [np.float32(2)]),
        ([np.array([1j, 2j])], [np.array([2j, 1j])]),
    ],
)
def test_other_values(one: list[Any], other: list[Any]) -> None:
    assert digest(*one) != digest(*other)


def test_objects_count_by_their_type() -> None:
    assert digest(object()) == digest(object()) != digest({})
    assert digest(np.array([object()])) == digest(np.array([object()]))  # an address is no content


def test_arrays_and_tensors_that_hold_the_same() -> None:
    """A loader may give either, and a script moves batches on one host alone."""
    x = X.detach()
    for value in (x, x[:, 1], x.double(), x > 0, x.half(), torch.complex(x, x), (x * 9).long()):
        assert digest(value) == digest(value.numpy()) == digest(torch.nn.Parameter(value, value.is_floating_point()))


@pytest.mark.parametrize("count", [1, WORDS, 5 * WORDS + 3])
def test_every_place_is_looked_at_in_turn(count: int) -> None:
    """A worker that has one other number, anywhere, is seen within as many steps as the words lie apart."""
    value = torch.zeros(count)
    for place in {0, count // 3, count - 1}:
        other = value.clone()
        other[place] = 1
        assert any(digest(value, turn=turn) != digest(other, turn=turn) for turn in range(count // WORDS + 2))


def test_of_a_large_tensor_no_copy_is_made() -> None:
    value = torch.empty(1, dtype=torch.float32).expand(10_000, 100_000)  # 4 GB, were it copied
    assert digest(value) == digest(value)
