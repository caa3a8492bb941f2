"""Messages that workers hold beside their passes: by hand in a chain, and against live bytes of real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from polylane.compile.objectives import build_objectives
from polylane.cost.memory.held_messages import find_held_messages, sum_held
from polylane.cost.memory.live_ranges import PeakMemory
from polylane.graph.partition import Partition
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees, Spec
from polylane.program.group_programs import lower_groups
from polylane.program.lower import lower
from polylane.program.program import Program
from polylane.program.waits import SEND_DEPTH
from polylane.runtime.workers.team import fork_workers
from polylane.schedule.action import PASSES, ActionKind
from polylane.schedule.schedules import SCHEDULES
from tests.support.hard_models import ParallelLayers, SkippingLayers
from tests.support.reference.step_memory import alive, predicted
from tests.support.synthetic_graphs import chain, graph
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import classify, sgd

WIDTH, SAMPLES = 32, 640

# Of a microbatch: the value that comes in has 10 bytes and its gradient 9, the one that goes out 20 and its gradient 7.
NEED = PeakMemory(100.0, 10.0, 20.0, 7.0, 9.0, forward_peak=0, backward_peak=0, first_backward_peak=0, batch_bytes=0)


def programs_of(microbatches: int, schedule: str = "1f1b", chunks: int = 1) -> tuple[Program, ...]:
    """A chain of three stages, or of two on each of three workers."""
    partition = Partition(chain(3 * chunks), tuple(range(1, 3 * chunks)))
    spec = Spec(schedule=schedule, stages=(Degrees(1, 1, 1),) * 3, pipeline=3, chunks=chunks)
    return lower(partition, plan_from_partition(partition, spec, microbatches))


def test_a_stage_of_a_chain_holds_receives_ahead_and_gradients_until_they_are_waited_for() -> None:
    middle = programs_of(4)[1]
    passes = "".join("F" if a.kind is ActionKind.FORWARD else "B" for a in middle.actions if a.kind in PASSES)
    assert passes == "FFBFBFBB"
    found = find_held_messages(middle, {1: NEED})

    def held(size: float) -> list[tuple[int, int]]:
        return sorted((message.first, message.end) for message in found if message.bytes == size)

    # A receive is posted two passes before the one that reads it; what F0 reads is there when it begins.
    assert held(10.0) == [(0, 1), (1, 3), (3, 5)]
    assert held(7.0) == [(0, 2), (2, 4), (4, 6), (5, 7)]
    # What B0 sends is waited for in B2, what B1 sends in B3, the other two at the end.
    assert held(9.0) == [(3, 6), (5, 7), (7, 9), (8, 9)]
    assert sum_held(found, len(passes)) == [17, 17, 17, 26, 26, 32, 16, 9, 18]


def test_a_value_without_gradient_is_held_until_its_send_is_waited_for() -> None:
    partition = Partition(graph([[], [0], [1], [0, 2]], without_gradient=[0]), (1, 2, 3))
    spec = Spec(schedule="afab", stages=(Degrees(1, 1, 1),) * 4, pipeline=4)
    first = lower(partition, plan_from_partition(partition, spec, 4))[0]
    backward = [a.microbatch for a in first.actions if a.kind is ActionKind.BACKWARD]
    # It goes to two stages from one memory; its own microbatch holds it until the i-th backward pass, number 4 + i.
    found = find_held_messages(first, {0: replace(NEED, values_received=0, gradients_sent=0, gradients_received=0)})
    ends = [4 + backward.index(i + SEND_DEPTH) if i + SEND_DEPTH in backward else 9 for i in backward]
    assert sorted((m.first, m.end) for m in found) == sorted([*zip(range(4, 8), ends, strict=True)])


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved", "zb-v"])
def test_groups_of_workers_run_what_their_workers_run(schedule: str) -> None:
    chunks = 1 if schedule in SCHEDULES else 2
    partition = Partition(chain(3 * chunks, [(0, 3 * chunks - 1)]), tuple(range(1, 3 * chunks)))
    for data in (1, 2):
        degrees = (Degrees(data, 1, 1),) * 3
        spec = Spec(schedule=schedule, stages=degrees, pipeline=3, chunks=chunks, data=data)
        plan = plan_from_partition(partition, spec, 6)
        groups = lower_groups(partition, plan)
        if plan.is_asynchronous:  # of as many batches as are under way at once
            continue
        whole = lower(partition, plan)
        for group, first in zip(groups, plan.first_chunks, strict=True):
            worker = whole[plan.stages[first].devices[0]]
            expected = [a for a in worker.actions if a.kind not in (ActionKind.REDUCE, ActionKind.STEP)]
            peers = [a if a.peer is None else replace(a, peer=plan.group_of(a.peer)) for a in expected]
            assert [*group.actions] == peers
            assert {(a.stage, a.microbatch, a.value, at) for a, at in group.late_sends.items()} == {
                (a.stage, a.microbatch, a.value, at) for a, at in worker.late_sends.items()
            }
            needs = dict.fromkeys(group.stages, NEED)
            assert find_held_messages(group, needs) == find_held_messages(worker, needs)


def test_gradients_of_late_sends_are_held_longer() -> None:
    partition = Partition(chain(6, [(0, 5)]), (1, 2, 3, 4, 5))
    spec = Spec(schedule="interleaved", stages=(Degrees(1, 1, 1),) * 3, pipeline=3, chunks=2)
    longer = 0.0
    for program in lower(partition, plan_from_partition(partition, spec, 5)):
        needs, passes = dict.fromkeys(program.stages, NEED), sum(a.kind in PASSES for a in program.actions)
        late = any(send.gradient for send in program.late_sends)
        usual = find_held_messages(replace(program, late_sends={}), needs)
        more = sum(sum_held(find_held_messages(program, needs), passes)) - sum(sum_held(usual, passes))
        assert more > 0 if late else more == 0
        longer += more
    assert longer > 0


# ---- against real steps ----------------------------------------------------------------------------------------------


def plan_of(model: nn.Module, schedule: str, microbatches: int) -> Plan:
    """A layer a stage: on three workers if interleaved, else each on its own."""
    fifth, sixth = ("sin", "layers.5/linear") if isinstance(model, ParallelLayers) else ("tanh#5", "add")
    made = ["tanh", *(f"tanh#{i}" for i in (2, 3, 4)), fifth]
    ends = [*((f"layers.{i}/linear", last) for i, last in enumerate(made)), (sixth, "loss/mul")]
    workers = 3 if schedule == "interleaved" else 6
    stages = [{"nodes": nodes, "devices": (i % workers,)} for i, nodes in enumerate(ends)]
    return Plan.model_validate({"stages": stages, "microbatches": microbatches, "schedule": schedule})


RUN = [
    pytest.param(SkippingLayers(WIDTH), "interleaved", 5, id="late"),  # with late sends of gradients
    pytest.param(ParallelLayers(WIDTH), "interleaved", 5, id="loose"),
    pytest.param(SkippingLayers(WIDTH), "interleaved", 8, id="skip", marks=pytest.mark.slow),
    pytest.param(ParallelLayers(WIDTH), "interleaved", 10, id="loose-10", marks=pytest.mark.slow),
    pytest.param(SkippingLayers(WIDTH), "1f1b", 8, id="1f1b", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("transport", ["", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("model", "schedule", "microbatches"), RUN)
def test_skips_and_chunks_hold_what_is_predicted(
    model: nn.Module, schedule: str, microbatches: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that a worker hands on to another stage of its own is counted for both: up to a twelfth more."""
    monkeypatch.setenv("POLYLANE_TRANSPORT", transport)
    example = torch.randn(SAMPLES, WIDTH), torch.zeros(SAMPLES, dtype=torch.long)
    plan = plan_of(model, schedule, microbatches)
    prepared = compile_training(model, build_objectives(classify, sgd, None), example, plan)
    measured = fork_workers(lambda _: alive(prepared, example), prepared.plan.workers)
    for found, real in zip(predicted(prepared, SAMPLES, sgd), measured, strict=True):
        assert 0.97 * real <= found.total <= 1.08 * real
