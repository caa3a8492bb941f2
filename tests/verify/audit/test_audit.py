"""Audits: a right training agrees with the user's own loop at every audited step, a wrong one is stopped."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.graph.capture import dry_run, self_check
from polylane.graph.python_state.side_effects import SideEffects
from polylane.plan.plan import Plan
from polylane.recipe import load
from polylane.runtime.job import Job
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.verify.audit import AuditMode, audit_start
from polylane.verify.audit.audit_report import AuditReport
from polylane.verify.audit.audit_start import Rebuild, start_auditor
from polylane.verify.audit.auditor_process import AuditedTraining, _reopen_files
from polylane.verify.audit.device_rounding import DeviceRounding, TensorFloat32, round_to_tf32
from polylane.verify.audit.schedule import AuditSchedule
from polylane.verify.audit.training_audit import attach_audit

SAMPLES, STEPS = 6, 4
Pairs = Iterable[tuple[str, nn.Parameter]]
Batch = tuple[Tensor, Tensor]


def sgd(parameters: Pairs) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1, momentum=0.9)


def adamw(parameters: Pairs) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters], lr=0.01, weight_decay=0.1)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3)
    ).double()


def batches(count: int = STEPS) -> list[Batch]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, 4, generator=random).double(), torch.randint(0, 3, (SAMPLES,), generator=random))
        for _ in range(count)
    ]


def train(
    plan: str,
    build: Callable[[], nn.Module] = network,
    loss: Callable[[Any, Any], Any] = cross_entropy,
    optimizer: Callable[[Any], Any] = sgd,
    *,
    mode: AuditMode = "stop",
    data: Sequence[Any] = (),
    spoil: Callable[[Job, int], None] | None = None,
    begin: Callable[[Job], None] | None = None,
    rebuild: Rebuild | None = None,
    **how: Any,
) -> AuditReport:
    """Train by a plan, with each worker spoiled after the auditor has got what the user wrote; rank 0's report."""
    data = data or batches()
    objectives = build_objectives(loss, optimizer, how.pop("scheduler", None))
    prepared = compile_training(TrainingProblem(build(), objectives, data[0]), plan)

    def run(context: WorkerContext) -> AuditReport | None:
        job_options: dict[str, Any] = {"example": data[0], "seed": 5, **how}
        audits = start_auditor(mode, prepared, context.world, begins_as_built=True, rebuild=rebuild, **job_options)
        job = Job(prepared, context.world, **job_options)
        audit = attach_audit(audits, job)
        if begin is not None:
            begin(job)
        for number, batch in enumerate(data):
            if spoil is not None:
                spoil(job, number)
            job.step(batch)
            job.settle_audit()  # else the tests would wait for an idle core to find out at which step it was
        job.close()
        return None if audit is None else audit.report()

    report = fork_workers(run, prepared.plan.processes)[0]
    assert report is not None
    return report


slow = pytest.mark.slow
PLANS = [
    pytest.param("data=1", marks=slow),
    "data=2,shard=parameters",
    pytest.param("pipeline=2,microbatches=2", marks=slow),
    pytest.param("tensor=2", marks=slow),
    pytest.param("data=2", marks=slow),
    pytest.param("data=2,servers=1", marks=slow),
    "data=2,pipeline=2,microbatches=3",
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_right_training_agrees(plan: str) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    report = train(plan, optimizer=adamw, scheduler=scheduler, clip_norm=0.5)
    assert report.steps == (1, 2, 4)
    assert not report.differences
    assert report.worst < 1e-9
    # Batch statistics see microbatches, and a mean over labels needs the whole batch's count: only the graph has both.
    assert report.of_own_code == ("microbatches" not in plan)
    assert "the same numbers as one device" in str(report)


@pytest.mark.parametrize("plan", [pytest.param("data=2,every=2", marks=slow), "data=2,every=3,warmup=2,outer=0.7:0.9"])
def test_steps_of_replicas_are_made_again_by_their_rule(plan: str) -> None:
    report = train(plan, data=batches(8), clip_norm=0.5)
    assert report.steps == (1, 2, 4, 8)
    assert not report.differences
    assert report.worst < 1e-9
    with pytest.raises(PolylaneError, match=r"computes: step 2( of replica 0)?: "):
        train(plan, spoil=move_a_weight)


def test_in_single_precision_rounding_is_no_difference() -> None:
    data = [(x.float(), y) for x, y in batches()]
    report = train("data=2,pipeline=2,microbatches=2", lambda: network().float(), optimizer=adamw, data=data)
    assert report.steps == (1, 2, 4)
    assert 0 < report.worst < 1e-4


def normed() -> nn.Module:
    """The gradient of its first bias is nothing but rounding."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_under_autocast_rounding_is_no_difference(precision: str) -> None:
    random = torch.Generator().manual_seed(1)
    data = [(torch.randn(64, 4, generator=random), torch.randint(0, 3, (64,), generator=random)) for _ in range(STEPS)]
    report = train(f"data=2,precision={precision}", normed, data=data)
    assert report.steps == (1, 2, 4) and report.worst > 1e-6
    with pytest.raises(PolylaneError, match="computes: step 2: "):
        train(f"data=2,precision={precision}", normed, data=data, spoil=move_a_weight_far)


def test_passes_in_float16_are_made_again_with_their_loss_scale() -> None:
    """Without it, gradients of a loss as small as this would be zero; where they overflow there is no update."""

    def faint(model: nn.Module, batch: Any) -> Any:
        return cross_entropy(model, batch) * 1e-7

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    data = [(x.float(), y) for x, y in batches()]
    data[1][0][3] = 1e6
    report = train("data=2,precision=float16", plain, faint, data=data)
    assert report.steps == (1, 4)
    assert not report.differences


# Bugs as a plan may have them: each worker is spoiled, the auditor is not.


def move_a_weight(job: Job, step: int) -> None:
    """In step 2 a weight is moved after the update."""
    if step == 1:
        optimizer = job.optimizer
        plain = optimizer.step

        def wrong(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1e-3)
            return result

        optimizer.step = wrong  # type: ignore[method-assign]


def move_a_weight_far(job: Job, step: int) -> None:
    """In step 2 a weight is moved after the update, by more than bfloat16 rounds."""
    if step == 1:
        plain = job.optimizer.step

        def wrong(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            with torch.no_grad():
                job.optimizer.param_groups[0]["params"][0].add_(1.0)
            return result

        job.optimizer.step = wrong  # type: ignore[method-assign]


def other_options(job: Job, step: int) -> None:
    """From step 2 on, the momentum is another one, once the step has begun."""
    if step == 1:
        plain = job.optimizer.step

        def wrong(*args: Any, **kwargs: Any) -> Any:
            job.optimizer.param_groups[0]["momentum"] = 0.5
            return plain(*args, **kwargs)

        job.optimizer.step = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("plan", "spoil"),
    [("data=2", move_a_weight), pytest.param("pipeline=2,microbatches=2", other_options, marks=slow)],
)
def test_a_wrong_step_stops_the_training(plan: str, spoil: Callable[[Job, int], None]) -> None:
    with pytest.raises(
        PolylaneError, match=r"does not compute what one device computes: step 2.*audit='warn' continues"
    ):
        train(plan, spoil=spoil)


def test_other_weights_than_those_that_were_built_are_found() -> None:
    def begin(job: Job) -> None:
        with torch.no_grad():
            job.model[0].weight.mul_(1.5)  # type: ignore[index,operator,union-attr]

    with pytest.raises(PolylaneError, match=r"before step 1 0\.weight is not what it was in the model that was built"):
        train("data=2", begin=begin)


def test_a_difference_may_be_a_warning() -> None:
    report = train("data=2", mode="warn", spoil=move_a_weight)
    assert report.steps == (1, 2, 4)
    assert len(report.differences) == 2
    assert "step 2" in report.differences[0]
    assert "step 1 was the last that agreed" in report.differences[0]


class Counting(nn.Module):
    """Its loss depends on how often it was called: a capture that freezes that is wrong from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(4, 3), 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def test_python_state_that_capture_has_frozen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not train("data=2", Counting).differences
    # Now nothing sees the counter any more.
    monkeypatch.setattr(dry_run, "find_side_effects", lambda model, loss, run, *_: (run(), SideEffects()))
    monkeypatch.setattr(self_check, "first_difference", lambda *args, **kwargs: None)
    with pytest.raises(PolylaneError, match=r"step 2: the first gradient that differs.*layer\.weight"):
        train("data=2", Counting)


SCALE = {"value": 1.0}


def scaled(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model, batch) * SCALE["value"]


class Scaling(torch.optim.SGD):
    """Its steps change what the loss reads."""

    def step(self, closure: Any = None) -> Any:
        SCALE["value"] += 0.5
        return super().step(closure)


def scaling(parameters: Pairs) -> torch.optim.Optimizer:
    return Scaling([p for _, p in parameters], lr=0.1)


def test_what_a_script_and_an_optimizer_change_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temperature, a mode, a key of the environment; a global that each step of the optimizer moves."""

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.part, self.temperature = nn.Linear(4, 3), nn.Identity(), 1.0
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            factor = float(os.environ.get("FACTOR", "1")) * (2 if self.part.training else 1)
            return self.part(self.layer(x)) * self.temperature * factor

    def anneal(job: Job, step: int) -> None:
        if step == 2:
            job.model.temperature = 0.25  # type: ignore[assignment]
            job.model.part.eval()  # type: ignore[union-attr]
            os.environ["FACTOR"] = "3"

    monkeypatch.delenv("FACTOR", raising=False)
    for plan in ("data=2", "pipeline=1"):
        report = train(plan, Tempered, spoil=anneal)
        assert report.steps == (1, 2, 4) and not report.differences, report
    monkeypatch.setitem(SCALE, "value", 1.0)
    report = train("data=2", loss=scaled, optimizer=scaling)
    assert report.steps == (1, 2, 4) and not report.differences, report


class Masked(nn.Module):
    """A mask that is no buffer, and a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.mask = nn.Linear(4, 3), torch.ones(3, dtype=torch.float64)
        self.function: Any = torch.tanh
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)) * self.mask


def test_tensors_that_a_script_changes_are_handed_over() -> None:
    """A mask is exchanged; a teacher outside of the model follows it, through ``.data``, which moves no version."""
    teacher = nn.Linear(4, 3).double().requires_grad_(False)

    def distill(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch[0]) - teacher(batch[0])).square().mean()

    def follow(job: Job, step: int) -> None:
        for parameter in teacher.parameters():
            parameter.data.mul_(0.5)
        if step == 2:
            job.model.mask = torch.tensor([1.0, 0.0, 1.0]).double()

    report = train("data=2", Masked, distill, spoil=follow)
    assert report.steps == (1, 2, 4) and not report.differences, report


def test_what_cannot_be_handed_over_ends_the_audits() -> None:
    def exchange(job: Job, step: int) -> None:
        if step == 2:
            job.model.function = torch.relu  # type: ignore[assignment]

    report = train("data=2", Masked, spoil=exchange)
    assert report.steps == (1, 2) and not report.differences
    assert "function was changed since the start" in report.note


def test_losses_in_turn_are_audited_each() -> None:
    """A critic and a generator, each of which freezes the other's weights."""

    def critic(model: nn.Module, batch: Batch) -> Tensor:
        return (model[1](model[0](batch[0]).detach()) - 1).square().mean()  # type: ignore[index]

    def generator(model: nn.Module, batch: Batch) -> Tensor:
        return model[1](model[0](batch[0])).square().mean()  # type: ignore[index]

    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double(), batches(8)
    factories = {
        name: lambda p, at=at: torch.optim.SGD([q for n, q in p if n.startswith(at)], lr=0.1)  # type: ignore[misc]
        for name, at in (("critic", "1."), ("generator", "0."))
    }
    losses = {"critic": critic, "generator": generator}
    prepared = compile_training(TrainingProblem(model, build_objectives(losses, factories, None), data[0]), "data=2")

    def run(context: WorkerContext) -> AuditReport:
        audits = start_auditor("stop", prepared, context.world, example=data[0])
        job = Job(prepared, context.world, example=data[0])
        audit = attach_audit(audits, job)
        assert audit is not None
        for number, batch in enumerate(data):
            name = ("critic", "generator")[number % 2]
            for part, module in enumerate(job.model.children()):
                module.requires_grad_(part == 1 - number % 2)
            job.step(batch, name)
            job.settle_audit()
        job.close()
        return audit.report()

    report = fork_workers(run, 2)[0]
    assert not report.differences and not report.note
    assert {number % 2 for number in report.steps} == {0, 1}


def load_scaled(plan: Plan, rounding: DeviceRounding) -> AuditedTraining:
    """Load a training in a new process, where the global is what it is when its module is imported."""
    example = batches(1)[0]
    problem = TrainingProblem(network(), build_objectives(scaled, scaling, None), example)
    return AuditedTraining(compile_training(problem, plan), example, None, 5, rounding)


def load_nothing(plan: Plan, rounding: DeviceRounding) -> AuditedTraining:
    raise PolylaneError("the recipe has gone")


def test_beside_an_accelerator_a_new_process_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a fork could not go backward; what it has built itself may hold other values, and all of them are told."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    # The workers themselves compute on the CPU, with a torch that is built for CUDA, too.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setitem(SCALE, "value", 2.0)
    report = train("data=2", loss=scaled, optimizer=scaling, rebuild=load_scaled)
    assert report.steps == (1, 2, 4) and not report.differences and report.worst < 1e-9, report
    with pytest.raises(PolylaneError, match="does not compute what one device computes: step 2"):
        train("data=2", loss=scaled, optimizer=scaling, rebuild=load_scaled, spoil=move_a_weight)
    report = train("data=2", rebuild=load_nothing)
    assert report.note == "step 1 cannot be made by one process: the recipe has gone"
    assert "autograd cannot run in a forked process" in train("data=2").note


def test_a_device_that_multiplies_in_tensorfloat32_only_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a rounded convolution a few units of ReLU turn: gradients differ by percents, which no bound holds."""
    rounding = DeviceRounding(1e-2, rounds_convolutions=True)
    monkeypatch.setattr(audit_start, "read_rounding", lambda *_: rounding)
    recipe = load(str(Path(polylane.__file__).parents[2] / "examples" / "digits.py"), {"width": "8", "blocks": "1"})
    images, labels = recipe.data("train").tensors
    data = [(images[i : i + 32], labels[i : i + 32]) for i in (0, 32)]

    def begin(job: Job) -> None:
        TensorFloat32(rounding).__enter__()  # this worker's convolutions, until it ends

    def negate_a_gradient(job: Job, number: int) -> None:
        next(iter(job.model.parameters())).register_hook(torch.neg)

    report = train("data=1", recipe.model, cross_entropy, data=data, begin=begin)
    assert report.steps == (1, 2) and not report.differences, report
    with pytest.raises(PolylaneError, match=r"step 1: .*stem\.0\.weight"):
        train("data=1", recipe.model, cross_entropy, data=data, begin=begin, spoil=negate_a_gradient)


@pytest.mark.parametrize("kind", ["conv", "gru", "attention", "linear"])
def test_what_tensor_cores_compute_is_rounded(kind: str) -> None:
    """Once with the flag of its operators, which for a recurrent layer are both; never without."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 8, generator=random)
    module: Any = {"conv": nn.Conv1d(4, 4, 3), "gru": nn.GRU(8, 8), "linear": nn.Linear(8, 8)}.get(kind)

    def compute(**flags: bool) -> Tensor:
        with TensorFloat32(DeviceRounding(1e-2, **flags)):
            result = F.scaled_dot_product_attention(x, x, x) if module is None else module(x)
        return result[0] if kind == "gru" else result

    exact = compute()
    flags = {"conv": ["rounds_convolutions"], "gru": ["rounds_convolutions", "rounds_products"]}
    rounded = compute(**dict.fromkeys(flags.get(kind, ["rounds_products"]), True))
    assert 0 < (rounded - exact).abs().max() < 1e-2
    other = "rounds_products" if kind == "conv" else "rounds_convolutions"
    assert kind == "gru" or torch.equal(compute(**{other: True}), exact)


def test_a_mask_in_a_sum_stays_finite() -> None:
    mask = torch.full((1, 2, 2), torch.finfo(torch.float32).min)
    with TensorFloat32(DeviceRounding(1e-2, rounds_products=True)):
        assert torch.baddbmm(mask, torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)).isfinite().all()
    assert round_to_tf32(mask).isfinite().all()


def test_numbers_are_rounded_to_the_nearest_of_tensorfloat32() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded = round_to_tf32(x)
    assert ((rounded - x).abs() <= x.abs() * 2**-11).all()
    assert torch.equal(round_to_tf32(rounded), rounded)
    assert (rounded.view(torch.int32) & 0x1FFF == 0).all()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1 + 2**-10, 1 + 2**-11])
    assert torch.equal(round_to_tf32(special), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1 + 2**-10, 1 + 2**-10]))
    assert round_to_tf32(torch.tensor(torch.nan)).isnan()


def test_the_training_s_files_are_not_moved(tmp_path: Path) -> None:
    file = tmp_path / "samples"
    file.write_bytes(bytes(range(200)))

    def run(context: WorkerContext) -> tuple[int, ...]:
        with file.open("rb") as opened:
            opened.read(10)
            child = os.fork()
            if not child:
                _reopen_files()
                os.read(opened.fileno(), 50)
                os._exit(0)
            os.waitpid(child, 0)
            return opened.tell(), os.lseek(opened.fileno(), 0, os.SEEK_CUR)

    before = 200  # all of it is in Python's buffer
    assert fork_workers(run, 1)[0] == (10, before)


def test_what_has_no_single_loop_is_not_audited() -> None:
    for plan, words in (
        ("data=2,servers=1,staleness=1", "in an order of their own"),
        ("pipeline=2,schedule=pipedream,microbatches=1", "weights of several steps"),
        ("data=2,compress=powersgd:1", "gradients lose digits"),
    ):
        report = train(plan, lambda: network()[:1], lambda m, b: m(b[0]).square().mean())  # type: ignore[index]
        assert not report.steps
        assert words in str(report)


def test_the_model_is_read_as_it_was_given() -> None:
    """Hooks, a closure and a module that is used twice are the user's own in the auditor, too."""
    scale = torch.tensor(0.5, dtype=torch.float64)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model, batch) + scale * model(batch[0] * 2).square().mean()

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 3)).double()
        model[0].register_forward_hook(lambda module, args, output: output * 3)
        return model

    report = train("data=2", build, loss)
    assert report.steps == (1, 2, 4) and report.worst < 1e-9


def test_a_budget_puts_steps_off() -> None:
    schedule = AuditSchedule(0, is_bounded=True)
    audited = []
    step, seconds_of_step, stall = 0, 0.01, 0.05
    while step < 20_000:
        elapsed = step * seconds_of_step + schedule.stall_seconds
        if schedule.is_due(step, False, elapsed):
            audited.append(step + 1)
            schedule.begin_audit(step)
            schedule.count_stall(stall, of_audit=True)
        step = max(step + 1, schedule.next_step(step, elapsed))
    assert audited[0] == 1
    assert audited[-3:] == [4096, 8192, 16384]
    assert schedule.stall_seconds <= 0.01 * 20_000 * seconds_of_step
    unbounded = AuditSchedule(0, is_bounded=False)
    assert [n + 1 for n in range(70) if unbounded.is_due(n, False, 1.0) and unbounded.begin_audit(n)] == [
        1, 2, 4, 8, 16, 32, 64,
    ]  # fmt: skip


def test_a_batch_in_part_is_passed_over_for_the_next_whole_one() -> None:
    schedule = AuditSchedule(0, is_bounded=False)
    assert [schedule.pass_over(step, False) for step in (0, 1, 2, 3, 7)] == [2, 2, 5, 5, 11]
    assert schedule.pass_over(1000, True) == 1001


def test_scripts_are_audited(capfd: pytest.CaptureFixture[str]) -> None:
    data = batches()
    job = polylane.parallelize(network(), cross_entropy, sgd, example=data[0], audit="stop")
    for batch in data:
        job.step(batch)
        job.settle_audit()
    job.close()
    assert "audited at 3 steps: the same numbers as one device" in capfd.readouterr().err


def test_an_auditor_that_nobody_closes_ends_with_the_training() -> None:
    problem = TrainingProblem(network(), build_objectives(cross_entropy, sgd, None), batches(1)[0])
    start = start_auditor("stop", compile_training(problem, "data=1"), World.join(), example=batches(1)[0])
    assert start.auditor is not None
    process = start.auditor._process
    assert process is not None
    del start
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
