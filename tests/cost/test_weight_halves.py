"""The weight half of a backward pass: what it is predicted to compute is what it computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polylane.cost.cost_table import OperatorWork, ShardedGraphCost
from polylane.cost.memory.allocation_meter import storage_id
from polylane.cost.memory.live_ranges import LiveRanges
from polylane.cost.memory.saved_by_operators import trace_saved_tensors
from polylane.cost.memory.saved_tensors import BackendSetting
from polylane.cost.operators.operation import operation
from polylane.cost.plan_cost import PlanCost
from polylane.cost.stage_cost import add_halving, sum_passes
from polylane.cost.task_lanes import TaskBuilder
from polylane.cost.weight_halves import HALVING_TRAVERSALS
from polylane.graph.batch import cast_leaves, flatten
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.program.lower import lower
from polylane.schedule.action import Action, ActionKind
from tests.support import planning_graphs
from tests.support.reference.eager_and_captured import captured
from tests.support.reference.split_backward import pipeline, take_gradients

SAMPLES = 5


class CountingFlops:
    """A second for every operation of a matrix product."""

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        found = operation(work.operator.call, work.inputs, work.outputs)
        forward, backward = (sum(p.flops for p in way.products) for way in (found.forward, found.backward))
        return forward, backward

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        return 0.0, 0.0


@pytest.mark.parametrize("name", ["gpt", "digits", pytest.param("t5", marks=pytest.mark.slow)])
def test_the_weight_half_is_what_runs_in_it(name: str) -> None:
    """Operations of the second half, predicted and counted; and both halves are the whole."""
    graph, model, case = captured(name, in_float64=True)
    table = ShardedGraphCost(graph, {}, SAMPLES).table(SAMPLES, CountingFlops(), {})
    costs = sum_passes(table, [(0, len(graph.nodes))])
    assert costs.backward_input + costs.backward_weight == costs.backward
    assert bool(np.all(np.diff(table.backward_weight) <= np.diff(table.backward) + 1e-6))
    pipe = pipeline(model, graph, 1, True, [case.loss])
    leaves = cast_leaves(flatten(case.batch(SAMPLES, 0))[0], torch.float64)
    pipe.forward(0, leaves, SampleSlice(SAMPLES, 0, SAMPLES, seed=3))
    pipe.backward(0, "backward_input")
    with FlopCounterMode(display=False) as counter:
        pipe.backward_weight(0)
    take_gradients(model)
    assert costs.backward_weight == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("name", ["gpt", "digits", pytest.param("t5", marks=pytest.mark.slow)])
def test_between_the_halves_lives_what_is_predicted(name: str) -> None:
    """In bytes, within 5 %, on two stages; gradients of parameters are not counted."""
    graph, model, case = captured(name, in_float64=True)
    pipe = pipeline(model, graph, 2, True, [case.loss])
    ranges = LiveRanges(graph, trace_saved_tensors(graph, BackendSetting(SAMPLES)))
    leaves = cast_leaves(flatten(case.batch(SAMPLES, 0))[0], torch.float64)
    pipe.forward(0, leaves, SampleSlice(SAMPLES, 0, SAMPLES, seed=3))
    pipe.backward(0, "backward_input")
    held = {storage_id(t) for t in leaves if isinstance(t, torch.Tensor)}
    for stage, runner in enumerate(pipe.runners):
        kept = {storage_id(t): t for r in runner.deferred[0]._records for t in (r.kept, r.gradient)}
        alive = sum(t.untyped_storage().nbytes() for number, t in kept.items() if number not in held)
        need = ranges.microbatch_memory([(a, b) for a, b, own in pipe.partition.pieces if own == stage])
        assert need.between_halves == pytest.approx(alive, rel=0.05)
        assert need.input_half_peak >= max(need.between_halves, need.live_bytes)
    take_gradients(model)


@pytest.mark.parametrize("name", ["gpt", pytest.param("t5", marks=pytest.mark.slow)])
def test_halving_moves_what_the_second_half_reads(name: str) -> None:
    """As many bytes as its records have, counted in a run; twice over a CPU's memory, and not at all on a GPU."""
    graph, model, case = captured(name, in_float64=True)
    pipe = pipeline(model, graph, 1, True, [case.loss])
    leaves = cast_leaves(flatten(case.batch(SAMPLES, 0))[0], torch.float64)
    pipe.forward(0, leaves, SampleSlice(SAMPLES, 0, SAMPLES, seed=3))
    pipe.backward(0, "backward_input")
    read = sum(t.nbytes for r in pipe.runners[0].deferred[0]._records for t in (r.kept, r.gradient))
    take_gradients(model)
    sheet = ShardedGraphCost(graph, {}, SAMPLES)
    table = add_halving(sheet.table(SAMPLES, CountingFlops(), {}), sheet, 2.0)
    costs = sum_passes(table, [(0, len(graph.nodes))])
    assert costs.halving == pytest.approx(2 * read, rel=0.01)
    assert costs.second_half == costs.backward_weight + costs.halving
    assert HALVING_TRAVERSALS == {"cpu": 2.0, "cuda": 0.0}
    blocks = planning_graphs.blocks(8, 256)
    for cluster, positive in (("4:cpu,link=nvlink-3", True), ("4:a100-80g", False)):
        partition, plan = setup.fit_plan(
            basis := planning_graphs.basis(blocks, cluster), spec_of("pipeline=4,schedule=zb-h1"), 64
        )
        own, _ = PlanCost(basis, partition, plan, 64, False).pass_costs(1)
        assert (own.halving > 0) == positive


def test_an_order_pays_for_the_passes_that_it_halves() -> None:
    """On a CPU: each halved pass takes what halving costs longer, each whole one does not."""
    basis = planning_graphs.basis(planning_graphs.blocks(8, 256), "2:cpu,link=nvlink-3")
    partition, plan = setup.fit_plan(basis, spec_of("pipeline=2,schedule=auto,microbatches=2"), 64)
    plan = plan.model_copy(update={"order": ("f0.0 f0.1 b0.0 b0.1", "f1.0 i1.0 w1.0 f1.1 b1.1")})
    scene = PlanCost(basis, partition, plan, 64, False)
    program = lower(partition, plan)[1]
    tasks = {task.action.kind: task.seconds for task in TaskBuilder(scene, range(2)).build_tasks(program)}
    halves = tasks[ActionKind.BACKWARD_INPUT] + tasks[ActionKind.BACKWARD_WEIGHT]
    own, _ = scene.pass_costs(1)
    longer = halves - tasks[ActionKind.BACKWARD] - basis.host_overhead
    assert longer == pytest.approx(own.halving, rel=1e-9) and own.halving > 0


def test_two_halves_take_what_the_whole_takes_and_another_turn() -> None:
    basis = planning_graphs.basis(planning_graphs.blocks(8, 256), "4:a100-80g")
    partition, plan = setup.fit_plan(basis, spec_of("pipeline=4,schedule=1f1b,microbatches=8"), 64)
    scene = PlanCost(basis, partition, plan, 64, False)
    for program in lower(partition, plan):
        halves: list[Action] = []
        for action in program.actions:
            both = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
            split = action.kind is ActionKind.BACKWARD
            halves += [replace(action, kind=kind) for kind in both] if split else [action]
        builder = TaskBuilder(scene, range(plan.workers))
        whole = builder.build_tasks(program)
        split_tasks = builder.build_tasks(replace(program, actions=tuple(halves)))
        backward = next(task for task in whole if task.action.kind is ActionKind.BACKWARD)
        first, second = (next(t for t in split_tasks if t.action.kind is kind) for kind in both)
        overhead = basis.host_overhead
        assert first.seconds + second.seconds == pytest.approx(backward.seconds + overhead, rel=1e-12)
        # Chains of linear layers: half of the operations are the weights', less where no gradient goes further back.
        share = (second.seconds - overhead) / (backward.seconds - overhead)
        assert 0.3 < share < 0.7
        assert (first.waited, second.waited) == (backward.waited, 0.0)
