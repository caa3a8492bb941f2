"""What is measured on, and what a measurement gives: rows of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Setting:
    """Where and how much is measured.

    Attributes:
        device: "cuda" or "cpu", the devices of the workers.
        quick: small models and few steps, to see that it works; its figures mean nothing.
    """

    device: str
    quick: bool


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        subject: the table that it stands in, such as "equality".
        name: what was measured.
        figures: measured numbers and words by the names of their columns.
        holds: whether what must be true is true; None where a figure has no bound.
    """

    subject: str
    name: str
    figures: dict[str, Any]
    holds: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return asdict(self)


def relative_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of any tensor of two states, relative to the tensor's largest number."""
    worst = 0.0
    for name, want in wanted.items():
        if not want.is_floating_point():
            continue
        scale = float(want.abs().max()) or 1.0
        worst = max(worst, float((found[name].cpu() - want.cpu()).abs().max()) / scale)
    return worst


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed all that was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def format_figure(value: Any) -> str:
    """Format a number for a table."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "NO", None: ""}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of all figures of some rows, in order."""
    return list(dict.fromkeys(name for row in rows for name in row.figures))
