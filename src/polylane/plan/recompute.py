"""Recomputation as a plan says it: none, selective, full, or as little as keeps within a budget of bytes."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic_core import PydanticCustomError

from polylane.cluster.figures import figure
from polylane.errors import format_value

NONE = "none"
MODES = (NONE, "selective", "full")
BUDGET = "budget:"
WANTED = f"must be {', '.join(MODES)}, or a budget such as {BUDGET}200MB"


def read_recompute(given: Any) -> str:
    """Validate what a plan recomputes: one of :data:`MODES`, or a budget.

    Raises:
        PydanticCustomError: it is neither.
    """
    if isinstance(given, str) and (given in MODES or budget_bytes(given) is not None):
        return given
    raise PydanticCustomError("recompute", "{why}", {"why": f"{WANTED}, not {format_value(given)}"})


def budget_bytes(text: str) -> float | None:
    """Return the bytes that a microbatch may keep from its forward to its backward pass; None without a budget."""
    if not text.startswith(BUDGET):
        return None
    found = figure(text.removeprefix(BUDGET))
    return found[0] if found is not None and found[1] in ("size", None) and found[0] > 0 else None


Recompute = Annotated[str, pydantic.BeforeValidator(read_recompute)]
