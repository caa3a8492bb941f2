"""Stragglers: ranks that a plan slows down on purpose, to see the effect on the others; in a file, and in one line."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from polylane.errors import PolylaneError
from polylane.yaml_file import Count, StrictMapping


class Straggler(StrictMapping):
    """Slows one rank down: its passes take ``times`` as long, in one of ``every`` steps.

    Attributes:
        times: factor of the duration of a forward or backward pass, at least 1.
        every: one of so many steps is slow; which one depends on the rank, so that stragglers take turns.
    """

    times: Annotated[float, pydantic.Field(ge=1, allow_inf_nan=False)]
    every: Count = 1

    def factor_at(self, step: int, rank: int) -> float:
        """Return the factor by which the passes of a step take longer."""
        return self.times if step % self.every == rank % self.every else 1.0


def _read_straggler(value: Any) -> Any:
    """Read the short form: a number alone is ``times``, in every step."""
    return {"times": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


Slowness = dict[pydantic.StrictInt, Annotated[Straggler, pydantic.BeforeValidator(_read_straggler)]]


def parse_stragglers(text: str) -> dict[int, Straggler]:
    """Parse ranks and how slow they are made: "1:2" or "1:2@4", or several joined by +.

    Raises:
        PolylaneError: the text is not of that form, or names a rank twice.
    """
    stragglers = dict[int, Straggler]()
    for piece in text.split("+"):
        rank, colon, slowness = piece.partition(":")
        times, at, period = slowness.partition("@")
        try:
            if not colon or not rank.isdecimal() or (at and not period.isdecimal()):
                raise ValueError(piece)
            if int(rank) in stragglers:
                raise PolylaneError(f"slow={text[:60]} names rank {int(rank)} twice")
            stragglers[int(rank)] = Straggler(times=float(times), every=int(period) if at else 1)
        except ValueError as error:  # pydantic's own is one
            raise PolylaneError(
                f"slow={text[:60]} must be RANK:TIMES, as in 1:2.5 (times of at least 1), or RANK:TIMES@STEPS: in one "
                "of so many steps"
            ) from error
    return stragglers


def straggler_words(slow: dict[int, Straggler]) -> list[str]:
    """Format stragglers as a word of a plan in one line; no word if there are none."""
    pieces = [f"{rank}:{s.times:g}" + (f"@{s.every}" if s.every > 1 else "") for rank, s in slow.items()]
    return ["slow=" + "+".join(pieces)] if pieces else []
