"""What is predicted of a run before it starts: in the form that its page reads, and never in the way of a run."""

from __future__ import annotations

import json

import pytest

from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.inspection import predicted_run
from polylane.inspection.predicted_run import predict_run
from polylane.observe.time_account import account_time
from polylane.observe.timeline import Timeline
from polylane.plan.spec import parse
from tests.support.workers.training import batch_of, classify, mlp, sgd


def problem() -> TrainingProblem:
    return TrainingProblem(mlp(6, 64, 64, 64, 4), build_objectives(classify, sgd, None), batch_of(16))


@pytest.mark.parametrize(
    "plan", ["data=2", "tensor=2", "pipeline=2,microbatches=4", "data=2,pipeline=2,microbatches=2"]
)
def test_a_run_is_predicted(plan: str) -> None:
    training = problem()
    compiled = compile_training(training, parse(plan))
    data = json.loads(json.dumps(predict_run(training, compiled, ["polylane", "train"])))
    assert data["note"] == "" and data["environment"]["command"] == ["polylane", "train"]
    workers = compiled.plan.workers
    assert len(data["memory"]) == workers and min(data["memory"]) > 0
    assert data["step_seconds"] > 0 and data["one_device_seconds"] > 0
    for key in ("timeline", "theory"):
        timeline = Timeline.from_dict(data[key])
        assert (timeline.ranks, timeline.unit, timeline.start()) == (workers, "seconds", 0)
    theory = account_time(Timeline.from_dict(data["theory"])).shares()
    assert theory["moving"] == theory["waiting"] == 0
    assert sorted(rank for stage in data["stages"] for rank in stage["ranks"]) == list(range(workers))
    assert sum(stage["parameters"] for stage in data["stages"]) == 6 * 64 + 64 + 2 * (64 * 64 + 64) + 64 * 4 + 4
    assert bool(data["stages"][0]["sends"]) == ("pipeline" in plan)


def test_changes_are_plans_that_are_faster() -> None:
    training = problem()
    compiled = compile_training(training, parse("pipeline=2,microbatches=1"))
    costs = predicted_run._RunCosts(training, compiled)
    prediction = costs.predict_plan(compiled.plan, compiled.main_partition)
    changes = predicted_run.suggest_changes(costs, prediction)
    assert changes and [change["faster"] for change in changes] == sorted((c["faster"] for c in changes), reverse=True)
    for change in changes:
        assert change["faster"] == pytest.approx(prediction.seconds / costs.predict_line(change["plan"]).seconds)
        assert change["faster"] > 1.03


def test_a_prediction_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such operator")

    training = problem()
    compiled = compile_training(training, parse("data=2"))
    monkeypatch.setattr(predicted_run, "measure_both", fail)
    data = predict_run(training, compiled, [])
    assert data["timeline"] is None and "no such operator" in data["note"] and data["stages"]
