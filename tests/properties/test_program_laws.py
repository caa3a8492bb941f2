"""Laws of lowering, for any graph with skips, any cuts, schedule, number of microbatches, and mesh of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from random import Random

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polylane.graph.graph import Graph
from polylane.graph.partition import Partition, cut_positions
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.lanes import stage_graph_of
from polylane.plan.order import format_order
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees, Spec
from polylane.program.check import check, match_messages
from polylane.program.lower import crossing_as_sent, lower, lower_evaluation
from polylane.program.program import Program
from polylane.program.waits import receive_horizons, waiting_microbatch
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import FOUND, SCHEDULES
from tests.support.synthetic_graphs import graph

MESHES = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 3), (1, 3, 2), (2, 2, 2)]


@dataclass(frozen=True)
class Lowered:
    partition: Partition
    plan: Plan
    partial: dict[str, set[str]]
    programs: tuple[Program, ...]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Every node reads some earlier ones; weights are used at one place or several; some nodes are free."""
    size = draw(st.integers(2, 12))
    free = draw(st.sets(st.integers(0, size - 2), max_size=2))
    inputs = []
    for i in range(size):
        # A free node reads only free ones, for it needs no data.
        earlier = [j for j in range(i) if i not in free or j in free]
        inputs.append(draw(st.lists(st.sampled_from(earlier), max_size=3, unique=True)) if earlier else [])
    users = st.sets(st.sampled_from([i for i in range(size) if i not in free]), min_size=1, max_size=3)
    parameters = {f"w{i}": sorted(draw(users)) for i in range(draw(st.integers(0, 5)))}
    return graph(
        inputs,
        parameters,
        free=free,
        without_gradient=draw(st.sets(st.integers(0, size - 1), max_size=2)) | free,
        frozen=draw(st.sets(st.sampled_from(sorted(parameters)), max_size=2)) if parameters else (),
        parameter_bytes=draw(st.sampled_from([64, 3 << 20])),
    )


@st.composite
def lowereds(draw: st.DrawFn, alike: bool = True) -> Lowered:
    """A graph cut anywhere, on meshes that are alike or not, in any schedule or in any order that can be run."""
    made = draw(graphs())
    allowed = cut_positions(made)
    cuts = tuple(sorted(draw(st.sets(st.sampled_from(allowed), max_size=7)))) if allowed else ()
    partition = Partition(made, cuts)
    degrees = st.sampled_from(MESHES).map(lambda mesh: Degrees(*mesh))
    schedule, chunks = draw(st.sampled_from([*SCHEDULES, "zb-h1", "zb-h2", FOUND])), 1
    if divisors := [n for n in (2, 3) if partition.stages % n == 0 and partition.stages > n]:
        chunks = draw(st.sampled_from([1, *divisors]))
        several = ["interleaved", FOUND] + ["zb-v"] * (chunks == 2)
        schedule = schedule if chunks == 1 else draw(st.sampled_from(several))
    groups = partition.stages // chunks
    meshes = [draw(degrees)] * groups if alike else [draw(degrees) for _ in range(groups)]
    spec = Spec(schedule=schedule, stages=tuple(meshes), pipeline=groups, chunks=chunks)
    plan = plan_from_partition(partition, spec, draw(st.integers(1, 6)))
    if schedule == FOUND:
        lanes = random_order(draw(st.randoms(use_true_random=False)), partition, plan)
        plan = plan.model_copy(update={"order": format_order(lanes)})
    axes = st.sets(st.sampled_from(["sequence", "tensor"]))
    partial = draw(st.dictionaries(st.sampled_from(sorted(made.parameters)), axes)) if made.parameters else {}
    return Lowered(partition, plan, partial, lower(partition, plan, None, (partial,) * plan.pipeline))


def random_order(random: Random, partition: Partition, plan: Plan) -> list[list[Action]]:
    """Passes of every group of workers in an order that can be run: each behind all that it needs, by chance."""
    graph, count = stage_graph_of(partition, plan), plan.microbatches
    lanes: list[list[Action]] = [[] for _ in range(1 + max(plan.stage_groups))]
    forwards, backwards = [0] * graph.stages, [0] * graph.stages
    # Some orders run far ahead on few stages, others keep all of them busy.
    weights = [random.choice((1, 10)) for _ in range(2 * graph.stages)]
    while min(backwards) < count:
        ready = [
            (ActionKind.FORWARD, stage)
            for stage, done in enumerate(forwards)
            if done < count and all(forwards[other] > done for other in graph.predecessors[stage])
        ] + [
            (ActionKind.BACKWARD, stage)
            for stage, done in enumerate(backwards)
            if done < forwards[stage] and all(backwards[other] > done for other in graph.successors[stage])
        ]
        likely = [weights[2 * stage + (kind is ActionKind.BACKWARD)] for kind, stage in ready]
        ((kind, stage),) = random.choices(ready, likely)
        numbers = forwards if kind is ActionKind.FORWARD else backwards
        lanes[plan.stage_groups[stage]].append(Action(kind, stage, numbers[stage]))
        numbers[stage] += 1
    return lanes


any_lowereds = lowereds() | lowereds(alike=False)


def played(programs: tuple[Program, ...], seed: int = 0) -> int:
    """Run the programs as executors do, in one of many timings; how many actions were done when all stood still.

    On each pair of ranks messages are taken in the order in which they are sent, and only once their receive is posted.
    """
    sent: dict[tuple[int, int], list[Action]] = {}
    posted: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], int] = {}
    horizons = {program.rank: receive_horizons(program.actions) for program in programs}
    at, posts = dict.fromkeys(horizons, 0), dict.fromkeys(horizons, 0)
    # By worker and stage: channel, number on it and first waiting microbatch of each send that is not waited for yet.
    pending: dict[tuple[int, int], list[tuple[tuple[int, int], int, int]]] = {}
    done, moved = 0, True
    while moved:
        moved = False
        for program in sorted(programs, key=lambda program: hash((seed, done, program.rank))):
            rank = program.rank
            while at[rank] < len(program.actions):
                action = program.actions[at[rank]]
                for ahead in program.actions[posts[rank] : horizons[rank][at[rank]]]:
                    if ahead.kind is ActionKind.RECEIVE and ahead.peer is not None:
                        posted[ahead.peer, rank] = posted.get((ahead.peer, rank), 0) + 1
                        moved = True
                    posts[rank] += 1
                if action.kind is ActionKind.RECEIVE:
                    assert action.peer is not None
                    channel = action.peer, rank
                    number = received.get(channel, 0)
                    if number >= len(sent.get(channel, ())):
                        break
                    other = sent[channel][number]
                    what = (other.value, other.microbatch, other.gradient)
                    assert what == (action.value, action.microbatch, action.gradient)
                    received[channel] = number + 1
                elif action.kind is ActionKind.SEND:
                    assert action.peer is not None
                    own = sent.setdefault((rank, action.peer), [])
                    waiting = (rank, action.peer), len(own), waiting_microbatch(program, action)
                    pending.setdefault((rank, action.stage), []).append(waiting)
                    own.append(action)
                elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
                    assert action.microbatch is not None
                    kept = [each for each in pending.get((rank, action.stage), ()) if each[1] >= posted.get(each[0], 0)]
                    pending[rank, action.stage] = kept
                    if any(until <= action.microbatch for _, _, until in kept):
                        break
                at[rank] += 1
                done += 1
                moved = True
                if seed:  # another worker's turn
                    break
    assert all(received.get(channel, 0) == len(messages) for channel, messages in sent.items()), "nobody received them"
    return done


@given(any_lowereds, st.integers(0, 3))
@settings(deadline=None)
def test_every_program_runs_to_its_end(made: Lowered, seed: int) -> None:
    check(made.programs)
    assert played(made.programs, seed) == sum(len(p.actions) for p in made.programs)


@given(lowereds(alike=False))
@settings(deadline=None)
def test_every_gradient_is_summed_once_where_meshes_differ(made: Lowered) -> None:
    """Of every summand exactly one rank of its mesh adds it, and all who hold the parameter get the sum."""
    plan = made.plan
    for name in with_gradient(made.partition.graph):
        holders = {plan.first_chunk(s) for s in range(plan.pipeline) if name in made.partition.parameters(s)}
        stages = sorted(holders)
        aligned = all(plan.have_same_mesh(stages[0], s) for s in stages)
        for rank in (rank for stage in stages for rank in plan.stages[stage].devices):
            (bucket,) = (b for b in made.programs[rank].buckets if name in b.parameters)
            assert rank in bucket.ranks
            if aligned:
                assert not bucket.zero_contributors
                continue
            assert set(bucket.ranks) == {r for stage in stages for r in plan.stages[stage].devices}
            summed = made.partial.get(name, set())
            at = plan.coordinates(rank)
            assert (rank in bucket.zero_contributors) == any(index for axis, index in at.items() if axis not in summed)


@given(any_lowereds)
@settings(deadline=None)
def test_evaluation_runs_to_its_end(made: Lowered) -> None:
    programs = lower_evaluation(made.partition, made.plan)
    check(programs)
    assert played(programs) == sum(len(p.actions) for p in programs)
    assert {a.kind for p in programs for a in p.actions} <= {ActionKind.FORWARD, ActionKind.SEND, ActionKind.RECEIVE}


@given(any_lowereds)
@settings(deadline=None)
def test_values_go_straight_and_gradients_come_back(made: Lowered) -> None:
    """For each microbatch one message from producer to each other group of workers that needs the value, and one back
    for its gradient; between all who may have something for each other."""
    stage_of, plan = made.partition.stage_of, made.plan
    needed = Counter[tuple[int, str, int, int]]()  # microbatch, value, from, to
    for group in plan.first_chunks:
        own = {name for s in plan.chunks(group) for node in made.partition.nodes(s) for name in node.inputs}
        for name in own:
            node = made.partition.graph.nodes[made.partition.graph.positions[name]]
            if not node.recomputable and plan.first_chunk(stage_of[name]) != group:
                for i, (start, end) in product(range(plan.microbatches), talking(plan, stage_of[name], group)):
                    needed[i, name, start, end] += 1
                    if node.requires_grad:
                        needed[i, f"d {name}", end, start] += 1
    sent = Counter(
        (a.microbatch, f"d {a.value}" if a.gradient else a.value, p.rank, a.peer)
        for p in made.programs
        for a in p.actions
        if a.kind is ActionKind.SEND
    )
    assert sent == needed
    assert len(match_messages(made.programs)) == sum(needed.values())


def talking(plan: Plan, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranks of two stages of which one may have what the other needs.

    With the same mesh those with the same coordinates, with as many replicas those of the same one, else everybody.
    """
    for a, b in product(plan.stages[start].devices, plan.stages[end].devices):
        same_replica = plan.stage_and_replica(a)[1] == plan.stage_and_replica(b)[1]
        if plan.have_same_mesh(start, end):
            if plan.indices(a) == plan.indices(b):
                yield a, b
        elif same_replica or plan.degree("data", start) != plan.degree("data", end):
            yield a, b


@given(any_lowereds)
@settings(deadline=None)
def test_a_stage_has_what_it_reads_before_it_computes(made: Lowered) -> None:
    for program in made.programs:
        has: set[tuple[str | None, int | None, bool, int | None]] = set()
        ready: set[tuple[ActionKind, int, int | None]] = set()
        for action in program.actions:
            if action.kind is ActionKind.RECEIVE:
                has.add((action.value, action.microbatch, action.gradient, action.peer))
            elif action.kind is ActionKind.FORWARD:
                for crossing in program.inputs(action.stage):
                    if (local := program.local_sources.get((crossing.value, action.stage))) is not None:
                        assert (ActionKind.FORWARD, local, action.microbatch) in ready
                        continue
                    for source in made.plan.peers(program.rank, crossing.producer):
                        assert (crossing.value, action.microbatch, False, source) in has
            elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
                assert (ActionKind.FORWARD, action.stage, action.microbatch) in ready
                for crossing in (c for c in program.outputs(action.stage) if c.requires_grad):
                    sent = crossing_as_sent(crossing, made.plan)
                    for reader in set(crossing.consumers) & set(program.stages):
                        assert (action.kind, reader, action.microbatch) in ready
                    for consumer in () if sent is None else sent.consumers:
                        for source in made.plan.peers(program.rank, consumer):
                            assert (crossing.value, action.microbatch, True, source) in has
            elif action.kind is ActionKind.SEND:
                gradients = ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT
                made_by = gradients if action.gradient else (ActionKind.FORWARD,)
                assert any((kind, action.stage, action.microbatch) in ready for kind in made_by)
            ready.add((action.kind, action.stage, action.microbatch))


def with_gradient(graph: Graph) -> set[str]:
    """Trainable parameters from which a path along which gradients flow leads to an end of the graph."""
    flow = nx.DiGraph()
    flow.add_nodes_from(node.name for node in graph.nodes if node.requires_grad)
    flow.add_edges_from((name, node.name) for node in graph.nodes if node.requires_grad for name in node.inputs)
    read = {name for node in graph.nodes for name in node.inputs}
    ends = [node.name for node in graph.nodes if node.name not in read and node.name in flow]
    reached = set(ends).union(*(nx.ancestors(flow, end) for end in ends))
    users = [node for node in graph.nodes if node.requires_grad and node.name in reached]
    return {name for node in users for name in node.parameters if graph.parameters[name].trainable}


def summing(made: Lowered, rank: int, holders: list[int], name: str) -> set[int]:
    """All ranks of the holders whose summand of a gradient adds to the one of ``rank``: on no other part of it.

    Holders with different meshes all have the whole of it.
    """
    axes = made.partial.get(name, set())
    whole = not all(made.plan.have_same_mesh(holders[0], stage) for stage in holders)

    def part(of: int) -> dict[str, int]:
        return {axis: i for axis, i in made.plan.coordinates(of).items() if axis not in axes}

    ranks = (other for stage in holders for other in made.plan.stages[stage].devices)
    return {other for other in ranks if whole or part(other) == part(rank)}


@given(any_lowereds)
@settings(deadline=None)
def test_every_parameter_with_a_gradient_is_in_one_bucket_of_each_holder(made: Lowered) -> None:
    expected = with_gradient(made.partition.graph)
    for program in made.programs:
        counted = Counter(name for bucket in program.buckets for name in bucket.parameters)
        held = {name for stage in program.stages for name in made.partition.parameters(stage) if name in expected}
        assert counted == Counter(held)
        for bucket in program.buckets:
            assert program.rank in bucket.ranks
            for name in bucket.parameters:
                holders = [s for s in range(made.plan.pipeline) if name in made.partition.parameters(s)]
                assert bucket.ranks == tuple(sorted(summing(made, program.rank, holders, name)))


@given(any_lowereds)
@settings(deadline=None)
def test_all_ranks_reduce_in_the_same_order(made: Lowered) -> None:
    """Collectives over the same group, and over groups that overlap, meet in one global order: no deadlock."""
    waits = nx.DiGraph()
    for program in made.programs:
        names = [bucket.name for bucket in program.buckets]
        assert len(set(names)) == len(names)
        reduced = [a.value for a in program.actions if a.kind is ActionKind.REDUCE]
        assert reduced == [bucket.name for bucket in program.buckets if len(bucket.ranks) > 1]
        nx.add_path(waits, [(bucket.name, bucket.ranks) for bucket in program.buckets])
    assert nx.is_directed_acyclic_graph(waits)
    same = {(b.name, rank): b for p in made.programs for b in p.buckets for rank in b.ranks}
    assert all(bucket is same[bucket.name, p.rank] for p in made.programs for bucket in p.buckets)
    assert all(same[b.name, rank] in made.programs[rank].buckets for b in same.values() for rank in b.ranks)


@given(any_lowereds, st.data())
@settings(deadline=None)
def test_a_program_that_lacks_a_message_is_refused(made: Lowered, data: st.DataObject) -> None:
    places = [
        (p.rank, i)
        for p in made.programs
        for i, a in enumerate(p.actions)
        if a.kind in (ActionKind.SEND, ActionKind.RECEIVE)
    ]
    assume(places)
    rank, at = data.draw(st.sampled_from(places))
    wrong = [replace(p, actions=p.actions[:at] + p.actions[at + 1 :]) if p.rank == rank else p for p in made.programs]
    with pytest.raises(RuntimeError):
        check(wrong)


@given(any_lowereds)
@settings(deadline=None)
def test_lowering_is_a_function(made: Lowered) -> None:
    assert lower(made.partition, made.plan, None, (made.partial,) * made.plan.pipeline) == made.programs


@given(any_lowereds)
@settings(deadline=None)
def test_groups_and_peers_divide_the_ranks(made: Lowered) -> None:
    plan = made.plan
    for rank in range(plan.workers):
        stage, replica = plan.stage_and_replica(rank)
        coordinates = plan.coordinates(rank)
        assert (plan.rank_at(stage, replica, coordinates),) == (rank,) == plan.peers(rank, stage)
        for other in range(plan.pipeline):
            assert set(plan.peers(rank, other)) == {b for a, b in talking(plan, stage, other) if a == rank}
        for axes in ((), ("data",), ("tensor",), ("sequence",), ("data", "tensor"), ("data", "sequence", "tensor")):
            group = plan.group(rank, axes)
            assert rank in group and group == tuple(sorted(group))
            assert len(group) == prod(plan.degree(axis, stage) for axis in axes)
            assert all(
                plan.group(other, axes) == group and plan.stage_and_replica(other)[0] == stage for other in group
            )
