"""Rules about results of tests: how they are written, when they stop a training, and which steps are the best."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polylane.callbacks.callback import TrainingStatus
from polylane.callbacks.metric_rules import BestSteps, EarlyStopping, MetricRule, StopAtMetric
from polylane.errors import PolylaneError

VALUES = st.lists(st.floats(-3, 3) | st.just(math.nan), max_size=20)


@pytest.mark.parametrize(
    ("text", "name", "direction", "number"),
    [
        ("accuracy:3", "accuracy", "max", 3),
        ("test_loss:3", "test_loss", "min", 3),
        ("error:min:0.25", "error", "min", 0.25),
        ("train_loss:max:1", "train_loss", "max", 1),
        ("f1.0", "f1.0", "max", 1),
    ],
)
def test_rules_are_read(text: str, name: str, direction: str, number: float) -> None:
    rule = MetricRule.parse("--x", text, default=1)
    assert (rule.name, rule.direction, rule.number) == (name, direction, number)


@pytest.mark.parametrize("text", ["", ":3", "a:b", "a:max:b", "a:1:2", "a:max:nan", "a:max"])
def test_rules_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(PolylaneError, match="--x"):
        MetricRule.parse("--x", text)


@pytest.mark.parametrize("number", ["0", "1.5", "-1"])
def test_a_count_is_whole(number: str) -> None:
    with pytest.raises(PolylaneError, match="whole number"):
        EarlyStopping(MetricRule.parse("--early-stop", f"a:{number}"))


def test_a_result_that_is_not_there_is_named() -> None:
    rule = MetricRule.parse("--stop-at", "acc:1")
    with pytest.raises(PolylaneError, match="there is no result 'acc'; known are train_loss, accuracy"):
        rule.read({"train_loss": 1.0, "accuracy": 0.5})


def is_better(value: float, reference: float, direction: str) -> bool:
    return value > reference if direction == "max" else value < reference


@given(
    values=VALUES, patience=st.integers(1, 4), direction=st.sampled_from(["max", "min"]), break_at=st.integers(0, 20)
)
def test_early_stopping_ends_after_so_many_tests_without_a_better_one(
    values: list[float], patience: int, direction: str, break_at: int
) -> None:
    rule = MetricRule.parse("--early-stop", f"m:{direction}:{patience}")
    stopping, status = EarlyStopping(rule), TrainingStatus("data=1", 1, 0)
    best, since, expected, stopped = math.nan, 0, None, None
    for number, value in enumerate(values):
        if number == break_at:  # resumed from a checkpoint, of which JSON keeps the state
            state = json.loads(json.dumps(stopping.state_dict()))
            stopping = EarlyStopping(rule)
            stopping.load_state_dict(state)
        if not math.isnan(value) and (math.isnan(best) or is_better(value, best, direction)):
            best, since = value, 0
        else:
            since += 1
        if since >= patience and expected is None:
            expected = number
        status.epoch = number + 1
        stopping.on_evaluate_end(status, {"m": value})
        if status.stop_reason and stopped is None:
            stopped = number
    assert stopped == expected


@given(values=VALUES, target=st.floats(-2, 2), direction=st.sampled_from(["max", "min"]))
def test_a_training_ends_once_a_value_is_reached(values: list[float], target: float, direction: str) -> None:
    stopping = StopAtMetric(MetricRule("m", direction, target, "--stop-at"))  # type: ignore[arg-type]
    for value in values:
        status = TrainingStatus("data=1", 1, 0)
        stopping.on_evaluate_end(status, {"m": value})
        assert bool(status.stop_reason) == (value >= target if direction == "max" else value <= target)


@given(values=VALUES, count=st.integers(1, 4), direction=st.sampled_from(["max", "min"]))
def test_the_best_steps_are_those_of_the_best_values(values: list[float], count: int, direction: str) -> None:
    best = BestSteps(MetricRule.parse("--keep-best", f"m:{direction}:{count}"))
    for step, value in enumerate(values):
        is_kept = best.add(step, {"m": value})
        assert is_kept == (step in best.steps)
        known = [(v, s) for s, v in enumerate(values[: step + 1]) if not math.isnan(v)]
        order = sorted(known, key=lambda row: (-row[0] if direction == "max" else row[0], row[1]))
        assert best.steps == tuple(s for _, s in order[:count])
    again = BestSteps(best.rule)
    again.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert again.steps == best.steps
