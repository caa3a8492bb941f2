"""What a GPU's workers would launch over NCCL: no order of launches may hang, and no step waits for its device.

The backend is a fake over gloo that records; see :mod:`tests.support.nccl`. The whole table is slow.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.families import EQUAL, OWN, TIMED
from benchmarks.gpu.trainings import batch_of, build, sgd, trainings
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.inspection.plan_report import count_plan_communicators
from polylane.plan.spec import parse
from tests.support.nccl.fake_nccl import Launch
from tests.support.nccl.launch_laws import list_violations
from tests.support.nccl.recording import record_training

# One of each kind of communication; the GPT has tied weights, which two stages sum.
SMALL = (
    "data=2,microbatches=2,shard=parameters",
    "tensor=2",
    "pipeline=2,schedule=1f1b,microbatches=4",
    "pipeline=2,schedule=pipedream",
    "[data=2 | tensor=2],microbatches=2",
)
WHOLE = (
    *sorted({plan for n in (2, 4) for plan in (*EQUAL[n], *OWN[n], *TIMED[n])} - set(SMALL)),
    "data=8,shard=parameters",
    "tensor=8",
    "pipeline=8,microbatches=8",
    "data=2,pipeline=2,tensor=2",
)

# What waits on the CPU alone, where it costs nothing: facts of a step are numbers at once there. The rest are the
# digits of float64, and hosts that ask each other without their devices.
ON_THE_CPU = {
    "telemetry.py <genexpr> __float__",
    "sync_batch_norm.py forward __bool__",
    "plain_objects.py _gather_rows cpu",
    "plain_objects.py _gather_rows numpy",
}


def count_foretold(name: str, plan: str) -> tuple[int, ...]:
    """The communicators of each worker, as ``inspect`` says them without running anything."""
    objectives = build_objectives(trainings()[name][1], sgd, None)
    problem = TrainingProblem(build(name, torch.float64), objectives, batch_of(name, 0, torch.float64))
    return count_plan_communicators(compile_training(problem, plan))


def require_lawful(plan: str) -> None:
    name = "gpt, untied" if "pipedream" in plan else "gpt"
    recording = record_training(name, plan, parse(plan).processes)
    assert list_violations(recording.launches) == []
    assert recording.communicators == list(count_foretold(name, plan))
    assert sum(len(launches) for launches in recording.launches) > 0
    if plan in (*EQUAL[2], *EQUAL[4]):
        assert recording.difference < 1e-9


@pytest.mark.parametrize("plan", SMALL)
def test_launches_are_lawful(plan: str) -> None:
    require_lawful(plan)


def test_weights_are_gathered_in_the_dtype_of_the_passes() -> None:
    """In two dtypes, in one order, and nobody reads them before they are there: outputs hold NaN until then."""
    plan = "data=2,microbatches=2,shard=parameters,precision=bfloat16"
    recording = record_training("gpt", plan, 2, dtype=torch.float32)
    assert list_violations(recording.launches) == []
    assert recording.difference < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("plan", WHOLE)
def test_launches_of_every_family_are_lawful(plan: str) -> None:
    require_lawful(plan)


@pytest.mark.parametrize(
    ("name", "plan", "clip_norm"),
    [
        ("gpt", "data=2", 1.0),
        ("gpt", "data=2,compress=powersgd:2:1", None),
        pytest.param("gpt", "pipeline=2,microbatches=4", None, marks=pytest.mark.slow),
        pytest.param("convolutions", "data=2", None, marks=pytest.mark.slow),
        pytest.param("gpt", "data=2,compress=top_k:0.1", None, marks=pytest.mark.slow),
        pytest.param("gpt", "tensor=2", 1.0, marks=pytest.mark.slow),
    ],
)
def test_no_step_waits_for_its_device(name: str, plan: str, clip_norm: float | None) -> None:
    recording = record_training(name, plan, 2, steps=4, clip_norm=clip_norm)
    assert set(recording.waits) <= ON_THE_CPU


def test_a_loss_scale_waits_for_one_number_of_a_step() -> None:
    recording = record_training("gpt", "pipeline=2,microbatches=4,precision=float16", 2, steps=4, clip_norm=None)
    assert list_violations(recording.launches) == []
    waits = {where: count for where, count in recording.waits.items() if where not in ON_THE_CPU}
    assert waits == {"objective_update.py update_weights item": 1}


def launch(group: tuple[int, ...], number: int, kind: str, **how: object) -> Launch:
    fields = {"form": (1, torch.float32), "nbytes": 4, "line": "line", "in_flight": (), "blocks": 32, "phase": "step 0"}
    return Launch((group, "g"), number, kind, **{**fields, "waited": True, **how})  # type: ignore[arg-type]


def test_the_laws_find_what_they_are_for() -> None:
    """Each law on the least records that break it."""
    pair, other = (0, 1), (0, 1, 2)
    # Rank 0 sums first and then sends to all, rank 1 the other way round.
    crossed = [
        [launch(pair, 0, "all_reduce"), launch(other, 0, "broadcast")],
        [launch(other, 0, "broadcast"), launch(pair, 0, "all_reduce")],
        [launch(other, 0, "broadcast")],
    ]
    assert any(violation.startswith("cycle") for violation in list_violations(crossed))
    differing = [[launch(pair, 0, "all_reduce")], [launch(pair, 0, "broadcast")]]
    assert any(violation.startswith("order") for violation in list_violations(differing))
    late = [[launch(pair, 0, "all_reduce")]] * 2
    assert [violation.partition(":")[0] for violation in list_violations(late)] == ["connect"]
    unwaited = [[launch(pair, 0, "send", waited=False, phase="connect")], [launch(pair, 0, "recv", phase="connect")]]
    assert {violation.partition(":")[0] for violation in list_violations(unwaited)} == {"edge", "memory"}
    changed = [[launch(pair, 0, "all_reduce", changed="input", phase="connect")]] * 2
    assert [violation.partition(":")[0] for violation in list_violations(changed)] == ["edge"]
    crowd = [
        Launch(((0, peer), "g"), 0, "broadcast", (1,), 4, "line", tuple(range(peer - 1)), 32, "connect", True)
        for peer in range(1, 6)
    ]
    lone = [[Launch(kernel.group, 0, "broadcast", (1,), 4, "line", (), 32, "connect", True)] for kernel in crowd]
    assert [violation.partition(":")[0] for violation in list_violations([crowd, *lone])] == ["crowd"]
