"""Verdict: a run's speed and what its workers did, in one line; and what to do where they are slower than one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAR_OFF = 3.0  # times what was predicted: worth a sentence
SMALLEST_SHARE = 0.01  # what is less is not worth a word

# In the order in which they are told, most first, beside computing, which comes first.
_WORDS = {
    "bubble": "bubble",
    "moving": "moving bytes",
    "communicating": "communicating",
    "waiting": "waiting",
    "loading": "waiting for data",
}


def describe_verdict(
    shares: Mapping[str, Any], workers: int, alone: float | None, predicted: float | None = None
) -> str:
    """Describe how a run went: ``2.9 times the speed of one device, on 4 workers; 61% computing, 12% waiting``.

    The speed is that of the steps without loading.

    Args:
        shares: mean shares of observed steps and their mean duration, see :meth:`.StepColumns.means`.
        workers: number of workers that train.
        alone: predicted seconds of a step on one device; None where it is not known, or there is one worker.
        predicted: predicted seconds of a step of the plan; None where it is not known.

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
    seconds, speed = _busy_seconds(shares), ""
    if alone is not None and workers > 1 and seconds:
        comparison = "" if not predicted else f" ({_format(seconds)} a step, {_format(predicted)} predicted)"
        speed = f"{alone / seconds:.2g} times the speed of one device, on {workers} workers{comparison}; "
    return speed + ", ".join(words)


def advise_on_speed(shares: Mapping[str, Any], workers: int, alone: float | None, predicted: float | None) -> list[str]:
    """Return sentences on a run that is slower than it should be: by a worker, than predicted, or than one device.

    Args:
        shares: mean shares of observed steps and their mean duration.
        workers: number of workers that train.
        alone: predicted seconds of a step on one device; None where it is not known.
        predicted: predicted seconds of a step of the plan; None where it is not known.
    """
    seconds, sentences = _busy_seconds(shares) if shares else 0.0, list[str]()
    if slow := shares.get("slow"):
        sentences.append(slow["sentence"])
    if workers == 1 or not seconds:
        return sentences
    if predicted and seconds > FAR_OFF * predicted:
        ratio = f"{seconds / predicted:.2g}" if seconds < 10 * predicted else f"{seconds / predicted:.0f}"
        sentences.append(
            f"a step takes {ratio} times what was predicted: other programs keep this machine busy, "
            "or the step is so short that the work between its operators counts, which is not predicted"
        )
    if alone is not None and alone < seconds:
        sentences.append(
            f"one worker is likely to be faster, with {_format(alone)} a step predicted: leave out --plan and "
            "--workers, or let each step do more (a larger batch or model)"
        )
    return sentences


def _busy_seconds(shares: Mapping[str, Any]) -> float:
    """Return the seconds of a step without loading: what one device would take for that is not predicted."""
    return float(shares["seconds"]) * (1 - float(shares.get("loading", 0.0)))


def _format(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _name_culprit(name: str, shares: Mapping[str, Any]) -> str:
    """Return for whom is waited, where that is one worker for the most part."""
    waits = shares.get("waiting_for", {})
    if name != "waiting" or not waits:
        return ""
    rank, share = max(waits.items(), key=lambda item: item[1])
    total = sum(waits.values())
    return f" for rank {rank}" if share > 0.8 * total else f", most for rank {rank}" if share > 0.5 * total else ""
