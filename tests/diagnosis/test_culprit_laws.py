"""The walk names exactly the rank that was stopped, wherever that was, under every schedule, plan and cut."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.diagnosis.culprit import Finding, RankState, Wait, find_culprits
from polylane.program.check import match_messages
from polylane.program.program import Program
from polylane.schedule.action import ActionKind
from tests.diagnosis.program_states import states_at
from tests.properties.test_program_laws import Lowered, lowereds
from tests.support import subsets


def run_until_all_stand(programs: tuple[Program, ...], stopped: int, at: int) -> dict[int, int]:
    """Positions of all ranks once nobody can go on, where one of them never finishes the action at a position."""
    senders = {receiver: sender for sender, receiver in match_messages(programs)}
    position = dict.fromkeys((p.rank for p in programs), 0)
    reduces = {(p.rank, a.value): i for p in programs for i, a in enumerate(p.actions) if a.kind is ActionKind.REDUCE}
    members = {(p.rank, b.name): b.ranks for p in programs for b in p.buckets}
    passes = {p.rank: [i for i, a in enumerate(p.actions) if a.kind.startswith("backward")] for p in programs}

    def launched(rank: int, bucket: str | None) -> bool:
        before = [i for i in passes[rank] if i < reduces[rank, bucket]]
        return not before or position[rank] > before[-1]

    def can_finish(rank: int, place: int) -> bool:
        action = programs[rank].actions[place]
        if (rank, place) == (stopped, at):
            return False
        if action.kind is ActionKind.RECEIVE:
            sender, sent = senders[rank, place]
            return position[sender] > sent
        if action.kind is ActionKind.REDUCE:
            return all(launched(other, action.value) for other in members[rank, action.value])
        return True

    moved = True
    while moved:
        moved = False
        for program in programs:
            while position[program.rank] < len(program.actions) and can_finish(program.rank, position[program.rank]):
                position[program.rank] += 1
                moved = True
    return position


@given(lowereds(), st.data())
@settings(max_examples=subsets.examples(100), deadline=None)
def test_the_walk_names_exactly_the_stopped_rank(made: Lowered, data: st.DataObject) -> None:
    programs = made.programs
    stopped = data.draw(st.sampled_from([p.rank for p in programs if p.actions]))
    at = data.draw(st.integers(0, len(programs[stopped].actions) - 1))
    positions = run_until_all_stand(programs, stopped, at)
    states = states_at(programs, positions)
    assert positions[stopped] == at
    # Stopped where it would wait itself, its process says so; anywhere else the walk needs no such evidence.
    if states[stopped].is_waiting:
        states[stopped] = replace(states[stopped], is_frozen=True)
    found = find_culprits(states)
    assert found.culprits == (stopped,)
    # Each host alone blames nobody of its own but the stopped rank, and that one where a rank of the host waits for it.
    for host in (0, 1):
        known = {rank: state for rank, state in states.items() if rank % 2 == host}
        alone = find_culprits(known)
        is_seen = stopped in known and any(stopped in found.waits_for.get(rank, ()) for rank in known)
        assert alone.culprits == (stopped,) or (alone.culprits == () and not is_seen)
        assert stopped in known or not alone.culprits
        # Else it names those of other hosts for which its own ones wait, and no link.
        assert not known or alone.culprits or ({*alone.elsewhere}.isdisjoint(known) and alone.elsewhere)
        assert alone.link is None
    assert found.waiting_for(stopped) == tuple(rank for rank in range(len(programs)) if rank != stopped)


@given(lowereds())
@settings(max_examples=subsets.examples(50), deadline=None)
def test_without_a_stopped_rank_all_reach_the_end(made: Lowered) -> None:
    positions = run_until_all_stand(made.programs, -1, -1)
    assert positions == {p.rank: len(p.actions) for p in made.programs}
    everyone = tuple(range(len(made.programs)))
    found = find_culprits(states_at(made.programs, positions))
    assert found.culprits == () and found.circle == ()
    assert found.link == Wait("step", 1, everyone)


@st.composite
def collectives(draw: st.DrawFn) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    """Collectives in one order for all, each over a group of ranks, and the number of ranks."""
    ranks = draw(st.integers(2, 6))
    groups = st.sets(st.integers(0, ranks - 1), min_size=2).map(lambda members: tuple(sorted(members)))
    names = draw(st.lists(groups, min_size=1, max_size=4, unique=True))
    calls = [(str(group), group) for group in draw(st.lists(st.sampled_from(names), min_size=1, max_size=12))]
    return [*calls, (str(tuple(range(ranks))), tuple(range(ranks)))], ranks


@given(collectives(), st.data())
@settings(max_examples=subsets.examples(200), deadline=None)
def test_who_did_not_arrive_at_a_collective_is_named(
    made: tuple[list[tuple[str, tuple[int, ...]]], int], data: st.DataObject
) -> None:
    calls, ranks = made
    own = {rank: [(line, group) for line, group in calls if rank in group] for rank in range(ranks)}
    stopped = data.draw(st.integers(0, ranks - 1))
    before = data.draw(st.integers(0, len(own[stopped]) - 1))  # of so many calls, then it stops
    states, done = {}, dict.fromkeys(range(ranks), 0)
    while True:
        begun = {r: _counts(own[r][: done[r] + 1]) for r in range(ranks)}
        begun[stopped] = _counts(own[stopped][: min(done[stopped] + 1, before)])
        waits = {r: (calls_of[done[r]] if done[r] < len(calls_of := own[r]) else None) for r in range(ranks)}
        free = [
            r
            for r, wait in waits.items()
            if wait is not None
            and not (r == stopped and done[r] >= before)
            and all(begun[other].get(wait[0], 0) >= begun[r][wait[0]] for other in wait[1])
        ]
        if not free:
            break
        for r in free:
            done[r] += 1
    for r, wait in waits.items():
        waiting = None if wait is None or r == stopped else Wait(wait[0], begun[r][wait[0]], wait[1])
        states[r] = RankState(waiting, begun[r])
    assert find_culprits(states).culprits == (stopped,)


def _counts(calls: list[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line, _ in calls:
        counts[line] = counts.get(line, 0) + 1
    return counts


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    states = {0: RankState(Wait("1>0", 1, (0, 1))), 1: RankState(Wait("0>1", 1, (0, 1)))}
    assert find_culprits(states).circle == (0, 1)


def test_an_operation_that_all_have_begun_and_wait_for_is_a_link() -> None:
    wait = Wait("all", 3, (0, 1))
    states = {rank: RankState(wait, {"all": 3}) for rank in (0, 1)}
    assert find_culprits(states) == Finding(link=wait, waits_for={0: (), 1: ()})


def test_who_has_begun_and_is_busy_elsewhere_is_waited_for() -> None:
    states = {0: RankState(Wait("all", 3, (0, 1)), {"all": 3}), 1: RankState(None, {"all": 3})}
    assert find_culprits(states).culprits == (1,)
