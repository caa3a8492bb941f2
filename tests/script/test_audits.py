"""Audits of prepared scripts: some steps are computed a second time on whole weights, and what differs is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.errors import AuditFailed, PolylaneError
from polylane.runtime.step_result import StepResult
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.prepared_model import PreparedModel
from polylane.script.role import ScriptRole
from polylane.verify.audit.audit_report import AuditReport
from polylane.verify.audit.passes_audit import PassesAudit
from polylane.verify.rounding_floor import MeasuredPass


def train(plan: str, audit: str, steps: int = 5, dropout: float = 0.0) -> tuple[list[float], AuditReport]:
    """Return the printed numbers of a loop, and what its audits have found."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
    ).double()
    x, y = torch.randn(12, 5).double(), torch.randint(0, 3, (12,))
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = polylane.prepare(network, optimizer, plan=plan, audit=audit)
    losses = list[float]()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert isinstance(model, PreparedModel)
    losses += [float(value.double().sum()) for value in model.state_dict().values()]
    assert model._polylane_loop.runner.audit is not None
    return losses, model._polylane_loop.runner.audit.report()


@pytest.mark.parametrize(
    ("plan", "dropout"),
    [
        ("pipeline=2", 0.5),
        pytest.param("data=2,shard=parameters", 0.0, marks=pytest.mark.slow),
        pytest.param("data=2", 0.5, marks=pytest.mark.slow),
        pytest.param("tensor=2", 0.5, marks=pytest.mark.slow),
    ],
)
def test_audited_steps_agree_and_change_nothing(plan: str, dropout: float) -> None:
    def run(context: WorkerContext) -> Any:
        return train(plan, "stop", dropout=dropout), train(plan, "off", dropout=dropout)

    for (numbers, report), (expected, nothing) in fork_workers(run, 2):
        assert report.steps == (1, 2, 4) and not report.note and not report.differences
        assert report.worst < 1e-10
        assert numbers == expected and nothing.steps == ()


@pytest.mark.parametrize("fault", ["gradient", pytest.param("loss", marks=pytest.mark.slow)])
def test_a_difference_stops_all_workers_or_is_a_warning(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, last = ScriptRole.compute, "4.weight"

    def compute_wrongly(self: ScriptRole, batch: Any, name: str) -> Any:
        computed = compute(self, batch, name)
        for parameter_name, gradient in self.local_gradients(computed, name).items():
            if parameter_name.endswith(last) and fault == "gradient" and self.world.rank == 1:
                gradient[0] *= 1 + 1e-6
        return computed

    monkeypatch.setattr(ScriptRole, "compute", compute_wrongly)
    if fault == "loss":
        true_loss: Any = StepResult.loss
        monkeypatch.setattr(StepResult, "loss", property(lambda result: true_loss.fget(result) * (1 + 1e-6)))

    def run(context: WorkerContext) -> Any:
        with pytest.raises(AuditFailed) as caught:
            train("pipeline=2", "auto")
        with pytest.warns(UserWarning, match="does not compute what one device computes"):
            _, report = train("pipeline=2", "warn", steps=2)
        return str(caught.value), report

    for sentence, report in fork_workers(run, 2):
        subject = "the loss" if fault == "loss" else f"the gradient of model.{last}"
        assert f"{subject} of backward pass 1 differs (largest relative difference" in sentence
        assert len(report.differences) == len(report.steps) > 0


@pytest.mark.parametrize(
    ("plan", "casts"),
    [
        ("data=2,precision=bfloat16", False),
        ("pipeline=2,precision=bfloat16", False),
        ("pipeline=2,precision=float16", False),
        ("data=2", True),
    ],
)
def test_steps_in_half_precision_are_audited_in_half_precision(plan: str, casts: bool) -> None:
    """The plan casts, or the script; the gradient of a bias before a batch normalization is nothing but rounding."""

    def run(context: WorkerContext) -> Any:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1)
        model, optimizer = polylane.prepare(network, optimizer, plan=plan, audit="stop")
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = F.cross_entropy(model(torch.randn(24, 1, 8, 8)), torch.randint(0, 3, (24,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model._polylane_loop.runner.audit.report()

    for report in fork_workers(run, 2):
        assert report.steps == (1, 2, 4) and not report.differences


def test_random_numbers_that_go_by_the_plan_s_parts_end_audits_with_a_note() -> None:
    def run(context: WorkerContext) -> Any:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        model, optimizer = polylane.prepare(
            network, torch.optim.SGD(network.parameters(), lr=0.1), plan="pipeline=2,microbatches=2"
        )
        F.cross_entropy(model(torch.randn(12, 5).double()), torch.randint(0, 3, (12,))).backward()
        optimizer.step()
        return model._polylane_loop.runner.audit.report()

    for report in fork_workers(run, 2):
        assert report.steps == () and "those of the plan's parts of a batch" in report.note


def test_gradients_that_are_rounded_on_their_way_are_no_fault() -> None:
    for losses, report in fork_workers(lambda context: train("data=2,wire=bfloat16", "stop", steps=2), 2):
        assert len(losses) > 2 and report.steps == ()
        assert report.note.startswith("wire=bfloat16: gradients lose digits on their way")


def test_a_mode_that_does_not_exist_is_refused() -> None:
    network = nn.Linear(2, 2)
    with pytest.raises(PolylaneError, match="audit='always': give one of auto, stop, warn, off"):
        polylane.prepare(network, plan="data=1", audit="always")  # type: ignore[arg-type]


def test_no_step_is_computed_on_whole_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr("polylane.script.start.available_memory", lambda: 4096)
    monkeypatch.setattr("polylane.script.start.is_launched", lambda: True)  # by torchrun, without a command
    monkeypatch.setattr("polylane.script.start.say_at_once", said.append)
    losses, report = train("data=1", "auto", steps=2)
    assert len(losses) > 2 and report.steps == ()
    assert report.note.startswith("a step on whole weights takes 0 MiB, and 0 MiB are free on cpu")
    assert said == [f"steps are not audited: {report.note}"]


def judge(measured: dict[str, Tensor], computed: dict[str, Tensor]) -> str:
    """Return what one worker's audit says of computed gradients; "" where it says nothing."""
    audit = PassesAudit("stop", lambda value: [value], "data=1", 1e-9)
    assert audit.is_due()
    expected = MeasuredPass(1.0, measured, {})
    try:
        audit.compare(expected, 1.0, computed, lambda name, gradient: gradient, lambda attempt: expected)
    except AuditFailed as failed:
        return str(failed)
    return ""


def test_what_only_one_side_has_is_a_difference() -> None:
    ones, zeros, broken = torch.ones(2), torch.zeros(2), torch.tensor([1.0, float("nan")])
    assert judge({"w": ones}, {"w": ones}) == judge({"w": ones}, {"w": ones, "v": zeros}) == ""
    assert judge({"w": ones, "v": zeros}, {"w": ones}) == judge({"w": broken}, {"w": broken}) == ""
    pairs = (ones, None), (None, ones), (broken, ones), (ones, broken)
    for pair in pairs:
        measured, computed = ({} if gradient is None else {"w": gradient} for gradient in pair)
        assert "the gradient of w of backward pass 1 differs" in judge(measured, computed)
