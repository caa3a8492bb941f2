"""Laws of replicas in turn, for any graph with skips, any cuts, numbers of replicas, microbatches and batches."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.compile.sample_shares import compute_shares
from polylane.graph.partition import Partition, cut_positions
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees, Spec
from polylane.program.check import check
from polylane.program.lower import lower
from polylane.program.program import Program
from polylane.schedule.action import PASSES, ActionKind
from polylane.schedule.round_robin import WARM_UPS
from tests.properties.test_program_laws import graphs, played

MESHES = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (5, 1, 1), (2, 1, 2), (3, 2, 1)]


@st.composite
def lowereds(draw: st.DrawFn) -> tuple[Plan, tuple[Program, ...]]:
    """A graph cut anywhere, whose stages have any numbers of replicas; all schedules that can have them."""
    made = draw(graphs())
    allowed = cut_positions(made)
    cuts = tuple(sorted(draw(st.sets(st.sampled_from(allowed), max_size=3)))) if allowed else ()
    partition = Partition(made, cuts)
    alike, mesh = draw(st.booleans()), st.sampled_from(MESHES).map(lambda each: Degrees(*each))
    meshes = [draw(mesh)] * partition.stages if alike else [draw(mesh) for _ in range(partition.stages)]
    schedule = draw(st.sampled_from([*WARM_UPS, "zb-h1", "zb-h2"] if alike else [*WARM_UPS]))
    spec = Spec(schedule=schedule, stages=tuple(meshes), pipeline=partition.stages, replicas="round-robin")
    plan = plan_from_partition(partition, spec, max(each.data for each in meshes) + draw(st.integers(0, 6)))
    return plan, lower(partition, plan)


@given(lowereds(), st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_programs_of_replicas_in_turn_run_to_their_end(made: tuple[Plan, tuple[Program, ...]], seed: int) -> None:
    _, programs = made
    check(programs)
    assert played(programs, seed) == sum(len(program.actions) for program in programs)


@given(lowereds())
@settings(deadline=None, max_examples=50)
def test_a_microbatch_has_one_replica_of_every_stage(made: tuple[Plan, tuple[Program, ...]]) -> None:
    """Both of its passes run there, once, and its values go from the one that has it to the one that has it."""
    plan, programs = made
    passes = Counter[tuple[int, int, ActionKind]]()
    for program in programs:
        degree = plan.degree("data", program.stage)
        for action in program.actions:
            if action.microbatch is None:
                continue
            assert action.microbatch % degree == program.replica
            if action.kind in PASSES and not any(plan.coordinates(program.rank).values()):
                passes[program.stage, action.microbatch, action.kind] += 1
            elif action.peer is not None:
                stage, replica = plan.stage_and_replica(action.peer)
                assert replica == action.microbatch % plan.degree("data", stage)
                assert action.peer in plan.peers(program.rank, stage, action.microbatch)
                assert action.peer in plan.peers(program.rank, stage)
    assert set(passes.values()) == {1}
    assert {(stage, i) for stage, i, _ in passes} == {
        (stage, i) for stage in range(plan.pipeline) for i in range(plan.microbatches)
    }


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9))
def test_shares_in_turn_are_the_microbatches_of_one_worker(batch: int, microbatches: int, replicas: int) -> None:
    """None is divided; a replica of a batch that is too short has nothing."""
    whole = compute_shares(batch, microbatches, 1, 0)
    each = [compute_shares(batch, microbatches, replicas, replica, in_turn=True) for replica in range(replicas)]
    assert sorted((s for own in each for s in own), key=lambda s: s.microbatch) == list(whole)
    assert all(share.microbatch % replicas == replica for replica, own in enumerate(each) for share in own)
    assert [bool(own) for own in each] == [replica < len(whole) for replica in range(replicas)]
