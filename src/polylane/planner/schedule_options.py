"""Schedules that a search compares: seconds of a step and live microbatches of each in closed form, for rating."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polylane.plan.fixed_keys import COMPARED, ScheduleOption
from polylane.plan.sync import SyncOptions
from polylane.planner.balance import Array
from polylane.schedule.estimates import StageSeconds
from polylane.schedule.round_robin import WARM_UPS
from polylane.schedule.schedules import ASYNCHRONOUS, KINDS, splits_backward

# The schedule that every estimate starts from.
PLAIN_SCHEDULE = COMPARED[0]
# Relative speed-up that other schedules must bring: twice if they keep more microbatches than 1F1B's first worker, so
# that of equally fast ones the plainest comes first.
GAIN = 0.01


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
        if microbatches // max_turns < KINDS[name].min_microbatches(stages):
            continue
        if len(set(turns)) > 1 and name not in WARM_UPS:
            continue
        choices.append(option)
    return choices


def pipeline_seconds(option: ScheduleOption, times: StageSeconds, microbatches: int) -> float:
    """Return the seconds of the passes of a step, from one step to the next, as an estimate.

    Args:
        option: the schedule, and the stages of every worker.
        times: seconds of one microbatch on every worker.
        microbatches: number of microbatches of a step.
    """
    name, chunks = option
    return KINDS[name].step_seconds(times, chunks, microbatches)


def live_microbatches(option: ScheduleOption, stages: int, microbatches: int) -> Array:
    """Return the microbatches that every group of workers holds at once, in whole ones of all its stages."""
    name, chunks = option
    max_live: Array = np.ones(stages) * KINDS[name].live(np.arange(float(stages)), stages, chunks)
    return np.minimum(float(microbatches), max_live)


def penalize(seconds: float, option: ScheduleOption) -> float:
    """Return the seconds by which schedules are ranked: those of any but 1F1B with what it must be faster by."""
    if option == PLAIN_SCHEDULE:
        return seconds
    return seconds * (1 + (GAIN if option[0] in KINDS and KINDS[option[0]].is_lean else 2 * GAIN))
