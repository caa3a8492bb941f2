"""Verdict: how a run went, in a sentence, and what would change it: by its measurements, simulator and noise scale."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from polylane.commands.logs.metrics_file import find_batch
from polylane.commands.logs.verdict import describe_verdict
from polylane.commands.reporting.curves import read_number
from polylane.commands.reporting.run_files import RunFiles, read_list, read_mapping, read_noise
from polylane.efficiency.batch_rules import adascale_gain, statistical_efficiency
from polylane.errors import format_plural
from polylane.observe.time_account import account_time

# Shares of the time from which on something is worth a sentence.
WORTH = 0.05
FACTORS = (0.25, 0.5, 1, 2, 4, 8)  # of the batch, that are rated


def find_verdict(run: RunFiles) -> str:
    """Return how the run went in one sentence: its own, or of what was measured so far; "" where nothing is known."""
    if run.failure:
        return run.failure
    if run.goodput.get("verdict"):
        return str(run.goodput["verdict"])
    shares, waits = _mean_shares(run)
    if not shares:
        return f"{format_plural(len(run.steps), 'step')}; where their time went was not measured" if run.steps else ""
    seconds = [s for line in run.steps[1:] if (s := read_number(line.get("seconds")))]
    workers = next((timeline.ranks for timeline in run.timelines.values()), 0)
    alone = read_number(run.predicted.get("one_device_seconds")) if seconds and workers else None
    typical = statistics.median(seconds) if seconds else 0.0
    return describe_verdict({**shares, "waiting_for": waits, "seconds": typical}, workers, alone or None)


def _mean_shares(run: RunFiles) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the mean shares of the observed steps but the first, or of the typical step, and the waits by rank."""
    observed = [line for line in run.steps if read_number(line.get("computing")) is not None]
    observed = observed[1:] or observed
    if not observed:
        if not run.timelines:
            return {}, {}
        account = account_time(next(iter(run.timelines.values())))
        return account.shares(), {str(rank): share for rank, share in account.waiting_for().items()}
    shares, waits = defaultdict[str, float](float), defaultdict[str, float](float)
    for line in observed:
        for name in ("computing", "moving", "communicating", "waiting", "bubble", "loading", "checkpoint_stall"):
            shares[name] += (read_number(line.get(name)) or 0.0) / len(observed)
        for rank, share in read_mapping(line.get("waiting_for")).items():
            waits[str(rank)] += (read_number(share) or 0.0) / len(observed)
    return shares, waits


def describe_changes(run: RunFiles) -> list[str]:
    """Return sentences on what would make the run faster, the largest gain first: of what is measured or simulated."""
    sentences: list[tuple[float, str]] = []
    for change in map(read_mapping, read_list(run.predicted.get("changes"))):
        if gain := read_number(change.get("faster")):
            words = str(change.get("change", ""))
            subject = f"{words[:1].upper()}{words[1:]}"
            sentences.append((gain, f"{subject}: {gain:.2f} times as fast, simulated ({change.get('plan')})."))
    shares, waits = _mean_shares(run)
    slow = read_mapping(run.goodput.get("slow"))
    if slow.get("sentence"):  # says whom the others wait for
        sentences.append((read_number(slow.get("gain")) or 1.0, f"{slow['sentence']}."))
    for rank, share in waits.items():
        if share >= WORTH and not slow.get("sentence"):
            gain = 1 / max(0.1, 1 - share)
            cause = "it is slower than the others, or has more to do"
            sentences.append((gain, f"No waits for rank {rank}: up to {gain:.2f} times as fast; {cause}."))
    for name, words in _CAUSES.items():
        if (share := shares.get(name, 0.0)) >= WORTH:
            gain = 1 / max(0.1, 1 - share)
            sentences.append((gain, f"{words}: {share:.0%} of the time, up to {gain:.2f} times as fast without."))
    wall = read_number(run.goodput.get("wall_seconds"))
    for cause, value in read_mapping(run.goodput.get("seconds")).items():
        share = (read_number(value) or 0.0) / wall if wall else 0.0
        if cause in _BETWEEN_STEPS and share >= WORTH:
            gain = 1 / max(0.1, 1 - share)
            sentences.append((gain, f"{_BETWEEN_STEPS[cause]}: {share:.0%} of the wall time."))
    return [sentence for _, sentence in sorted(sentences, key=lambda item: -item[0])]


_CAUSES = {
    "loading": "Data that is not there when a step needs it",
    "moving": "Bytes that move while nothing is computed",
    "checkpoint_stall": "Checkpoints that hold up the steps",
}


# Causes of lost wall time that are no part of a step, see `polylane.commands.logs.goodput`.
_BETWEEN_STEPS = {
    "evaluation": "Tests of the model",
    "start": "The start, before the first step",
    "compiling": "Batches of new forms, which are captured",
    "checkpoint": "Checkpoints that are saved between steps",
    "redone steps": "Steps that were made again after a restart: save checkpoints more often",
    "stopped": "Time between two attempts",
}


def rate_other_batches(run: RunFiles) -> dict[str, Any]:
    """Return what other batches would bring at the run's last noise scale; empty where that was not measured.

    ``rows`` has for each batch: samples, steps for the same progress as one step now, and samples for it, each with
    the ends of its 95% interval.
    """
    noises = [line for line in run.steps if read_noise(line)]
    if not noises:
        return {}
    line, batch = noises[-1], _find_batch(run)
    noise = read_noise(line)
    ends = [read_number(noise.get(name)) for name in ("scale", "low", "high")]
    if ends[0] is None or not batch:
        return {"note": "not enough data yet: the gradients' noise hides how large they are", "rows": []}
    scale = ends[0]
    low, high = (scale if end is None else max(0.0, end) for end in ends[1:])
    rows = []
    for factor in FACTORS:
        size = batch * factor
        if size < 1:
            continue
        steps = [1 / adascale_gain(number, size, batch) for number in (scale, low, high)]
        samples = [1 / statistical_efficiency(number, size, batch) for number in (scale, low, high)]
        rows.append([round(size), *(float(f"{number:.4g}") for number in (*steps, *samples))])
    return {"scale": scale, "low": low, "high": high, "batch": batch, "step": line["step"], "rows": rows}


def _find_batch(run: RunFiles) -> int:
    """Return the number of samples of the run's latest full steps; 0 where that is not known."""
    rows = [
        [(read_number(line.get("step")), read_number(line.get(key))) for line in lines]
        for lines, key in ((run.steps, "samples"), (run.batch_changes, "size"))
    ]
    steps, changes = ([(step, size) for step, size in pairs if step is not None and size is not None] for pairs in rows)
    return find_batch(steps, changes)
