"""Redistribution cost: the collective, or the local copy, that changes a tensor's placement, and its gradient's."""

from __future__ import annotations

from polylane.placement.placement import Partial, Placement, Replicate, Shard, gradient_placement
from polylane.placement.redistribute import collective_name


def redistribute(size: float, source: Placement, target: Placement, flows: bool) -> list[tuple[str, float]]:
    """Return the collectives that bring a tensor from one placement to another, and its gradient back.

    Args:
        size: bytes of the tensor unsharded along this axis, but sharded along the others.
        source, target: placements before and after, along one axis.
        flows: whether a gradient is redistributed back.

    Returns:
        One or two passes, each as (collective, 0), or ("", bytes that a rank copies locally).
    """
    passes = (
        [(source, target), (gradient_placement(target), gradient_placement(source))] if flows else [(source, target)]
    )
    named = [(collective_name(start, end), start, end) for start, end in passes]
    return [(name, 0.0 if name else _copied_bytes(size, start, end)) for name, start, end in named]


def largest_share(placement: Placement) -> float:
    """Return the fraction of a tensor that the busiest rank has."""
    return placement.largest_share if isinstance(placement, Shard) else 1.0


def _copied_bytes(size: float, source: Placement, target: Placement) -> float:
    """Return the bytes that a rank writes where nothing is communicated: its own slice, or zeros around it."""
    if isinstance(source, Replicate):
        return size * largest_share(target) if isinstance(target, (Shard, Partial)) else 0.0
    return size if isinstance(source, Shard) and isinstance(target, Partial) else 0.0
