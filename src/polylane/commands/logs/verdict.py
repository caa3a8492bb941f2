"""Verdict: a run's speed and what its workers did, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALLEST_SHARE = 0.01  # what is less is not worth a word

# In the order in which they are told, most first, beside computing, which comes first.
_WORDS = {
    "bubble": "bubble",
    "moving": "moving bytes",
    "communicating": "communicating",
    "waiting": "waiting",
    "loading": "waiting for data",
}


def describe_verdict(shares: Mapping[str, Any], workers: int, alone: float | None) -> str:
    """Describe how a run went: ``2.9 times the speed of one device on 4; 61% computing, 12% waiting for rank 3``.

    The speed is that of the steps without loading.

    Args:
        shares: mean shares of observed steps and their mean duration, see :meth:`.StepColumns.means`.
        workers: number of workers that train.
        alone: predicted seconds of a step on one device; None where it is not known, or there is one worker.

    Returns:
        An empty text where no step was observed.
    """
    if not shares:
        return ""
    # What observed shares tell of is the time from a step's first action to its last; before it, workers wait for data.
    busy_share = 1 - shares.get("loading", 0.0)
    words = [f"{busy_share * shares.get('computing', 0.0):.0%} computing"]
    parts = {name: shares.get(name, 0.0) * (1 if name == "loading" else busy_share) for name in _WORDS}
    for name, share in sorted(parts.items(), key=lambda part: -part[1]):
        if share >= SMALLEST_SHARE:
            words.append(f"{share:.0%} {_WORDS[name]}{_name_culprit(name, shares)}")
    # What one device would take to load its samples is not predicted.
    seconds = shares["seconds"] * busy_share
    speed = (
        ""
        if alone is None or workers == 1 or not seconds
        else f"{alone / seconds:.2g} times the speed of one device on {workers}; "
    )
    return speed + ", ".join(words)


def _name_culprit(name: str, shares: Mapping[str, Any]) -> str:
    """Return for whom is waited, where that is one worker for the most part."""
    waits = shares.get("waiting_for", {})
    if name != "waiting" or not waits:
        return ""
    rank, share = max(waits.items(), key=lambda item: item[1])
    total = sum(waits.values())
    return f" for rank {rank}" if share > 0.8 * total else f", most for rank {rank}" if share > 0.5 * total else ""
