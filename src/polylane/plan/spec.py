"""A plan in one line: ``data=2,pipeline=2,schedule=1f1b,microbatches=8``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from polylane.errors import PolylaneError
from polylane.schedule.synchronous import SCHEDULES

PRECISIONS = ("float32", "bfloat16")
DEGREES = ("data", "pipeline", "sequence", "tensor")
_COUNTS = (*DEGREES, "microbatches")
_KEYS = (*_COUNTS, "schedule", "precision")

# As many workers as a plan may have, and as many microbatches: ten times the largest machines.
MOST = 2**20


@dataclass(frozen=True)
class Spec:
    """Degrees and schedule, before the graph is known.

    Attributes:
        data: replicas of every stage.
        pipeline: number of stages.
        schedule: a key of :data:`polylane.schedule.synchronous.SCHEDULES`.
        microbatches: into how many the batch is divided; None leaves the choice to the planner.
        precision: "float32" (whatever the model has), or "bfloat16" for autocast.
        tensor: ranks over which the operators of a stage are split so that each holds a part of the parameters.
        sequence: ranks over which they are split so that each holds a part of the activations, and all parameters.
    """

    data: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    microbatches: int | None = None
    precision: str = "float32"
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        check_workers(self.workers, {axis: getattr(self, axis) for axis in DEGREES})

    @property
    def workers(self) -> int:
        """How many workers the plan takes."""
        return self.data * self.pipeline * self.sequence * self.tensor


def check_workers(workers: int, degrees: Mapping[str, int]) -> None:
    """Refuse more workers than any machine has, before anything is computed for each of them.

    Raises:
        PolylaneError: with the degrees that make them so many.
    """
    if workers > MOST:
        product = " times ".join(f"{axis}={_shown(n)}" for axis, n in degrees.items() if n > 1)
        raise PolylaneError(f"{product} would be more than {MOST:,} workers, the most that a plan can have")


def parse(text: str) -> Spec:
    """Read a one-line plan.

    Raises:
        PolylaneError: naming the key at fault and what it may be.
    """
    try:
        return _parsed(text)
    except PolylaneError as error:
        raise PolylaneError(f"plan {_shown(text)!r}: {error}") from None


def _parsed(text: str) -> Spec:
    given: dict[str, str] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals:
            raise PolylaneError(f"{_shown(item)!r} is not of the form key=value, as in data=2,pipeline=2")
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise PolylaneError(f"unknown key {_shown(key)!r}, known are {', '.join(_KEYS)}{hint}")
        if key in given:
            raise PolylaneError(f"{key} is given twice")
        given[key] = value
    if not given:
        raise PolylaneError("nothing is said: give degrees, as in data=2,pipeline=2, or data=1 for one worker")
    counts = {key: _count(key, given[key]) for key in _COUNTS if key in given}
    schedule, precision = given.get("schedule", "1f1b"), given.get("precision", "float32")
    if schedule not in SCHEDULES:
        raise PolylaneError(f"schedule={_shown(schedule)} is not known, known are {', '.join(SCHEDULES)}")
    if precision not in PRECISIONS:
        raise PolylaneError(f"precision={_shown(precision)} is not known, known are {', '.join(PRECISIONS)}")
    return Spec(
        data=counts.get("data", 1),
        pipeline=counts.get("pipeline", 1),
        schedule=schedule,
        microbatches=counts.get("microbatches"),
        precision=precision,
        tensor=counts.get("tensor", 1),
        sequence=counts.get("sequence", 1),
    )


def _count(key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()) or not value.strip("0"):
        raise PolylaneError(f"{key}={_shown(value)} must be a whole number of at least 1")
    if len(value.lstrip("0")) > len(str(MOST)) or int(value) > MOST:
        raise PolylaneError(f"{key}={_shown(value)} is more than {MOST:,}, the most that a plan can have")
    return int(value)


def _shown(given: str | int, most: int = 80) -> str:
    """What was given, as far as it can be read in a sentence."""
    text = str(given)
    return text if len(text) <= most else f"{text[:most]}…"
