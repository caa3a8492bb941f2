"""Losses whose sizes follow from the values of a batch train as one device does, on batches that answer otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.verify.verify import verify
from tests.support.workers.training import classify, plainly, sgd, workers

SIZES = ((3, 5, 4), (2, 4), (3, 5, 4))  # atoms of each molecule, by batch


class Molecules(nn.Module):
    """Messages along the bonds, a mixture of the atoms of a molecule, padded to the largest, and a sum over each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, bonds: Tensor, molecule: Tensor) -> Tensor:
        h: Tensor = self.up(x)
        bonds = bonds[:, bonds[0] != bonds[1]]
        if bonds.numel() > 0:
            h = h.index_add(0, bonds[1], h[bonds[0]])
        molecules = int(molecule.max()) + 1
        counts = torch.zeros(molecules, dtype=torch.long).scatter_add_(0, molecule, torch.ones_like(molecule))
        largest = int(counts.max())
        first = counts.cumsum(0) - counts
        place = torch.arange(len(molecule)) - first[molecule] + molecule * largest
        padded = h.new_zeros(molecules * largest, 8).index_put((place,), h).view(molecules, largest, 8)
        there = torch.arange(largest) < counts[:, None]
        h = torch.tanh(h + (padded @ padded.mT).softmax(-1).sum(-1)[there][:, None])
        return self.out(h.new_zeros(molecules, 8).index_add(0, molecule, h))[:, 0]


def batch_of_molecules(atoms: tuple[int, ...]) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(sum(atoms) + len(atoms))
    molecule = torch.arange(len(atoms)).repeat_interleave(torch.tensor(atoms))
    bonds = [torch.randint(0, n, (2, 2 * n), generator=draw) + sum(atoms[:i]) for i, n in enumerate(atoms)]
    x = torch.randn(sum(atoms), 3, generator=draw, dtype=torch.float64)
    return x, torch.cat(bonds, 1), molecule, torch.randn(len(atoms), generator=draw, dtype=torch.float64)


def fit(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(*batch[:3]), batch[3])


def molecules() -> nn.Module:
    torch.manual_seed(0)
    return Molecules().double()


def test_molecules_of_several_sizes_are_proven() -> None:
    batches = [batch_of_molecules(atoms) for atoms in SIZES[:2]]
    assert verify(molecules(), build_objectives(fit, sgd, None)["loss"], batches, "pipeline=2").passed


def losses_of(job: Job, batches: list[Any]) -> list[float]:
    return [job.step(batch).loss for batch in batches]


def test_every_batch_is_asked_before_its_step() -> None:
    """Each batch runs the graph of its own answers, also one that has come before."""
    batches = [batch_of_molecules(atoms) for atoms in SIZES]
    expected = plainly(molecules(), batches, loss=fit).losses
    for found in workers(lambda job: losses_of(job, batches), molecules(), "data=2", loss=fit, example=batches[0]):
        assert found == pytest.approx(expected, rel=1e-9)


class Signs(nn.Module):
    """Doubles where the batch has a large value, and treats each sample independently otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * 2 if (x > 2).any() else y


def samples() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(12, 6, generator=draw, dtype=torch.float64)
    x[5, 0] = 3  # the second of a batch's replicas would not see it
    return [(row, torch.tensor(i % 4)) for i, row in enumerate(x)]


def losses_of_epoch(job: Job) -> list[float]:
    return [job.step(batch).loss for batch in job.batches(samples(), 4, shuffle=False)]


def signs() -> nn.Module:
    torch.manual_seed(0)
    return Signs().double()


def test_replicas_that_load_for_themselves_have_the_whole_batch_to_be_asked() -> None:
    every = samples()
    batches = [tuple(torch.stack(each) for each in zip(*every[i : i + 4], strict=True)) for i in (0, 4, 8)]
    expected = plainly(signs(), batches).losses
    for found in workers(losses_of_epoch, signs(), "data=2", loss=classify, example=batches[0]):
        assert found == pytest.approx(expected, rel=1e-9)


def test_a_question_of_a_later_batch_to_samples_that_are_elsewhere_is_refused_in_a_sentence() -> None:
    def late(model: nn.Module, batch: Any) -> Tensor:
        y = model(batch[0])
        return F.cross_entropy(y * 2 if batch[0].shape[1] > 6 and (batch[0] > 2).any() else y, batch[1])

    def train(job: Job) -> str:
        try:
            # The second batch is the first that workers read in parts.
            sizes = [6] * 4 + [8] * 4
            data = [(torch.zeros(size, dtype=torch.float64), torch.tensor(0)) for size in sizes]
            for batch in job.batches(data, 4, shuffle=False):
                job.step(batch)
        except PolylaneError as error:
            return str(error)
        return ""

    example = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.long)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x[:, :6])
            return y

    model = First().double()
    for told in workers(train, model, "data=2", loss=late, example=example):
        assert "test_asked_batches.py" in told and "give step() the whole batch" in told
