"""Samples that make no batch, and datasets that raise: each is one sentence that names batch and sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from polylane.compile.sample_shares import compute_shares
from polylane.errors import PolylaneError
from polylane.runtime.data.loader import load_batches


def sample(index: int, kind: str) -> Any:
    found: dict[str, Any] = {"x": torch.zeros(6), "y": torch.tensor(index), "inner": [{"mask": torch.ones(2)}]}
    if index < 9:
        return found
    if kind == "raises":
        raise KeyError("no such file")
    if kind == "exits":
        raise SystemExit(3)
    if kind == "shape":
        found["x"] = torch.zeros(7)
    elif kind == "none":
        found["y"] = None
    elif kind == "missing":
        del found["y"]
    elif kind == "missing inside":
        del found["inner"][0]["mask"]
    elif kind == "keys":
        found["z"] = torch.zeros(1)
    return found


class Mapped(torch.utils.data.Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return sample(index, self.kind)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        return (sample(index, self.kind) for index in range(16))


TOLD = {
    "raises": r"sample 9 of the dataset raised KeyError: 'no such file' \(.*test_sample_errors.py:\d+\)",
    "exits": "sample 9 of the dataset raised SystemExit: 3",
    "shape": r"\['x'\] of sample 8 is a tensor of shape \[6\], and of sample 9 a tensor of shape \[7\]; give samples",
    "none": r"\['y'\] of sample 8 is a tensor of shape \[\], and of sample 9 None",
    "missing": r"\['y'\] of sample 8 is there, and of sample 9 not there",
    "missing inside": r"\['inner'\]\[0\]\['mask'\] of sample 8 is there, and of sample 9 not there",
}


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("dataset", [Mapped, Stream])
def test_the_sample_is_named(dataset: Any, kind: str) -> None:
    found = load_batches(dataset(kind), 4, shares=lambda n: compute_shares(n, 1, 1, 0), shuffle=False)
    next(found)
    next(found)
    with pytest.raises(PolylaneError, match=f"batch 3 of epoch 1.*: {TOLD[kind]}"):
        next(found)


def test_errors_of_functions_that_polylane_called_stay_as_they_are() -> None:
    def refuse(samples: list[Any]) -> Any:
        raise PolylaneError("collate(samples) says no")

    for dataset in (Mapped("none"), Stream("none")):
        found = load_batches(dataset, 4, shares=lambda n: compute_shares(n, 1, 1, 0), shuffle=False, collate=refuse)
        with pytest.raises(PolylaneError, match=r"^collate\(samples\) says no$"):
            next(found)
