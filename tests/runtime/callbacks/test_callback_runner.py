"""Callbacks on workers: all hear what one asks for, end at the same step, and raise the error of any of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polylane.callbacks.callback import Callback, TrainingStatus
from polylane.callbacks.metric_rules import BestSteps, MetricRule
from polylane.checkpoint.commit import list_steps
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.runtime.callbacks import callback_runner
from polylane.runtime.callbacks.best_checkpoints import BestCheckpoints
from polylane.runtime.callbacks.callback_runner import CallbackRunner
from polylane.runtime.job import Job
from polylane.runtime.workers.team import WorkerContext, fork_workers

PLANS = ["data=2", "pipeline=2,microbatches=2", "data=2,servers=1"]


class Recorder(Callback):
    """Records its calls; on one rank it asks for the end, or raises, at a step or a test."""

    def __init__(self, rank: int = 1, at_step: int = 0, at_epoch: int = 0, raises: bool = False) -> None:
        self.calls, self.rank, self.at_step, self.at_epoch = list[Any](), rank, at_step, at_epoch
        self.raises = raises

    def on_train_start(self, status: TrainingStatus) -> None:
        self.calls.append("start")

    def on_step_end(self, status: TrainingStatus, step: Mapping[str, Any]) -> None:
        self.calls.append(step["step"])
        if status.rank == self.rank and step["step"] == self.at_step:
            self._act(status)

    def on_evaluate_end(self, status: TrainingStatus, results: Mapping[str, float]) -> None:
        self.calls.append(("test", status.epoch, results["m"]))
        if status.rank == self.rank and status.epoch == self.at_epoch:
            self._act(status)

    def on_train_end(self, status: TrainingStatus) -> None:
        self.calls.append("end")

    def _act(self, status: TrainingStatus) -> None:
        if self.raises:
            raise ValueError("no more of this")
        status.stop("enough")


def compiled_for(plan: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)

    objectives = build_objectives(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), sgd, None)
    return compile_training(TrainingProblem(model, objectives, batch()), plan)


def batch() -> Any:
    return torch.linspace(-1, 1, 32).reshape(8, 4), torch.tensor([0, 1] * 4)


def train(context: WorkerContext, compiled: Any, callback: Recorder, epochs: int = 4) -> tuple[int, str, list[Any]]:
    with Job(compiled, context.world, example=batch()) as job:
        runner = CallbackRunner(job, [callback])
        tell = runner.listen(lambda message: None)
        runner.start()
        for epoch in range(1, epochs + 1):
            for _ in range(5):
                job.step(batch())
                if job.world.rank < job.plan.workers:
                    tell({"kind": "step", "step": job.position.step, "epoch": epoch, "loss": 0.0})
                if runner.agree():
                    break
            if runner.evaluate(epoch, {"m": epoch / 4}):
                break
        runner.end()
        return job.position.step, runner.reason, callback.calls


@pytest.mark.parametrize("plan", PLANS)
def test_all_end_after_the_test_at_which_one_asks_for_it(plan: str) -> None:
    compiled = compiled_for(plan)
    results = fork_workers(lambda context: train(context, compiled, Recorder(at_epoch=2)), compiled.plan.processes)
    assert [(step, reason) for step, reason, _ in results] == [(10, "enough")] * compiled.plan.processes
    steps = [1, 2, 3, 4, 5]
    expected = ["start", *steps, ("test", 1, 0.25), *(step + 5 for step in steps), ("test", 2, 0.5), "end"]
    assert all(calls == expected for _, _, calls in results[: compiled.plan.workers])
    assert all(calls == [] for _, _, calls in results[compiled.plan.workers :])  # of servers


@pytest.mark.parametrize("plan", PLANS)
def test_all_end_at_the_same_step_that_one_asks_for(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback_runner, "AGREE_SECONDS", 0.0)  # after every step
    compiled = compiled_for(plan)
    results = fork_workers(lambda context: train(context, compiled, Recorder(at_step=7)), compiled.plan.processes)
    (step,) = {step for step, _, _ in results}
    assert step in (7, 8) and {reason for _, reason, _ in results} == {"enough"}


@pytest.mark.parametrize("where", [{"at_epoch": 2}, {"at_step": 3}])
def test_an_exception_on_one_worker_is_raised_on_all(where: dict[str, int]) -> None:
    compiled = compiled_for("data=2")

    def run(context: WorkerContext) -> str:
        with pytest.raises(PolylaneError, match=r"Recorder\.on_.* raised ValueError: no more of this") as raised:
            train(context, compiled, Recorder(raises=True, **where))
        return str(raised.value)

    first, second = fork_workers(run, 2)
    assert first == second


@pytest.mark.parametrize("plan", PLANS)
def test_the_best_steps_are_kept_and_the_newest_is_not_removed(plan: str, tmp_path: Path) -> None:
    compiled, values = compiled_for(plan), [0.3, 0.9, 0.1, 0.5, 0.7, 0.2]

    def run(context: WorkerContext) -> None:
        with Job(compiled, context.world, example=batch()) as job:
            steps = BestSteps(MetricRule.parse("--keep-best", "m:2"))
            best = BestCheckpoints(job, tmp_path / "best", steps, None, dict)
            runner = CallbackRunner(job, [], best)
            runner.start()
            for epoch, value in enumerate(values, 1):
                job.step(batch())
                assert not runner.evaluate(epoch, {"m": value})
            runner.end()

    fork_workers(run, compiled.plan.processes)
    assert [step for step, _ in list_steps(str(tmp_path / "best"))] == [2, 5]


def test_states_go_by_class_and_place() -> None:
    class Counter(Callback):
        def __init__(self, count: int) -> None:
            self.count = count

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.count = state["count"]

    compiled = compiled_for("data=1")

    def run(context: WorkerContext) -> list[int]:
        with Job(compiled, context.world, example=batch()) as job:
            state = CallbackRunner(job, [Counter(1), Recorder(), Counter(2)]).state_dict()
            counters = [Recorder(), Counter(0), Counter(0), Counter(0)]
            CallbackRunner(job, counters).load_state_dict(state)
            return [counter.count for counter in counters if isinstance(counter, Counter)]

    assert fork_workers(run, 1) == [[1, 2, 0]]
