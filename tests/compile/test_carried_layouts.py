"""Layouts carried over to other batch sizes before the fork: workers then find every size that they run."""

from __future__ import annotations

import pytest

from polylane.compile.objectives import build_objectives
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.sharding import layout
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import adamw, batch_of, classify, mlp

SIZES = (8, 7, 5, 2)


@pytest.mark.parametrize("plan", ["data=2,tensor=2,microbatches=3", "[data=3 | tensor=2],microbatches=2"])
def test_no_worker_lays_out_anything(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = compile_training(mlp(6, 8, 8, 4), build_objectives(classify, adamw, None), batch_of(8), plan)

    def train(_: object) -> list[float]:
        with Job(prepared, World.join(), example=batch_of(8)) as job:
            return [job.step(batch_of(samples)).loss for samples in SIZES]

    expected = fork_workers(train, prepared.plan.processes)
    prepared.carry_over_layouts(SIZES)

    def anew(*_: object) -> None:
        raise AssertionError("a worker lays the graph out")

    monkeypatch.setattr(layout, "view_operators", anew)
    assert fork_workers(train, prepared.plan.processes) == expected
