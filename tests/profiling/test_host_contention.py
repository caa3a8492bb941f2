"""Copies of a model that run at once: what is said of them, and that nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.cluster.spec import parse
from polylane.cost.operators.profile import Profile
from polylane.cost.operators.training_options import TrainingOptions
from polylane.graph.capture.export import ModelWithLoss
from polylane.planner import problem as setup
from polylane.profiling.host_contention import measure_model_contention
from tests.support import planning_graphs


def loss(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def rebuilt(leaves: Any) -> Any:
    return leaves[0]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polylane.profiling.host_contention.PATIENCE", 20.0)


def test_copies_are_no_faster_together_and_leave_the_model_as_it_was() -> None:
    model, leaves = nn.Linear(8, 8), [torch.randn(4, 8)]
    before = [parameter.clone() for parameter in model.parameters()]
    found = measure_model_contention(ModelWithLoss(model, loss, rebuilt), leaves, (3, 2, 1), 0.02)
    assert set(found) == {2, 3} and all(0 < factor <= 1 for factor in found.values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not multiprocessing.active_children()


def test_copies_of_a_process_that_has_computed_on_several_threads_run() -> None:
    """Its pool's threads are not in them: work for these would wait for ever."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)

    def measure() -> None:
        torch.set_num_threads(2)
        torch.randn(512, 512) @ torch.randn(512, 512)
        model = ModelWithLoss(nn.Linear(512, 512), loss, rebuilt)
        send.send(measure_model_contention(model, [torch.randn(512, 512)], [2], seconds=0.05, rounds=1))

    process = fork.Process(target=measure)
    process.start()
    assert receive.poll(60) and receive.recv()
    process.join()


def test_one_copy_has_nobody_to_be_slowed_by() -> None:
    model_with_loss = ModelWithLoss(nn.Linear(8, 8), loss, rebuilt)
    assert measure_model_contention(model_with_loss, [torch.randn(4, 8)], (1,), 0.02) == {}


def test_nothing_is_said_where_a_copy_dies() -> None:
    parent = os.getpid()

    def killed(model: nn.Module, batch: Any) -> Tensor:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    model_with_loss = ModelWithLoss(nn.Linear(8, 8), killed, rebuilt)
    assert measure_model_contention(model_with_loss, [torch.randn(4, 8)], (2,), 0.02) == {}
    assert not multiprocessing.active_children()


def test_what_was_measured_of_the_model_counts_for_its_cluster() -> None:
    graph, cluster = planning_graphs.blocks(2, 8), parse("2:cpu")
    nodes = {node.name: ((1.0, 2.0),) for node in graph.nodes}
    profile = Profile((2,), nodes, ((1.0, 2.0),))
    job = setup.CapturedProblem(graph, planning_graphs.adam, profile=profile)
    assert setup.build_cost_model(job, cluster, TrainingOptions()).cluster.contention(0) == cluster.contention(0)
    told = replace(job, profile=replace(profile, host_contention={2: 0.5}))
    assert setup.build_cost_model(told, cluster, TrainingOptions()).cluster.contention(0) == {2: 0.5}
