"""Launches of all workers have one order: nothing waits in a circle if each holds up all later ones of its worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.spec import Spec
from polylane.program.lower import lower
from polylane.program.meeting_order import TOGETHER, event_key, order_meetings, order_steady_meetings
from polylane.program.program import Program
from polylane.program.waits import list_postings
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import ASYNCHRONOUS
from tests.properties.test_program_laws import Lowered, any_lowereds
from tests.support.synthetic_graphs import chain

SCHEDULES = ("naive", "afab", "1f1b", "zb-h1", "zb-h2")


def launches_of_step(program: Program) -> Iterator[Action]:
    """Yield what a worker launches in a step, in order: receives where they are posted, all else where it stands."""
    for index, action in enumerate(program.actions):
        yield from (posting.receive for posting in program.meetings[index])
        if action.kind is not ActionKind.RECEIVE:
            yield action


def launches_of_steps(program: Program, steps: int, delay: int) -> Iterator[Any]:
    """Yield the same of an asynchronous pipeline: (action, its batch), and the number of a step at its end."""
    for step in range(steps + delay):
        for index in range(len(program.actions) + 1):
            for posting in program.meetings[index]:
                batch = step + posting.steps_ahead - posting.receive.steps_back
                if 0 <= batch < steps and batch <= step:  # a batch that has begun
                    yield posting.receive, batch
            if index < len(program.actions):
                action = program.actions[index]
                batch = step - action.steps_back
                if action.kind is not ActionKind.RECEIVE and 0 <= batch < steps:
                    yield action, batch
        yield step


def launch_graph(launches: Sequence[Sequence[Any]]) -> nx.DiGraph[Any]:
    """Return the order of launches: a message is one node for both sides, a pass one for all ranks of its stage."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    for rank, of_rank in enumerate(launches):
        numbers, nodes = Counter[Any](), list[Any]()
        for launch in of_rank:
            action, batch = launch if isinstance(launch, tuple) else (launch, 0)
            if isinstance(action, int):
                nodes.append(("end of step", action))
            elif action.kind in (ActionKind.SEND, ActionKind.RECEIVE):
                pair = (rank, action.peer) if action.kind is ActionKind.SEND else (action.peer, rank)
                nodes.append((pair, numbers[pair]))
                numbers[pair] += 1
            elif action.kind in TOGETHER:
                nodes.append((event_key(action), batch))
        graph.add_nodes_from(nodes)
        graph.add_edges_from(pairwise(nodes))
    return graph


def count_messages(launches: Sequence[Sequence[Any]]) -> Counter[Any]:
    """Return how many sends less receives every pair of ranks launches."""
    balance = Counter[Any]()
    for rank, of_rank in enumerate(launches):
        for launch in of_rank:
            action = launch[0] if isinstance(launch, tuple) else launch
            if isinstance(action, Action) and action.kind is ActionKind.SEND:
                balance[rank, action.peer] += 1
            elif isinstance(action, Action) and action.kind is ActionKind.RECEIVE:
                balance[action.peer, rank] -= 1
    return balance


@given(any_lowereds)
@settings(deadline=None)
def test_launches_of_a_step_have_one_order(made: Lowered) -> None:
    """For any graph with skips, any cuts, schedule, order, microbatches and meshes."""
    launches = [list(launches_of_step(program)) for program in order_meetings(made.programs)]
    assert nx.is_directed_acyclic_graph(launch_graph(launches))
    assert not any(count_messages(launches).values())


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_receives_are_posted_where_their_message_can_come(schedule: str, stages: int, microbatches: int) -> None:
    """Neither before the passes that it waits for, nor behind the pass that needs it."""
    partition = Partition(chain(stages), tuple(range(1, stages)))
    plan = plan_from_partition(partition, Spec(pipeline=stages, schedule=schedule), microbatches)
    programs = order_meetings(lower(partition, plan))
    launches = [list(launches_of_step(program)) for program in programs]
    assert nx.is_directed_acyclic_graph(launch_graph(launches))
    for program in programs:
        for index, row in enumerate(program.meetings):
            assert all(program.actions.index(posting.receive) >= index for posting in row)
    if schedule == "1f1b" and microbatches > 1:
        # Of two stages that send to each other at the same time one posts its receive before its own send.
        first_sends = next(i for i, action in enumerate(launches[-1]) if action.kind is ActionKind.SEND)
        assert sum(action.kind is ActionKind.RECEIVE for action in launches[-1][:first_sends]) == 2


@given(
    st.sampled_from(ASYNCHRONOUS),
    st.integers(2, 5),
    st.integers(1, 6),
    st.sampled_from([(1, "split"), (2, "split"), (2, "round-robin"), (3, "round-robin")]),
    st.booleans(),
    st.integers(1, 12),
)
@settings(deadline=None)
def test_launches_of_an_asynchronous_pipeline_have_one_order(
    schedule: str, stages: int, microbatches: int, replicas: tuple[int, Any], vertical: bool, steps: int
) -> None:
    """From an empty pipeline to an empty one, with the sum of all ranks' losses between two steps."""
    partition = Partition(chain(stages), tuple(range(1, stages)))
    spec = Spec(pipeline=stages, schedule=schedule, data=replicas[0], replicas=replicas[1])
    try:
        spec = replace(spec, vertical_sync=vertical and schedule == "pipedream")
        plan = plan_from_partition(partition, spec, microbatches)
    except PolylaneError:  # too few microbatches for the schedule or the replicas
        assume(False)
    programs = order_steady_meetings(lower(partition, plan), plan)
    delay = max(action.steps_back for program in programs for action in program.actions)
    launches = [list(launches_of_steps(program, steps, delay)) for program in programs]
    assert nx.is_directed_acyclic_graph(launch_graph(launches))
    assert not any(count_messages(launches).values())


@pytest.mark.parametrize("replicas", [(1, "split"), (2, "round-robin"), (4, "round-robin")])
@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
@pytest.mark.parametrize("stages", [8, 12, 24])
def test_long_pipelines_come_to_a_steady_step(stages: int, schedule: str, replicas: tuple[int, Any]) -> None:
    """With as few microbatches as the plan takes, a batch is under way for the most steps."""
    partition, data = Partition(chain(stages), tuple(range(1, stages))), replicas[0]
    fewest = data if schedule == "pipedream" else data * stages
    spec = Spec(pipeline=stages, schedule=schedule, data=data, replicas=replicas[1])
    plan = plan_from_partition(partition, spec, fewest)
    programs = order_steady_meetings(lower(partition, plan), plan)
    delay = max(action.steps_back for program in programs for action in program.actions)
    launches = [list(launches_of_steps(program, 2 * delay + 2, delay)) for program in programs]
    assert nx.is_directed_acyclic_graph(launch_graph(launches))
    assert not any(count_messages(launches).values())


def test_posting_two_passes_ahead_has_no_order() -> None:
    """What gloo's receives may do would be a circle: the law finds it."""
    partition = Partition(chain(4), (1, 2, 3))
    programs = lower(partition, plan_from_partition(partition, Spec(pipeline=4, schedule="1f1b"), 8))

    def launches(program: Program) -> Iterator[Action]:
        for index, action in enumerate(program.actions):
            yield from (posting.receive for posting in list_postings(program, is_ordered=False)[index])
            if action.kind is not ActionKind.RECEIVE:
                yield action

    assert not nx.is_directed_acyclic_graph(launch_graph([list(launches(program)) for program in programs]))


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved", "zb-v"])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_no_more_messages_are_held_than_memory_is_predicted_for(schedule: str, stages: int) -> None:
    """Predictions post two passes ahead; in the order of meetings as many are held or fewer, with chunks one more."""
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    partition = Partition(chain(stages * chunks), tuple(range(1, stages * chunks)))
    spec = Spec(pipeline=stages, schedule=schedule, chunks=chunks)
    programs = order_meetings(lower(partition, plan_from_partition(partition, spec, 2 * stages)))
    for program in programs:
        assert count_held(program, is_ordered=True) <= count_held(program, is_ordered=False) + (chunks > 1)


def count_held(program: Program, is_ordered: bool) -> int:
    """Return the most receives that are posted and not waited for yet."""
    held, most = 0, 0
    for index, row in enumerate(list_postings(program, is_ordered)):
        most = max(most, held := held + len(row))
        held -= index < len(program.actions) and program.actions[index].kind is ActionKind.RECEIVE
    return most
