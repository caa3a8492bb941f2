"""Iterable datasets in mid-epoch: one with ``state_dict`` reads nothing twice; always the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from polylane.runtime.job import Job
from tests.checkpoint.saved_runs import compile_once, on_workers


class Plain(IterableDataset[Any]):
    """Draws its samples, from torch's and from Python's generator."""

    def __init__(self) -> None:
        self.at, self.read = 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        yield from self._rest()

    def _rest(self) -> Iterator[Any]:
        while self.at < 40:
            self.at += 1
            self.read += 1
            yield torch.randn(6, dtype=torch.float64) * self.at, random.randrange(4)


class Stateful(Plain):
    """Says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        yield from self._rest()

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.start = state["at"]


@pytest.mark.parametrize(("kind", "read"), [(Plain, 40 + 8), (Stateful, 24 + 8)])
def test_a_stream_goes_on_bit_for_bit(kind: type[Plain], read: int, tmp_path: Path) -> None:
    """Also where test data, a stream of their own, are read before it is saved and before it goes on."""

    def steps(job: Job, dataset: Plain, until: int) -> list[float]:
        losses = []
        tested = [job.evaluate(batch) for batch in job.batches(kind(), 8)]
        for batch in job.batches(dataset, 8, epochs=2, start=job.position):
            losses.append(job.step(batch).loss)
            if job.position.step == 2 and until == 6:
                assert [job.evaluate(batch) for batch in job.batches(kind(), 8)] != tested
                job.save_checkpoint(tmp_path)
            if job.position.step == until:
                break
        return losses

    def resume(job: Job) -> Any:
        job.load_checkpoint(tmp_path)
        dataset = kind()
        return steps(job, dataset, 6), dataset.read

    expected = on_workers(compile_once("data=2"), lambda job: steps(job, kind(), 6))[0]
    found, samples = on_workers(compile_once("data=2"), resume)[0]
    assert found == expected[2:]
    assert samples == read
