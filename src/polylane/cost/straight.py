"""Play lanes that share nothing: every start and end is a longest path, found in time linear in the tasks."""

from __future__ import annotations

from polylane.cost.matching import Does, Op, Travel


def straight(lanes: list[list[Op]]) -> None:
    """Find when every task and travel runs; those that can never run are left without an end."""
    at = [0] * len(lanes)
    clock: list[float] = [0] * len(lanes)
    again = list(range(len(lanes)))
    while again:
        lane = again.pop()
        ops, now = lanes[lane], clock[lane]
        index = at[lane]
        while index < len(ops):
            op = ops[index]
            missing = _missing(op, now, again)
            if missing is not None:
                missing.waiting += (lane,)  # whoever ends it tries this lane again
                break
            now = _run(op, now, again)
            index += 1
        at[lane], clock[lane] = index, now


def _missing(op: Op, now: float, again: list[int]) -> Travel | None:
    """What is not known yet of that for which the lane waits, having come so far."""
    if op.does is Does.COMPUTE:
        return next((travel for travel in op.waits if travel.arrival is None), None) if op.waits else None
    if op.does is Does.SEND:
        return None
    travel = op.travel
    assert travel is not None
    if op.start is None:
        op.start = now
        if op.asks:
            _ready(travel, now, again)
    return travel if travel.arrival is None and op.does is not Does.ASK else None


def _run(op: Op, now: float, again: list[int]) -> float:
    """When the lane is done with a task for which it waits no more."""
    travel, seconds = op.travel, op.task.seconds
    if op.does is Does.COMPUTE:
        for awaited in op.waits:
            now = max(now, awaited.arrival or 0)
        op.start, op.end = now, now + seconds
        for fraction, freed in op.frees:
            _ready(freed, op.end if fraction == 1 else now + fraction * seconds, again)
        return op.end
    assert travel is not None
    if op.does is Does.SEND:
        op.start, op.end = now, now + seconds
        if op.asks:
            _ready(travel, op.end, again)
        return op.end
    if op.does is not Does.ASK:
        assert travel.arrival is not None
        op.start = max(now, travel.asked)
        now = max(now, travel.arrival) + seconds
    op.end = now
    return now


def _ready(travel: Travel, time: float, again: list[int]) -> None:
    """One more who is ready for a travel; the last one lets it move, and with it those behind it."""
    travel.asked = max(travel.asked, time)
    travel.missing -= 1
    moving = [] if travel.missing else [travel]
    while moving:
        travel = moving.pop()
        travel.start = max(travel.asked, travel.free)
        travel.end = travel.start + travel.transfer.seconds
        travel.arrival = travel.end + travel.transfer.latency
        again += travel.waiting
        for behind in travel.next:
            behind.free = max(behind.free, travel.end)
            behind.missing -= 1
            if not behind.missing:
                moving.append(behind)
