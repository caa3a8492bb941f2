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
    # back on ``again``.
    left = [iter(lane) for lane in lanes]
    current = [next(tasks, None) for tasks in left]
    clock: list[float] = [0] * len(left)
    again = list(range(len(left)))
    while again:
        lane = again.pop()
        while (op := current[lane]) is not None:
            missing = _unknown_message(op, clock[lane], again)
            if missing is not None:
                missing.waiting_lanes += (lane,)  # its arrival puts the lane on again
                break
            clock[lane] = _finish_time(op, clock[lane], again)
            current[lane] = next(left[lane], None)


def _unknown_message(op: ScheduledTask, now: float, again: list[int]) -> Transmission | None:
    """Return a transfer that a lane waits for at a task and whose arrival is not known yet; None if it can proceed."""
    if op.role is Role.COMPUTE:
        return next((travel for travel in op.awaited if travel.arrival is None), None) if op.awaited else None
    if op.role is Role.SEND:
        return None
    travel = op.message
    assert travel is not None
    if op.start is None:
        op.start = now
        if op.requests_on_arrival:
            _mark_ready(travel, now, again)
    return travel if travel.arrival is None and op.role is not Role.ASK else None


def _finish_time(op: ScheduledTask, now: float, again: list[int]) -> float:
    """Return when the lane is done with a task whose transfers all have known arrivals."""
    travel, seconds = op.message, op.task.seconds
    if op.role is Role.COMPUTE:
        for awaited in op.awaited:
            now = max(now, awaited.arrival or 0)
        op.start, op.end = now, now + seconds
        for fraction, freed in op.released:
            _mark_ready(freed, op.end if fraction == 1 else now + fraction * seconds, again)
        return op.end
    assert travel is not None
    if op.role is Role.SEND:
        op.start, op.end = now, now + seconds
        if op.requests_on_arrival:
            _mark_ready(travel, op.end, again)
        return op.end
    if op.role is not Role.ASK:
        assert travel.arrival is not None
        op.start = max(now, travel.requested_at)
        now = max(now, travel.arrival) + seconds
    op.end = now
    return now


def _mark_ready(travel: Transmission, time: float, again: list[int]) -> None:
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
        again += travel.waiting_lanes
        for behind in travel.next_on_channel:
            behind.channel_free_at = max(behind.channel_free_at, travel.end)
            behind.missing_count -= 1
            if not behind.missing_count:
                moving.append(behind)
