"""Redistribution of a tensor between placements: its collective, or what is copied, forward and for the gradient."""

from __future__ import annotations

from polylane.placement.placement import Partial, Placement, Replicate, Shard, gradient_placement
from polylane.placement.redistribute import collective_name


def redistribute(size: float, source: Placement, target: Placement, flows: bool) -> list[tuple[str, float]]:
    """The collective that brings a tensor from one placement to another, and the one that brings its gradient back.

    Args:
        size: bytes of the whole tensor, as far as other axes leave it to the ranks.
        source, target: placements along one axis.
        flows: whether a gradient comes back.

    Returns:
        One or two passes, each with its collective, or "" and the bytes that a rank copies in its own memory.
    """
    passes = (
        [(source, target), (gradient_placement(target), gradient_placement(source))] if flows else [(source, target)]
    )
    named = [(collective_name(start, end), start, end) for start, end in passes]
    return [(name, 0.0 if name else _copied_bytes(size, start, end)) for name, start, end in named]


def largest_share(placement: Placement) -> float:
    """How much of a tensor the busiest rank has."""
    return placement.largest_share if isinstance(placement, Shard) else 1.0


def _copied_bytes(size: float, source: Placement, target: Placement) -> float:
    """Bytes that a rank writes where nothing travels: a part of its own, or zeros around it."""
    if isinstance(source, Replicate):
        return size * largest_share(target) if isinstance(target, (Shard, Partial)) else 0.0
    return size if isinstance(source, Shard) and isinstance(target, Partial) else 0.0
