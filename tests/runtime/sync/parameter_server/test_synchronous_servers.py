"""Synchronous parameter servers give the numbers of one device, wherever they live and whatever they share out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.plan.spec import parse
from polylane.recipe import Mean
from polylane.runtime.job import Job
from tests.support import subsets
from tests.support.workers.training import (
    Tied,
    adamw,
    assert_same,
    batch_of,
    mlp,
    plainly,
    sgd,
    trained_by_servers,
)

BATCHES = [batch_of(8, seed=i) for i in range(4)]


PLANS = [
    "data=2,servers=1",
    "data=2,servers=2",
    "data=3,servers=2,dedicated=yes",
    "data=2,servers=4",
    "data=2,pipeline=2,microbatches=2,servers=2",
    "data=2,tensor=2,servers=1,dedicated=yes",
    "data=1,servers=1",
]
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


@pytest.mark.parametrize(("plan", "name"), subsets.one_in(3, subsets.pairs(PLANS, list(OPTIMIZERS)), several=True))
def test_the_numbers_of_one_device(plan: str, name: str) -> None:
    optimizer = OPTIMIZERS[name]
    parts = parse(plan).microbatches or 1
    expected = plainly(mlp(6, 8, 4), BATCHES, optimizer=optimizer, microbatches=parts, clip_norm=0.3)
    for worker in trained_by_servers(mlp(6, 8, 4), plan, BATCHES, optimizer=optimizer, clip_norm=0.3):
        assert_same(worker, expected)


def test_batches_that_do_not_divide() -> None:
    batches = [batch_of(n, seed=n) for n in (7, 2, 1, 5)]
    for worker in trained_by_servers(mlp(6, 8, 4), "data=3,servers=2", batches, example=batch_of(8)):
        assert_same(worker, plainly(mlp(6, 8, 4), batches))


def test_means_over_counted_elements() -> None:
    def some(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        wanted = batch[1] != 0
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return Mean((losses * wanted).sum(), wanted.sum())

    for worker in trained_by_servers(mlp(6, 8, 4), "data=2,servers=2", BATCHES, loss=some, clip_norm=0.3):
        assert_same(worker, plainly(mlp(6, 8, 4), BATCHES, loss=some, clip_norm=0.3))


def test_batch_statistics_are_those_of_the_whole_batch() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()

    for worker in trained_by_servers(model(), "data=2,servers=1", BATCHES):
        assert_same(worker, plainly(model(), BATCHES))


@pytest.mark.parametrize("plan", ["data=2,pipeline=2,microbatches=2,servers=2", "pipeline=2,microbatches=2,servers=1"])
def test_weights_that_two_stages_hold(plan: str) -> None:
    for worker in trained_by_servers(Tied(), plan, BATCHES, optimizer=adamw):
        assert_same(worker, plainly(Tied(), BATCHES, optimizer=adamw, microbatches=2))


def test_an_optimizer_that_looks_at_whole_matrices_on_parts_of_them() -> None:
    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for _, p in parameters], lr=0.05)

    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
    expected = plainly(model, BATCHES, optimizer=muon)
    for worker in trained_by_servers(model, "data=2,tensor=2,servers=2", BATCHES, optimizer=muon):
        assert_same(worker, expected)


@pytest.mark.parametrize("plan", ["data=2,pipeline=2,microbatches=2,servers=1", "data=2,tensor=2,servers=2"])
def test_groups_of_processes_without_those_that_only_serve(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers that train make process groups among themselves, of which the others know nothing."""
    monkeypatch.setenv("POLYLANE_TRANSPORT", "gloo")
    parts = parse(plan).microbatches or 1
    expected = plainly(mlp(6, 8, 4), BATCHES, microbatches=parts, clip_norm=0.3)

    def count_processes(job: Job) -> int:
        """In a group that a script of the user's makes, of all processes again."""
        ones, group = torch.ones(()), dist.new_group(backend="gloo")
        dist.all_reduce(ones, group=group)
        dist.destroy_process_group(group)
        return int(ones)

    plan, options = f"{plan},dedicated=yes", {"clip_norm": 0.3, "after": count_processes}
    for worker in trained_by_servers(mlp(6, 8, 4), plan, BATCHES, **options):
        assert_same(worker, expected)
        assert worker.extra == parse(plan).workers + parse(plan).sync.server_count
