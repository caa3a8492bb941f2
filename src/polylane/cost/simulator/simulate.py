"""Play the tasks of all lanes: who runs when, and who waits for whom, where cores and links may be shared."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from polylane.cost.simulator.contention import ContentionSimulator
from polylane.cost.simulator.longest_path import longest_path
from polylane.cost.simulator.matching import MatchedLanes, Role, ScheduledTask, Transmission, match_lanes
from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.task import Task, describe_action
from polylane.observe.timeline import Span, Timeline


def simulate_tasks(
    lanes: Sequence[Sequence[Task]], hosts: Sequence[SharedCores] = (), links: Mapping[Hashable, float] | None = None
) -> Timeline:
    """Run the tasks of every lane in order, each as early as what it waits for allows.

    A computing task keeps its lane; a step first waits for the overlapped reductions before it. A send keeps the lane
    for its own seconds, if any, and its transfer then moves on its own. A receive waits until its message has arrived.
    A reduction moves once all its lanes are ready for it and its channel is free in each of them; unless it is
    overlapped it keeps its lanes until it is done.

    Where more lanes of a host compute than it has cores, all of them are slowed alike: k lanes on c cores run at c/k.
    A transfer takes part with the share of a core that it costs, for as long as it lasts, however slow it is. Transfers
    on links that cannot carry all of them are slowed max-min fairly.

    In the timeline a pass, a step and a send last as long as they keep their lane; a receive from when its lane waits
    for it and its message has been asked for; a reduction from when it moves, until it is done and no lane waits for
    it. So where a lane neither computes nor communicates it waits for somebody who is still at work: a bubble. The
    timeline ends when all lanes are done; messages that nobody waits for may then still be under way.

    Where cores and links can carry everything at once the time taken is linear in the tasks, and whole numbers stay
    whole. Else every start and end is an event, at which those who share with it get new speeds.

    Args:
        lanes: the tasks of every lane, first to last.
        hosts: lanes that share cores; a lane of no host has a core of its own.
        links: the capacity of links, by name; 1 of those that are not named here.

    Returns:
        The timeline in seconds; rank = lane.

    Raises:
        ValueError: what `polylane.cost.simulator.matching.match_lanes` refuses; hosts of lanes that are not there or
            have two hosts; a
            capacity not above 0; or lanes that can never proceed, with the task that is blocked and what it waits for.
    """
    _check_inputs(len(lanes), hosts, links or {})
    matched = match_lanes(lanes)
    tight = [host for host in hosts if _can_contend(host, matched)]
    narrow = _narrow_links(matched.messages, links or {})
    if tight or narrow:
        ContentionSimulator(matched.lanes, tight, narrow).run()
    else:
        longest_path(matched.lanes)
    _check_all_ran(matched)
    spans = tuple(span for lane, ops in enumerate(matched.lanes) for span in _spans(lane, ops))
    return Timeline(spans=spans, ranks=len(lanes))


def _can_contend(host: SharedCores, matched: MatchedLanes) -> bool:
    """Whether its lanes can ever feel that they share the host: whether all at once would be too much."""
    own = set(host.lanes)
    most: dict[Hashable, float] = {}  # of the transfers of a chain, which never meet
    for travel in matched.messages:
        if travel.transfer.cpu and travel.transfer.seconds:
            cpu = travel.transfer.cpu * sum(lane in own for lane in travel.end_lanes)
            most[travel.exclusive_key] = max(most.get(travel.exclusive_key, 0), cpu)
    contended = any(host.slowdown(count) != 1 for count in range(1, len(host.lanes) + 1))
    return contended or len(host.lanes) + sum(most.values()) > host.cores


def _narrow_links(travels: Sequence[Transmission], capacity: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Of the links that are used, those too narrow for all who may use them at once, with their capacity."""
    most: dict[Hashable, dict[Hashable, float]] = {}  # of the transfers of a chain, which never meet
    for travel in travels:
        for link, amount in travel.transfer.links.items() if travel.transfer.seconds else ():
            chains = most.setdefault(link, {})
            chains[travel.exclusive_key] = max(chains.get(travel.exclusive_key, 0), amount)
    # Shares that add up to 1 but for rounding are not too much.
    limits = {link: (capacity.get(link, 1.0), sum(chains.values())) for link, chains in most.items()}
    return {link: limit for link, (limit, total) in limits.items() if total > limit * (1 + 1e-12)}


def _spans(lane: int, ops: Sequence[ScheduledTask]) -> Iterator[Span]:
    for op in ops:
        start, end, task, travel = op.start, op.end, op.task, op.message
        if travel is not None and op.role in (Role.REDUCE, Role.ASK):
            start, end = travel.start, travel.arrival if op.role is Role.ASK else end
        assert start is not None and end is not None  # all have run
        yield Span(rank=lane, action=task.action, start=start, end=end, waited=task.waited, bytes=task.bytes)


def _check_inputs(lanes: int, hosts: Sequence[SharedCores], links: Mapping[Hashable, float]) -> None:
    seen: set[int] = set()
    for host in hosts:
        for lane in host.lanes:
            if not 0 <= lane < lanes or lane in seen:
                why = "has another host" if lane in seen else f"is none of {lanes} lanes"
                raise ValueError(f"a host cannot have lane {lane}, which {why}")
            seen.add(lane)
    for link, capacity in links.items():
        if not 0 < capacity < math.inf:
            raise ValueError(f"the capacity of link {link!r} must be more than 0, not {capacity}")


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
    """What keeps a travel from arriving."""
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
    which = f"lane {late[0]}" if len(late) == 1 else f"lanes {', '.join(map(str, late))}"
    return f"{describe_action(travel.action)} in {which}, which is itself blocked, or comes later there"
