"""Interleaved pipelines: their steps take what the schedule takes, and hold what its order holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.closed_form import pipelined
from polylane.cluster.cluster_file import from_mapping
from polylane.cluster.spec import parse
from polylane.cost.cost_table import OperatorWork
from polylane.cost.memory.live_ranges import PeakMemory
from polylane.cost.memory.peak import TrainedBytes, peak_memory
from polylane.cost.network.collectives import collective_seconds
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.plan_cost import PlanCost
from polylane.cost.predict import CostModel, Prediction, predict
from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.errors import PolylaneError
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.program.lower import lower
from polylane.schedule.action import ActionKind
from polylane.schedule.interleaved import interleaved
from polylane.schedule.stage_graph import StageGraph
from tests.support import planning_graphs
from tests.support.simulated_tasks import interleaved_live_bound

FREE = {"hosts": [{"devices": 8, "device": "a100-80g", "link": {"bandwidth": 1e24, "latency": 0.0}}]}
TURN = parse("1:a100-80g").device(0).turn


class OnlyLinears:
    """One second forward and two backward for a linear operator, and nothing for the rest."""

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        return (1.0, 2.0) if "linear" in work.operator.name else (0.0, 0.0)

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        return 0.0, 0.0


def predicted(
    plan: str, chunks: int, basis: CostModel | None = None, batch: int = 64, every: bool = False, **how: object
) -> Prediction:
    found = basis or planning_graphs.basis(planning_graphs.blocks(8, 256), "8:a100-80g", TrainingOptions(**how))  # type: ignore[arg-type]
    return predict(found, *setup.fit_plan(found, spec_of(plan).with_chunks(chunks), batch), batch, every=every)


@pytest.mark.parametrize("stages, chunks", [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_equal_stages_take_what_the_formula_says(stages: int, chunks: int, rounds: int) -> None:
    basis = planning_graphs.basis(planning_graphs.blocks(8, 256), "1:a100-80g")
    basis = replace(basis, cluster=from_mapping(FREE), make_clock=lambda device: OnlyLinears(), host_overhead=0.25)
    microbatches = rounds * stages
    found = predicted(f"pipeline={stages},microbatches={microbatches}", chunks, basis)
    linears = 2 * 8 // (stages * chunks)
    both = chunks * (3 * linears + 2 * 0.25)
    expected = (chunks * microbatches + stages - 1) * both / chunks + found.stages[0].update_seconds
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    assert pipelined([both] * stages, microbatches, chunks=chunks) + found.stages[0].update_seconds == pytest.approx(
        expected
    )


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("microbatches", [3, 8, 10])
def test_a_step_takes_what_its_schedule_takes_and_its_messages(chunks: int, microbatches: int) -> None:
    basis = planning_graphs.basis(planning_graphs.blocks(16, 256), "4:a100-80g")
    spec = spec_of(f"pipeline=4,microbatches={microbatches},chunks={chunks}")
    partition, plan = setup.fit_plan(basis, spec, 64)
    found = predict(basis, partition, plan, 64)
    passes = [PlanCost(basis, partition, plan, 64).pass_costs(s)[0] for s in range(4 * chunks)]
    theory = simulate_schedule(
        interleaved(4, chunks, microbatches),
        [p.forward + TURN for p in passes],
        [p.backward + TURN for p in passes],
        graph=StageGraph.chain(4 * chunks),
    ).makespan()
    update = max(stage.update_seconds for stage in found.stages)
    messages = sum(s.end - s.start for s in found.timeline.spans if s.action.peer is not None)
    assert theory <= found.seconds <= theory + update + messages
    ran = {s.action.stage for s in found.timeline.spans if s.action.kind is ActionKind.FORWARD and s.rank == 1}
    assert ran == set(range(1, 4 * chunks, 4))


def test_the_bubble_shrinks_and_more_is_sent() -> None:
    graph = planning_graphs.blocks(16, 1024)
    basis = planning_graphs.basis(graph, "4:a100-80g")
    plan = "pipeline=4,microbatches=8"
    whole = predict(basis, *setup.fit_plan(basis, spec_of(plan), 8192), 8192)
    halves = predicted(plan, 2, basis, 8192)
    assert halves.seconds < whole.seconds
    sent = [sum(s.bytes for s in p.timeline.spans if s.action.kind is ActionKind.SEND) for p in (whole, halves)]
    # Of three gaps between stages there are seven between half stages, each with as much there and back.
    assert sent[1] == pytest.approx(sent[0] * 7 / 3, rel=1e-6)


def test_one_chunk_is_a_plan_as_it_was() -> None:
    basis = planning_graphs.basis(planning_graphs.blocks(8, 256), "4:a100-80g")
    for plan in ("pipeline=4,microbatches=8", "data=4"):
        assert setup.fit_plan(basis, spec_of(f"{plan},chunks=1"), 64) == setup.fit_plan(basis, spec_of(plan), 64)


@pytest.mark.parametrize("plan", ["data=2,pipeline=2", "pipeline=2,tensor=2", "data=2,pipeline=2,tensor=2"])
def test_one_worker_stands_for_all_that_are_like_it(plan: str) -> None:
    few, every = predicted(plan, 2), predicted(plan, 2, every=True)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert few.utilization == pytest.approx(every.utilization, rel=1e-9)
    assert few.timeline.ranks < every.timeline.ranks == every.plan.workers


def test_gradients_are_summed_once_for_all_stages_of_a_worker() -> None:
    found = predicted("data=2,pipeline=2,microbatches=4", 4)
    summed = sum(s.bytes for s in found.timeline.spans if s.action.kind is ActionKind.REDUCE and s.rank == 0)
    parameters = sum(p.bytes for p in planning_graphs.blocks(8, 256).parameters.values())
    assert summed == pytest.approx(parameters / 2, rel=0.01)  # half of the blocks; of two replicas each sends it once
    steps = [s for s in found.timeline.spans if s.action.kind is ActionKind.STEP]
    assert len(steps) == found.timeline.ranks == 2


def test_sums_begin_when_the_stage_that_has_them_is_through() -> None:
    """The last stages of a worker are through first, and are summed while the first ones still go backward."""
    hidden, after = (predicted("data=2,pipeline=2,microbatches=4", 4, overlap=overlap) for overlap in (True, False))
    sums = [s for s in hidden.timeline.spans if s.action.kind is ActionKind.REDUCE and s.rank == 0]
    last = max(s.end for s in hidden.timeline.spans if s.action.kind is ActionKind.BACKWARD and s.rank == 0)
    assert sums[0].start < last < after.seconds
    assert hidden.seconds < after.seconds


def test_what_stays_on_a_worker_does_not_travel() -> None:
    basis = planning_graphs.basis(planning_graphs.example("unet"), "2:a100-80g")
    partition, plan = setup.fit_plan(basis, spec_of("pipeline=2,microbatches=2,chunks=2"), 8)
    programs = lower(partition, plan)
    skips = [c for c in partition.crossings if any((s - c.producer) % 2 == 0 for s in c.consumers)]
    assert skips, "a value goes from a stage to the next one but one"
    for program in programs:
        sends = [a for a in program.actions if a.kind is ActionKind.SEND]
        assert all(a.peer != program.rank for a in sends)
        assert len(sends) == len(set(sends)), "a value goes once to a worker"
    assert predict(basis, partition, plan, 8).seconds > 0


# Memory --------------------------------------------------------------------------------------------------------------

ONE = PeakMemory(
    saved=1,
    values_received=0,
    values_sent=0,
    gradients_received=0,
    gradients_sent=0,
    forward_peak=1,
    backward_peak=1,
    first_backward_peak=1,
    batch_bytes=0,
)


@pytest.mark.parametrize("ranks, chunks, microbatches", [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 7), (4, 2, 2)])
def test_as_many_passes_are_held_as_the_bound_says(ranks: int, chunks: int, microbatches: int) -> None:
    for rank, lane in enumerate(interleaved(ranks, chunks, microbatches)):
        own = range(rank, ranks * chunks, ranks)
        found = peak_memory(lane, dict.fromkeys(own, ONE), dict.fromkeys(own, 0.0), TrainedBytes(0, 0, 0))
        assert found.activations == interleaved_live_bound(ranks, chunks, microbatches, rank)


def test_a_worker_holds_all_its_chunks() -> None:
    basis = planning_graphs.basis(planning_graphs.blocks(16, 256), "4:a100-80g")
    whole = predict(basis, *setup.fit_plan(basis, spec_of("pipeline=4,microbatches=8"), 4096), 4096)
    halves = predicted("pipeline=4,microbatches=8", 2, basis, 4096)
    for name in ("parameters", "optimizer"):
        sums = [sum(getattr(stage.memory, name) for stage in p.stages) for p in (whole, halves)]
        assert sums[0] == pytest.approx(sums[1], rel=0.01)
    first, again = whole.stages[0].memory.activations, halves.stages[0].memory.activations
    # 1F1B holds four microbatches on the first worker, interleaving 4 + 3/2 (Narayanan et al., 2021, section 2.2.2).
    assert again == pytest.approx(first * 5.5 / 4, rel=0.1)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, chunks, sentence",
    [
        ("data=4", 2, "chunks=2 are of a pipeline's workers, and there is one stage: add pipeline=2"),
        ("pipeline=2,schedule=afab", 2, "the schedule afab has one stage on a worker, not 2 chunks: try interleaved"),
        ("pipeline=4", 500, "chunks=500 on each of pipeline=4 are 2000 stages, and the graph can be cut into at most"),
        ("pipeline=4", 0, "not 0"),
    ],
)
def test_what_cannot_be_interleaved_is_refused(plan: str, chunks: int, sentence: str) -> None:
    with pytest.raises(PolylaneError, match=sentence):
        predicted(plan, chunks)


def test_groups_of_workers_with_different_meshes_have_chunks() -> None:
    found = predicted("[data=2 | 1],microbatches=4", 2)
    assert [stage.mesh.data for stage in found.stages] == [2, 1] and found.plan.pipeline == 4
    assert found.plan.stages[0].devices == found.plan.stages[2].devices


def test_sums_over_replicas_take_what_a_collective_takes() -> None:
    found = predicted("data=2,pipeline=2,microbatches=4", 2, overlap=False)
    spans = [s for s in found.timeline.spans if s.action.kind is ActionKind.REDUCE and s.rank == 0]
    cluster, ranks = parse("8:a100-80g"), found.plan.group(found.lanes[0], ("data",))
    for span in spans:
        assert span.end - span.start == pytest.approx(
            collective_seconds(cluster, "all_reduce", span.bytes, ranks, None)
        )
