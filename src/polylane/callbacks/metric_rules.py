"""Metric rules: what follows a result of the tests: early stopping, an end at a value, and which steps were best.

A rule is a line such as ``accuracy:max:3``: a result's name, whether larger or smaller is better, and a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polylane.callbacks.callback import Callback, TrainingStatus
from polylane.errors import PolylaneError, format_plural

Direction = Literal["max", "min"]

# The results of every training, of which smaller is better.
LOSSES = ("train_loss", "test_loss")


@dataclass(frozen=True)
class MetricRule:
    """A result that is followed.

    Attributes:
        name: name of the result: "train_loss", "test_loss", or a metric of the recipe.
        direction: whether larger ("max") or smaller ("min") values are better.
        number: what the rule's kind makes of it: a patience, a value, how many are kept.
        option: the option as the user has given it, for messages.
    """

    name: str
    direction: Direction
    number: float
    option: str

    @classmethod
    def parse(cls, option: str, text: str, default: float | None = None) -> MetricRule:
        """Parse ``NAME[:max|min]:NUMBER``; losses are minimized, and all else is maximized, unless the line says it.

        Args:
            option: name of the command line's option, for messages.
            text: the option's line, as it was given.
            default: the number where the line has none; None: it must have one.

        Raises:
            PolylaneError: the line has another form.
        """
        name, *words = text.split(":")
        direction: Direction = "min" if name in LOSSES else "max"
        if words and words[0] in ("max", "min"):
            direction = "max" if words.pop(0) == "max" else "min"
        numbers = [float(word) for word in words if _is_number(word)]
        if not name.strip() or len(numbers) != len(words) or len(words) > 1 or (not words and default is None):
            number = "[:NUMBER]" if default is not None else ":NUMBER"
            raise PolylaneError(f"{option} {text[:60]}: give NAME[:max|min]{number}, such as accuracy:max:3")
        return cls(name, direction, numbers[0] if numbers else float(default or 0), f"{option} {text}")

    @property
    def count(self) -> int:
        """The number as a count.

        Raises:
            PolylaneError: it is no whole number above 0.
        """
        if self.number < 1 or self.number != int(self.number):
            raise PolylaneError(f"{self.option}: {self.number:g} must be a whole number, 1 or more")
        return int(self.number)

    def read(self, results: Mapping[str, float]) -> float:
        """Return the result that is followed.

        Raises:
            PolylaneError: there is none of that name.
        """
        if self.name not in results:
            raise PolylaneError(f"{self.option}: there is no result {self.name!r}; known are {', '.join(results)}")
        return results[self.name]

    def is_better(self, value: float, reference: float) -> bool:
        """Return whether a value is better than another one; one that is no number is never, and never the better."""
        if math.isnan(value):
            return False
        if math.isnan(reference):
            return True
        return value > reference if self.direction == "max" else value < reference


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


class EarlyStopping(Callback):
    """Ends a training once a result has not become better for some tests in a row.

    Args:
        rule: the result, and the number of tests.

    Raises:
        PolylaneError: the number is no count.
    """

    def __init__(self, rule: MetricRule) -> None:
        self._rule, self._patience = rule, rule.count
        self._best, self._best_epoch, self._tests = math.nan, 0, 0

    def on_train_start(self, status: TrainingStatus) -> None:
        self._stop_if_due(status)  # of a run that has ended by this rule before

    def on_evaluate_end(self, status: TrainingStatus, results: Mapping[str, float]) -> None:
        value = self._rule.read(results)
        if self._rule.is_better(value, self._best):
            self._best, self._best_epoch, self._tests = value, status.epoch, 0
        else:
            self._tests += 1
        self._stop_if_due(status)

    def _stop_if_due(self, status: TrainingStatus) -> None:
        if self._tests >= self._patience:
            tests = format_plural(self._tests, "test")
            if math.isnan(self._best):
                status.stop(f"{self._rule.name} was NaN in {tests}, which is no better than any value")
            else:
                best = f"the best was {self._best:.6g}, after epoch {self._best_epoch}"
                status.stop(f"{self._rule.name} has not become better for {tests}: {best}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": repr(self._best), "best_epoch": self._best_epoch, "tests": self._tests}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = float(state["best"])
        self._best_epoch, self._tests = int(state["best_epoch"]), int(state["tests"])


class StopAtMetric(Callback):
    """Ends a training once a result reaches a value.

    Args:
        rule: the result, and the value that it is to reach.
    """

    def __init__(self, rule: MetricRule) -> None:
        self._rule = rule

    def on_evaluate_end(self, status: TrainingStatus, results: Mapping[str, float]) -> None:
        value = self._rule.read(results)
        if value == self._rule.number or self._rule.is_better(value, self._rule.number):
            status.stop(f"{self._rule.name} is {value:.6g}, and {self._rule.number:g} was to be reached")


class NanResults(Callback):
    """Says that a result that a rule follows is NaN, which is compared with nothing: once, and at the end if all were.

    Args:
        rules: the rules of the training.
        warn: called with a sentence.
    """

    def __init__(self, rules: Sequence[MetricRule], warn: Callable[[str], None]) -> None:
        self._rules, self._warn = rules, warn
        self._comparable, self._noted = set[str](), set[str]()  # options with a value that is a number, and with NaN

    def on_evaluate_end(self, status: TrainingStatus, results: Mapping[str, float]) -> None:
        for rule in self._rules:
            value = results.get(rule.name)
            if value is None:  # refused where the rule itself reads it
                continue
            if not math.isnan(value):
                self._comparable.add(rule.option)
            elif rule.option not in self._noted:
                self._noted.add(rule.option)
                self._warn(f"{rule.option}: {rule.name} is NaN after epoch {status.epoch}: it cannot be compared")

    def on_train_end(self, status: TrainingStatus) -> None:
        for rule in self._rules:
            if rule.option in self._noted - self._comparable:
                loss = ", and no checkpoint was kept" if rule.option.startswith("--keep-best") else ""
                self._warn(f"{rule.option}: {rule.name} was NaN in every test{loss}")

    def state_dict(self) -> dict[str, Any]:
        return {"comparable": sorted(self._comparable), "noted": sorted(self._noted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._comparable, self._noted = set(state["comparable"]), set(state["noted"])


class BestSteps:
    """The steps with the best values of a result, as many as a rule says.

    Args:
        rule: the result, and how many steps are kept.

    Raises:
        PolylaneError: the number is no count.
    """

    def __init__(self, rule: MetricRule) -> None:
        self.rule, self._most = rule, rule.count
        self._steps = list[tuple[int, float]]()  # (step, value), the best first

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are kept, the best first."""
        return tuple(step for step, _ in self._steps)

    @property
    def best(self) -> tuple[int, float] | None:
        """The best step and its value; None before the first."""
        return self._steps[0] if self._steps else None

    def add(self, step: int, results: Mapping[str, float]) -> bool:
        """Take a step's results; return whether it is among the best, and to be kept. Of equal values the first counts.

        Args:
            step: number of the step.
            results: all results of its test, by name.

        Raises:
            PolylaneError: the result is not among them.
        """
        value = self.rule.read(results)
        if math.isnan(value):
            return False
        rows = [row for row in self._steps if row[0] != step]  # of a run that was resumed before it
        rank = next((i for i, row in enumerate(rows) if self.rule.is_better(value, row[1])), len(rows))
        self._steps = [*rows[:rank], (step, value), *rows[rank:]][: self._most]
        return step in self.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the steps and their values, as plain values that JSON has."""
        return {"steps": [[step, value] for step, value in self._steps]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` has returned."""
        self._steps = [(int(step), float(value)) for step, value in state["steps"]]
