"""Schedules that a search compares: seconds of a step and live microbatches of each in closed form, for rating."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polylane.plan.fixed_keys import COMPARED, ScheduleOption
from polylane.plan.sync import SyncOptions
from polylane.planner.balance import Array
from polylane.schedule.round_robin import WARM_UPS
from polylane.schedule.schedules import ASYNCHRONOUS, splits_backward

# The schedule that every estimate starts from.
PLAIN_SCHEDULE = COMPARED[0]
# Relative speed-up that other schedules must bring: twice if they keep more microbatches than 1F1B's first worker, so
# that of equally fast ones the plainest comes first.
GAIN = 0.01
_LEAN = ("zb-h1", "zb-v")


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on every worker of a pipeline, all its stages together.

    Attributes:
        forward, backward: seconds of a pass, by worker.
        weight: of ``backward``, seconds of the half that makes gradients of weights.
        halving: seconds by which both halves of a backward pass take longer than the whole, by worker.
        hops: seconds of all messages of a microbatch, there and back, where every worker has one stage.
        overhead: seconds of the host for every pass of a stage, in both passes once; each further pass adds it.
    """

    forward: Array
    backward: Array
    weight: Array
    halving: Array | float = 0.0
    hops: float = 0.0
    overhead: float = 0.0

    @property
    def hop(self) -> float:
        """Seconds of a value from one worker to the next, and of its gradient back."""
        return self.hops / (len(self.forward) - 1) if len(self.forward) > 1 else 0.0


def usable_options(
    options: Sequence[ScheduleOption],
    stages: int,
    microbatches: int,
    most_stages: int,
    sync: SyncOptions,
    turns: Sequence[int] = (),
) -> list[ScheduleOption]:
    """Return the schedules that so many groups of workers may have; those that a plan would be refused with are none.

    Args:
        options: schedules, and the chunks of each.
        stages: number of groups of workers in the pipeline.
        microbatches: number of microbatches of a step.
        most_stages: most stages into which the graph can be cut.
        sync: how replicas synchronize, and whether they share parameters out.
        turns: numbers of replicas that compute whole microbatches in turn, of every group; empty where they split them.
    """
    max_turns = max(turns, default=1)
    if stages == 1 and PLAIN_SCHEDULE in options:
        return [PLAIN_SCHEDULE]  # one worker alone waits for nobody
    choices = []
    for option in options:
        name, chunks = option
        if chunks > 1 and stages == 1:
            continue
        if stages * chunks > most_stages and chunks > 1:
            continue
        # Weights are released between the halves of a backward pass (`polylane.plan.plan.check`).
        if splits_backward(name) and sync.shard == "parameters":
            continue
        if name in ASYNCHRONOUS and not sync.is_plain_sum:
            continue
        # Replicas in turn have an equal part of every update (`polylane.plan.schedule_checks`).
        if name in ASYNCHRONOUS and microbatches % max_turns:
            continue
        if name == "pipedream-2bw" and microbatches // max_turns < stages - 1:
            continue
        if len(set(turns)) > 1 and name not in WARM_UPS:
            continue
        choices.append(option)
    return choices


def pipeline_seconds(option: ScheduleOption, times: StageSeconds, microbatches: int) -> float:
    """Return the seconds of the passes of a step, from one step to the next, as an estimate.

    1F1B's is that of Huang et al., GPipe, 2019, section 2.3, for unequal stages, with the messages that a forward of
    the steady state waits for. The others' follow from their bubbles for equal stages (docs/schedules.md), where what
    one stage adds to the bubble is what it takes itself; a microbatch's way there and back, over the microbatches that
    are live, bounds the period from below.

    Args:
        option: the schedule, and the stages of every worker.
        times: seconds of one microbatch on every worker.
        microbatches: number of microbatches of a step.
    """
    name, chunks = option
    if splits_backward(name):
        longer = times.halving
        times = replace(times, backward=times.backward + longer, weight=times.weight + longer, halving=0 * longer)
    forward, backward, weight, m, k = times.forward, times.backward, times.weight, microbatches, len(times.forward)
    passes, input_half = forward + backward, backward - weight
    slowest, total, hops = float(passes.max()), float(passes.sum()), times.hops
    if name == "naive":
        return m * (total + hops)
    if name == "1f1b":
        return total + hops + (m - 1) * (slowest + times.hop)
    if name == "afab":
        return total + hops + (m - 1) * float(forward.max() + backward.max())
    if name in ASYNCHRONOUS:
        return m * max(slowest, (total + hops) / k)
    awaited_seconds = float((forward + input_half).sum())  # seconds of the passes that other stages wait for
    if name == "interleaved":
        # Each pass of a chunk has a launch of its own. One more message leads from the last worker to the first.
        busy = slowest + 2 * (chunks - 1) * times.overhead
        round_trip = total + chunks * hops * k / max(1, k - 1)
        period = max(busy, round_trip / (k + (k - 1) / chunks))
        fill = (total - slowest) / chunks if m >= k else total - slowest + (m - 1) * slowest * (1 / chunks - 1)
        return max(round_trip, m * period + fill + hops)
    f, i, w = np.delete(np.stack([forward, input_half, weight]), int(passes.argmax()), axis=1)
    # The last microbatch goes there and back behind all others.
    shortest = awaited_seconds + hops + (m - 1) * float((forward + input_half).max()) + float(weight.min()) / chunks
    if name == "zb-h1":
        period = max(slowest + times.overhead, (awaited_seconds + hops) / k)
        return max(shortest, m * period + float((i + np.maximum(0, f - w)).sum()) + hops)
    # A worker may begin the next step while others are at this one: what counts is how long it takes itself.
    if name == "zb-v":
        # The first worker waits for its last chunk.
        waiting = float(forward.sum()) + hops - (m + 1) / 2 * float(forward[0])
        period = max(slowest + 4 * times.overhead, (awaited_seconds + 2 * hops) / k)
        return max(shortest + hops, m * period + max(0.0, waiting, float(np.maximum(0, f + i - 2 * w).sum()) / 2))
    # The first worker waits for its first gradient.
    waiting = awaited_seconds - float(input_half[0]) + hops - m * float(forward[0])
    period = max(slowest + times.overhead, (awaited_seconds + hops) / (2 * k - 1))
    return m * period + max(0.0, waiting, float(np.maximum.reduce([np.zeros_like(f), i - f, f + i - 2 * w]).sum()))


def live_microbatches(option: ScheduleOption, stages: int, microbatches: int) -> Array:
    """Return the microbatches that every group of workers holds at once, in whole ones of all its stages."""
    name, chunks = option
    index = np.arange(float(stages))
    max_live: Array | float
    if name == "naive":
        max_live = 1
    elif name == "afab":
        max_live = math.inf
    elif name == "interleaved":
        max_live = (2 * (stages - 1 - index) + (chunks - 1) * stages + 1) / chunks
    elif name == "zb-h2":
        max_live = 2 * stages - 1
    elif name in ("zb-h1", "zb-v"):
        max_live = stages
    else:
        max_live = stages - index
    return np.minimum(float(microbatches), max_live) * np.ones(stages)


def penalize(seconds: float, option: ScheduleOption) -> float:
    """Return the seconds by which schedules are ranked: those of any but 1F1B with what it must be faster by."""
    if option == PLAIN_SCHEDULE:
        return seconds
    return seconds * (1 + (GAIN if option[0] in _LEAN else 2 * GAIN))
