"""A plan in one line: ``data=2,pipeline=2,schedule=1f1b,microbatches=8``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import NamedTuple

from polylane.errors import PolylaneError
from polylane.schedule.synchronous import SCHEDULES

PRECISIONS = ("float32", "bfloat16")
_COUNTS = ("data", "pipeline", "sequence", "tensor", "microbatches")
_KEYS = (*_COUNTS, "schedule", "precision")


class Degrees(NamedTuple):
    """The mesh of one stage."""

    data: int = 1
    sequence: int = 1
    tensor: int = 1

    @property
    def workers(self) -> int:
        """How many ranks there are in the mesh."""
        return self.data * self.sequence * self.tensor

    def __str__(self) -> str:
        return ",".join(f"{axis}={n}" for axis, n in self._asdict().items() if n > 1) or "1"


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
        stages: the mesh of every stage, where they differ; the degrees above are then the largest ones.
    """

    data: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    microbatches: int | None = None
    precision: str = "float32"
    tensor: int = 1
    sequence: int = 1
    stages: tuple[Degrees, ...] = ()

    @property
    def meshes(self) -> tuple[Degrees, ...]:
        """The mesh of every stage."""
        return self.stages or (Degrees(self.data, self.sequence, self.tensor),) * self.pipeline

    @property
    def workers(self) -> int:
        """How many workers the plan takes."""
        return sum(degrees.workers for degrees in self.meshes)


def parse(text: str) -> Spec:
    """Read a one-line plan.

    Raises:
        PolylaneError: naming the key at fault and what it may be.
    """
    given: dict[str, str] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals:
            raise PolylaneError(f"plan {text!r}: {item!r} is not of the form key=value, as in data=2,pipeline=2")
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise PolylaneError(f"plan {text!r}: unknown key {key!r}, known are {', '.join(_KEYS)}{hint}")
        if key in given:
            raise PolylaneError(f"plan {text!r}: {key} is given twice")
        given[key] = value
    counts = {key: _count(text, key, given[key]) for key in _COUNTS if key in given}
    schedule, precision = given.get("schedule", "1f1b"), given.get("precision", "float32")
    if schedule not in SCHEDULES:
        raise PolylaneError(f"plan {text!r}: schedule={schedule} is not known, known are {', '.join(SCHEDULES)}")
    if precision not in PRECISIONS:
        raise PolylaneError(f"plan {text!r}: precision={precision} is not known, known are {', '.join(PRECISIONS)}")
    return Spec(
        data=counts.get("data", 1),
        pipeline=counts.get("pipeline", 1),
        schedule=schedule,
        microbatches=counts.get("microbatches"),
        precision=precision,
        tensor=counts.get("tensor", 1),
        sequence=counts.get("sequence", 1),
    )


def _count(text: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise PolylaneError(f"plan {text!r}: {key}={value} must be a whole number of at least 1")
    return int(value)
