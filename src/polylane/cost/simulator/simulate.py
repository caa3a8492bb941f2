"""Simulation of a step: start and end of the tasks of all lanes, where cores may be shared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from polylane.cost.simulator.contention import ContentionSimulator
from polylane.cost.simulator.longest_path import longest_path
from polylane.cost.simulator.matching import MatchedLanes, Role, ScheduledTask, Transmission, match_lanes
from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.task import Task, describe_action
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import ActionKind


def simulate_tasks(lanes: Sequence[Sequence[Task]], hosts: Sequence[SharedCores] = ()) -> Timeline:
    """Run the tasks of every lane in order, each as early as what it waits for allows.

    A computing task keeps its lane; a step first waits for the overlapped reductions before it. A send keeps the lane
    for its own seconds, if any; its transfer then proceeds independently. A receive waits until its message has
    arrived. Messages of a lane to one peer move one after another, and so do its reductions. A reduction moves once all
    its lanes are ready for it, and done with those before it; unless it is overlapped it keeps its lanes until it is
    done.

    If more lanes of a host compute than it has cores, all are slowed equally: k lanes on c cores run at speed c/k. A
    transfer takes its share of a core for as long as it lasts, however slow it is.

    In the timeline a pass, a step and a send last as long as they keep their lane; a receive begins when its lane waits
    for it and its message has been requested; a reduction lasts from when it moves until it is done and no lane waits
    for it. Time in which a lane neither computes nor communicates waits for a lane that is still busy.
    The timeline ends when all lanes are done; messages that no lane waits for may then still be in flight.

    If cores suffice for everything at once, the run time is linear in the tasks, and integers stay integers.
    Else every start and end is an event, which changes the speeds of all that share cores with it.

    Args:
        lanes: the tasks of every lane, first to last.
        hosts: hosts whose lanes share cores; a lane of no host has a core of its own.

    Returns:
        The timeline in seconds; rank = lane.

    Raises:
        ValueError: tasks that `polylane.cost.simulator.matching.match_lanes` refuses; hosts with unknown lanes, or
            lanes with two hosts; or a deadlock, with the blocked task and what it waits for.
    """
    _check_hosts(len(lanes), hosts)
    matched = match_lanes(lanes)
    # Without possible contention the linear algorithm gives the same result, exact for integers.
    tight = [host for host in hosts if _can_contend(host, matched)]
    if tight:
        ContentionSimulator(matched.lanes, tight).run()
    else:
        longest_path(matched.lanes)
    _check_all_ran(matched)
    spans = tuple(span for lane, ops in enumerate(matched.lanes) for span in _spans(lane, ops))
    return Timeline(spans=spans, ranks=len(lanes), groups=_groups_of_reduces(matched.messages))


def _groups_of_reduces(transmissions: Sequence[Transmission]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups of lanes of the reductions that several groups have under one name."""
    groups = defaultdict[str, dict[tuple[int, ...], None]](dict)
    for travel in transmissions:
        if travel.action.kind is ActionKind.REDUCE and travel.action.value is not None:
            groups[travel.action.value][travel.lanes] = None
    return {name: tuple(lanes) for name, lanes in groups.items() if len(lanes) > 1}


def _can_contend(host: SharedCores, matched: MatchedLanes) -> bool:
    """Return whether the lanes of a host can slow each other: whether all of them at once exceed it."""
    host_lanes = set(host.lanes)
    peak_demands: dict[Hashable, float] = {}  # by exclusive key: these never overlap
    for travel in matched.messages:
        if travel.transfer.cpu and travel.transfer.seconds:
            cpu = travel.transfer.cpu * sum(lane in host_lanes for lane in travel.end_lanes)
            peak_demands[travel.exclusive_key] = max(peak_demands.get(travel.exclusive_key, 0), cpu)
    contended = any(host.slowdown(count) != 1 for count in range(1, len(host.lanes) + 1))
    return contended or len(host.lanes) + sum(peak_demands.values()) > host.cores


def _spans(lane: int, ops: Sequence[ScheduledTask]) -> Iterator[Span]:
    for op in ops:
        start, end, task, travel = op.start, op.end, op.task, op.message
        if travel is not None and op.role in (Role.REDUCE, Role.ASK):
            start, end = travel.start, travel.arrival if op.role is Role.ASK else end
        assert start is not None and end is not None  # all have run
        yield Span(rank=lane, action=task.action, start=start, end=end, waited=task.waited, bytes=task.bytes)


def _check_hosts(lanes: int, hosts: Sequence[SharedCores]) -> None:
    seen_lanes: set[int] = set()
    for host in hosts:
        for lane in host.lanes:
            if not 0 <= lane < lanes or lane in seen_lanes:
                why = "has another host" if lane in seen_lanes else f"is none of {lanes} lanes"
                raise ValueError(f"a host cannot have lane {lane}, which {why}")
            seen_lanes.add(lane)


def _check_all_ran(matched: MatchedLanes) -> None:
    for lane, ops in enumerate(matched.lanes):
        blocked = next((op for op in ops if op.end is None), None) if ops and ops[-1].end is None else None
        if blocked is not None:
            about = (blocked.message,) if blocked.message is not None else blocked.awaited
            missing = next(travel for travel in about if travel.arrival is None)
            raise ValueError(
                f"deadlock: {describe_action(blocked.task.action)} in lane {lane} waits for "
                f"{_explain_stall(missing, matched)}"
            )
    for travel in matched.messages:
        if travel.arrival is None:
            raise ValueError(f"deadlock: {describe_action(travel.action)} waits for {_explain_stall(travel, matched)}")


def _explain_stall(travel: Transmission, matched: MatchedLanes) -> str:
    """Explain what keeps a transfer from arriving."""
    late = [
        lane
        for lane in travel.lanes
        if any(
            op.message is travel and (op.end if op.role is Role.SEND else op.start) is None
            for op in matched.lanes[lane]
        )
    ]
    if not late:
        return f"{describe_action(travel.action)}, which waits for its receiver or for those before it on its channel"
    lane_names = f"lane {late[0]}" if len(late) == 1 else f"lanes {', '.join(map(str, late))}"
    return f"{describe_action(travel.action)} in {lane_names}, which is itself blocked, or comes later there"
