"""Simulation without contention: every start and end is a longest path, found in time linear in the tasks."""

from __future__ import annotations

from collections.abc import Iterable

from polylane.cost.simulator.matching import Role, ScheduledTask, Transmission


def longest_path(lanes: Iterable[Iterable[ScheduledTask]]) -> None:
    """Compute start and end of every task and transfer; those that can never run keep end None.

    Args:
        lanes: the tasks of every lane in order. A task is taken from its lane once the one before it has its end, so
            that a lane may also be a generator which makes its tasks as they are run.
    """
    # Each lane runs until it needs a transfer of unknown arrival; the lanes that complete the transfer put it
    # back on ``ready_lanes``.
    iterators = [iter(lane) for lane in lanes]
    current = [next(tasks, None) for tasks in iterators]
    clock: list[float] = [0] * len(iterators)
    ready_lanes = list(range(len(iterators)))
    while ready_lanes:
        lane = ready_lanes.pop()
        while (op := current[lane]) is not None:
            missing = _unknown_message(op, clock[lane], ready_lanes)
            if missing is not None:
                missing.waiting_lanes += (lane,)  # its arrival puts the lane on again
                break
            clock[lane] = _finish_time(op, clock[lane], ready_lanes)
            current[lane] = next(iterators[lane], None)


def _unknown_message(op: ScheduledTask, time: float, ready_lanes: list[int]) -> Transmission | None:
    """Return a transfer that a lane waits for at a task and whose arrival is not known yet; None if it can proceed."""
    if op.role is Role.COMPUTE:
        return next((travel for travel in op.awaited if travel.arrival is None), None) if op.awaited else None
    if op.role is Role.SEND:
        return None
    travel = op.message
    assert travel is not None
    if op.start is None:
        op.start = time
        if op.requests_on_arrival:
            _mark_ready(travel, time, ready_lanes)
    return travel if travel.arrival is None and op.role is not Role.ASK else None


def _finish_time(op: ScheduledTask, time: float, ready_lanes: list[int]) -> float:
    """Return when the lane is done with a task whose transfers all have known arrivals."""
    travel, seconds = op.message, op.task.seconds
    if op.role is Role.COMPUTE:
        for awaited in op.awaited:
            time = max(time, awaited.arrival or 0)
        op.start, op.end = time, time + seconds
        for fraction, freed in op.released:
            _mark_ready(freed, op.end if fraction == 1 else time + fraction * seconds, ready_lanes)
        return op.end
    assert travel is not None
    if op.role is Role.SEND:
        op.start, op.end = time, time + seconds
        if op.requests_on_arrival:
            _mark_ready(travel, op.end, ready_lanes)
        return op.end
    if op.role is not Role.ASK:
        assert travel.arrival is not None
        op.start = max(time, travel.requested_at)
        time = max(time, travel.arrival) + seconds
    op.end = time
    return time


def _mark_ready(travel: Transmission, time: float, ready_lanes: list[int]) -> None:
    """Count one more lane as ready for a transfer; the last one schedules it, and those queued behind it."""
    travel.requested_at = max(travel.requested_at, time)
    travel.missing_count -= 1
    moving = [] if travel.missing_count else [travel]
    while moving:
        travel = moving.pop()
        # ``missing_count`` reached 0: both times are final now.
        travel.start = max(travel.requested_at, travel.channel_free_at)
        travel.end = travel.start + travel.transfer.seconds
        travel.arrival = travel.end + travel.transfer.latency
        ready_lanes += travel.waiting_lanes
        for behind in travel.next_on_channel:
            behind.channel_free_at = max(behind.channel_free_at, travel.end)
            behind.missing_count -= 1
            if not behind.missing_count:
                moving.append(behind)
