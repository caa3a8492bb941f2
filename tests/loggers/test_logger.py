"""Loggers: what a run writes reaches each of them, and none of them can end the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from polylane.errors import PolylaneError
from polylane.loggers.libraries import open_loggers
from polylane.loggers.logger import LoggerGroup, RunFacts, flatten_numbers


class Recorder:
    """A logger of a user's own."""

    def __init__(self) -> None:
        self.calls = list[tuple[str, object]]()

    def begin(self, run: RunFacts) -> None:
        self.calls.append(("begin", run.resumed_at))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls.append(("log", (dict(values), step)))

    def end(self) -> None:
        self.calls.append(("end", None))


class Failing(Recorder):
    def log(self, values: Mapping[str, float], step: int) -> None:
        raise RuntimeError("the server is away")


def facts(folder: Path, resumed_at: int | None = None) -> RunFacts:
    return RunFacts("digits", folder, "data=2", 2, resumed_at, {"batch": 64, "recipe": "digits.py"})


def test_nested_numbers_have_paths_and_what_is_no_finite_number_is_left_out() -> None:
    line = {"loss": 1.5, "memory": [3, 4], "waiting_for": {"2": 0.1}, "bad": math.nan, "name": "x", "flag": True}
    assert dict(flatten_numbers(line)) == {"loss": 1.5, "memory/0": 3.0, "memory/1": 4.0, "waiting_for/2": 0.1}


def test_a_logger_that_raises_is_named_once_and_the_others_go_on(tmp_path: Path) -> None:
    warnings, good = list[str](), Recorder()
    group = LoggerGroup({"bad": Failing(), "good": good}, warnings.append)
    group.begin(facts(tmp_path))
    for step in (1, 2):
        group.log({"loss": 2.0 / step}, step, "train")
    group.end()
    assert warnings == ["--log bad: RuntimeError: the server is away; training continues without it"]
    assert [call[0] for call in good.calls] == ["begin", "log", "log", "end"]
    assert good.calls[1][1] == ({"train/loss": 2.0}, 1)


def test_a_run_that_begins_again_after_a_failure_begins_its_loggers_again(tmp_path: Path) -> None:
    recorder = Recorder()
    group = LoggerGroup({"own": recorder}, pytest.fail)
    group.begin(facts(tmp_path))
    group.end()
    group.log({"loss": 1.0}, 3, "train")  # nobody listens between two attempts
    group.begin(facts(tmp_path, resumed_at=2))
    assert recorder.calls == [("begin", None), ("end", None), ("begin", 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord", "--log tensorbord: known are tensorboard, wandb, mlflow; a class of your own is module:Class"),
        ("nowhere_to_be_found:Logger", "--log nowhere_to_be_found:Logger: ModuleNotFoundError"),
        ("tests.loggers.test_logger:Missing", "--log tests.loggers.test_logger:Missing: AttributeError"),
    ],
)
def test_a_name_that_is_wrong_is_refused_before_the_run(text: str, message: str) -> None:
    with pytest.raises(PolylaneError, match=message):
        open_loggers(text)


def test_a_class_of_the_users_own_is_made() -> None:
    loggers = open_loggers("tests.loggers.test_logger:Recorder, tests.loggers.test_logger:Failing")
    assert [type(logger).__name__ for logger in loggers.values()] == ["Recorder", "Failing"]
