"""Consecutive steps: by how much one begins before the last worker is done with the step before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task
from polylane.observe.timeline import Timeline
from polylane.schedule.action import ActionKind

# Steps that are played one behind the other; the distance of the last two is that of all further ones.
STEPS = 3


def overlap_seconds(lanes: Sequence[Sequence[Task]], step: Timeline, hosts: Sequence[SharedCores] = ()) -> float:
    """Return the seconds by which equal steps, one behind the other, take less than one step from its start to its end.

    No worker waits for the others between two steps, except in sums that all of them take part in: one whose last pass
    ends early begins the next step early. A step lasts from where it begins until the last lane is done; many of them
    take its seconds less these.

    Args:
        lanes: the tasks of every lane in one step, first to last.
        step: the timeline of that step alone.
        hosts: hosts whose lanes share cores, as of :func:`polylane.cost.simulator.simulate.simulate_tasks`.
    """
    end = step.makespan()
    lane_ends = dict.fromkeys(range(len(lanes)), 0.0)
    for span in step.spans:
        lane_ends[span.rank] = max(lane_ends[span.rank], span.end)
    # A step begins in the lanes that receive nothing first. Where these end last, the next one cannot begin earlier.
    begin = [number for number, lane in enumerate(lanes) if lane and lane[0].action.kind is not ActionKind.RECEIVE]
    if all(math.isclose(lane_ends[number], end, rel_tol=1e-9) for number in begin):
        return 0.0
    short_run, long_run = (simulate_tasks([[*lane] * steps for lane in lanes], hosts) for steps in (STEPS - 1, STEPS))
    return max(0.0, end - (long_run.makespan() - short_run.makespan()))
