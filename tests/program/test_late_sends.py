"""Messages that a worker must not wait for as early as usual: examples in which all workers would stand still."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from polylane.compile.objectives import build_objectives
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees, Spec
from polylane.program.check import check
from polylane.program.lower import lower, lower_evaluation
from polylane.program.program import Program
from polylane.program.waits import SEND_DEPTH
from polylane.schedule.schedules import SCHEDULES
from tests.support.hard_models import ParallelLayers, SkippingLayers
from tests.support.synthetic_graphs import chain, graph
from tests.support.workers.training import assert_same, batch_of, classify, compiled, plainly, sgd, trained

# Layers that hardly read each other: what the schedule has behind each other often needs nothing of the other.
LOOSE = graph([[], [], [], [], [3], [], [0]])


def programs_of(graph: Graph, cuts: tuple[int, ...], schedule: str, microbatches: int) -> tuple[Program, ...]:
    partition, chunks = Partition(graph, cuts), 1 if schedule in SCHEDULES else 2
    groups = partition.stages // chunks
    spec = Spec(schedule=schedule, stages=(Degrees(1, 1, 1),) * groups, pipeline=groups, chunks=chunks)
    return lower(partition, plan_from_partition(partition, spec, microbatches))


@pytest.mark.parametrize(
    ("made", "cuts", "microbatches"),
    [
        pytest.param(LOOSE, (1, 2, 4, 5, 6), 5, id="loose"),
        pytest.param(chain(6, [(0, 5)]), (1, 2, 3, 4, 5), 5, id="skip"),
        pytest.param(chain(6, [(0, 5), (1, 4)]), (1, 2, 3, 4, 5), 8, id="unet"),
    ],
)
def test_nobody_waits_in_a_circle(made: Graph, cuts: tuple[int, ...], microbatches: int) -> None:
    """Workers that waited for all messages two microbatches later would wait for each other."""
    programs = programs_of(made, cuts, "interleaved", microbatches)
    with pytest.raises(RuntimeError, match="wait for each other"):
        check([replace(program, late_sends={}) for program in programs])
    check(programs)
    for program in programs:
        for send, until in program.late_sends.items():
            assert send in program.actions and send.microbatch is not None
            assert send.microbatch + SEND_DEPTH < until <= microbatches


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved", "zb-v"])
@pytest.mark.parametrize("microbatches", [1, 4, 5, 12])
def test_chains_wait_as_usual(schedule: str, microbatches: int) -> None:
    programs = programs_of(chain(6), (1, 2, 3, 4, 5), schedule, microbatches)
    assert not any(program.late_sends for program in programs)


def test_evaluation_has_no_backward_pass_that_waits() -> None:
    partition = Partition(LOOSE, (1, 2, 4, 5, 6))
    spec = Spec(schedule="interleaved", stages=(Degrees(1, 1, 1),) * 3, pipeline=3, chunks=2)
    assert not any(p.late_sends for p in lower_evaluation(partition, plan_from_partition(partition, spec, 5)))


def interleaved_plan(fifth: str, sixth: str) -> Plan:
    """A layer a stage, on three workers; the last operator of the fifth one, and the first one of the sixth."""
    made = ["tanh", *(f"tanh#{i}" for i in (2, 3, 4)), fifth]
    ends = [*((f"layers.{i}/linear", last) for i, last in enumerate(made)), (sixth, "loss/mul")]
    stages = [{"nodes": nodes, "devices": (i % 3,)} for i, nodes in enumerate(ends)]
    return Plan.model_validate({"stages": stages, "microbatches": 5, "schedule": "interleaved"})


@pytest.mark.parametrize(
    ("model", "ends"),
    [
        pytest.param(SkippingLayers(6).double(), ("tanh#5", "add"), id="skip"),
        pytest.param(ParallelLayers(6).double(), ("sin", "layers.5/linear"), id="loose", marks=pytest.mark.slow),
    ],
)
def test_such_plans_train_as_one_device(model: nn.Module, ends: tuple[str, str]) -> None:
    plan = interleaved_plan(*ends)
    prepared = compiled(model, build_objectives(classify, sgd, None), batch_of(10), plan)
    assert any(program.late_sends for program in lower(prepared.main_partition, prepared.plan))
    # A batch of three samples has no work for the last two microbatches.
    batches = [batch_of(10), batch_of(3, 1), batch_of(10, 2)]
    reference = plainly(model, batches)
    for worker in trained(model, plan, batches):
        assert_same(worker, reference)
