"""Printed lines: the output of two runs of a script, compared line by line, number by number.

    epoch 1: loss 0.4121, 3.1 s        words      epoch #: loss #, # s
                                       numbers    1, 0.4121, 3.1

Numbers that differ between two runs of the plain script itself are times and the like, and are left out: wherever the
same words are printed, the numbers at these places. How far rounding alone moves a number is seen in runs from weights
that were moved by one unit in the last place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polylane.graph.rounding_noise import MARGIN

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\b(?:nan|inf)\b")
SHOWN = 160  # most characters of a line in a sentence
MOST_ROUNDING = 1e-4  # largest relative difference that is put down to rounding: by more, wrong numbers differ as well


@dataclass(frozen=True)
class Tolerance:
    """The differences that count as rounding.

    Attributes:
        relative: of two numbers, to the larger one.
        absolute: of two numbers near zero.
    """

    relative: float
    absolute: float

    def error(self, number: float, reference: float) -> float:
        """Return the relative difference of two numbers; 0 where they are the same, or both are near zero."""
        if number == reference or (math.isnan(number) and math.isnan(reference)):
            return 0.0
        if not (math.isfinite(number) and math.isfinite(reference)):
            return math.inf
        difference = abs(number - reference)
        return 0.0 if difference <= self.absolute else difference / max(abs(number), abs(reference))

    def is_rounding(self, error: float, floor: float) -> bool:
        """Return whether a difference that is larger than the tolerance comes from rounding.

        Args:
            error: the difference, relative to the size of the value.
            floor: how far rounding alone moves the value, relative to its size.
        """
        return self.relative < error <= min(MARGIN * floor, MOST_ROUNDING)


@dataclass
class PrintedComparison:
    """What comparing two outputs has found.

    Attributes:
        numbers: how many numbers were compared.
        left_out: how many were not, because the plain script itself prints other ones every time.
        rounded: how many differ by more than the tolerance, as rounding alone makes them differ.
        worst: the largest relative difference of the others.
        floor: how far rounding alone moves a number of the first line that differs, relative to its size.
        difference: a sentence on the first line that differs; "" where none does.
    """

    numbers: int = 0
    left_out: int = 0
    rounded: int = 0
    floor: float = 0.0
    worst: float = 0.0
    difference: str = ""


@dataclass(frozen=True)
class ChangingNumbers:
    """Places of numbers that are others in every run of the plain script.

    Attributes:
        places: by the words of a line, the positions of its numbers.
    """

    places: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def between(cls, lines: Sequence[str], repeated_lines: Sequence[str]) -> ChangingNumbers:
        """Find the numbers that differ between two outputs of the plain script."""
        places = dict[str, set[int]]()
        for line, other_line in zip(lines, repeated_lines, strict=False):
            if (words := words_of(line)) == words_of(other_line):
                pairs = zip(_NUMBER.findall(line), _NUMBER.findall(other_line), strict=True)
                places.setdefault(words, set()).update(at for at, (a, b) in enumerate(pairs) if a != b)
        return cls(places)


@dataclass(frozen=True)
class PrintedFloors:
    """How far rounding alone moves printed numbers.

    Attributes:
        floors: the largest relative difference between runs, by line and position.
    """

    floors: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def between(cls, lines: Sequence[str], nudged: Sequence[Sequence[str]], tolerance: Tolerance) -> PrintedFloors:
        """Compare an output with those of runs from weights that were moved by one unit in the last place."""
        floors = dict[tuple[int, int], float]()
        for other_lines in nudged:
            for number, (line, other_line) in enumerate(zip(lines, other_lines, strict=False), 1):
                if words_of(line) == words_of(other_line):
                    pairs = zip(_NUMBER.findall(line), _NUMBER.findall(other_line), strict=True)
                    for at, (a, b) in enumerate(pairs):
                        floors[number, at] = max(floors.get((number, at), 0.0), tolerance.error(float(b), float(a)))
        return cls(floors)


def words_of(line: str) -> str:
    """Return a line without its numbers."""
    return _NUMBER.sub("#", line).strip()


def compare_lines(
    reference: Sequence[str],
    lines: Sequence[str],
    tolerance: Tolerance,
    changing: ChangingNumbers,
    floors: PrintedFloors | None = None,
) -> PrintedComparison:
    """Compare what two runs have printed.

    Args:
        reference: the lines of the run that is right.
        lines: those of the other run.
        tolerance: the differences that are rounding.
        changing: numbers that are left out.
        floors: how far rounding alone moves them; None: not measured.
    """
    comparison, measured = PrintedComparison(), {} if floors is None else floors.floors
    for number, (right, line) in enumerate(zip(reference, lines, strict=False), 1):
        is_same = words_of(right) == words_of(line)
        if is_same:
            skipped = changing.places.get(words_of(right), set())
            pairs = list(zip(_NUMBER.findall(right), _NUMBER.findall(line), strict=True))
            errors = {at: tolerance.error(float(b), float(a)) for at, (a, b) in enumerate(pairs) if at not in skipped}
            comparison.numbers += len(errors)
            comparison.left_out += len(pairs) - len(errors)
            line_floors = {at: measured.get((number, at), 0.0) for at in errors}
            rounded = {at for at, error in errors.items() if tolerance.is_rounding(error, line_floors[at])}
            comparison.rounded += len(rounded)
            remaining_errors = [error for at, error in errors.items() if at not in rounded]
            comparison.worst = max([comparison.worst, *remaining_errors])
            is_same = all(error <= tolerance.relative for error in remaining_errors)
        if not is_same and not comparison.difference:
            comparison.difference = f"line {number} is {_show(line)}, not {_show(right)}"
            comparison.floor = max((floor for (of, _), floor in measured.items() if of == number), default=0.0)
    if len(reference) != len(lines) and not comparison.difference:
        longer = max((reference, lines), key=len)
        at = min(len(reference), len(lines))
        words = "is missing" if longer is reference else "is one too many"
        comparison.difference = f"line {at + 1} {words}: {_show(longer[at])}"
    return comparison


def _show(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
