"""Batches that cannot be divided by samples are refused by the place of what is wrong in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from polylane.errors import PolylaneError
from polylane.graph.batch_checks import refuse_undividable

ROWS = torch.zeros(4, 3)


class Own:
    def __init__(self) -> None:
        self.x = ROWS


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "packed": (lambda: (pack_sequence([ROWS, ROWS[:2]]), ROWS), r"batch\[0\] is a PackedSequence"),
    "sparse": (lambda: {"x": ROWS.to_sparse(), "y": ROWS}, r"batch\['x'\] is a sparse tensor"),
    "csr": (lambda: [ROWS, ROWS.to_sparse_csr()], r"batch\[1\] is a sparse tensor"),
    "nested": (lambda: [torch.nested.nested_tensor([ROWS]), ROWS], r"batch\[0\] is a nested tensor"),
    "numpy": (lambda: {"in": (ROWS, np.zeros(4))}, r"batch\['in'\]\[1\] is a numpy array"),
    "numbers": (lambda: (ROWS, [1, 2, 3, 4]), r"batch\[1\] is a list of numbers"),
    "unequal": (lambda: (ROWS, [ROWS[0, :n] for n in (1, 2, 3, 2)]), r"batch\[1\] is a list of tensors"),
    "records": (lambda: [{"x": ROWS[:, :n], "y": ROWS[:n]} for n in (1, 2)], "the batch is a list of dicts whose"),
    "own": (Own, "batch is of your own class Own"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(PolylaneError, match=said) as caught:
        refuse_undividable(make())
    assert len(str(caught.value).splitlines()) == 1


def test_ordinary_batches_pass() -> None:
    refuse_undividable([ROWS, ROWS[0]])
    refuse_undividable({"x": ROWS, "ids": ["a", "b", "c", "d"], "size": [3, 3], "scale": np.float64(2), "none": None})
