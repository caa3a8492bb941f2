"""Trainings in float16 with a loss scale: every plan decides and computes what GradScaler does on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import polylane
from polylane.errors import PolylaneError
from polylane.graph.batch import split_bounds
from polylane.plan.spec import parse
from polylane.runtime.job import Job
from polylane.runtime.sync import loss_scale
from polylane.runtime.workers.team import fork_workers
from tests.support.workers.training import batch_of, classify, workers

INTERVAL = 3  # good updates after which the scale grows
CLIP = 1.05  # bound on norms of which some are smaller, some larger
PLANS = (
    "data=2",
    "data=2,wire=float16",
    "data=2,shard=gradients",
    "data=2,shard=parameters",
    "tensor=2",
    "pipeline=2,microbatches=4",
    "data=2,pipeline=2",
    "data=2,pipeline=2,microbatches=2,replicas=round-robin",
    "data=4",
)


@pytest.fixture(autouse=True)
def soon_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale grows within a test: workers are forked, and have this interval as well."""
    monkeypatch.setattr(loss_scale, "INTERVAL", INTERVAL)


class Residual(nn.Module):
    """Values of both precisions cross between stages: a residual in float32, linear layers in float16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def slight() -> Residual:
    """A model whose first layer moves large inputs as little as that of :class:`Residual` moves small ones."""
    model = Residual()
    with torch.no_grad():
        model.layers[0].weight.mul_(1e-5)
    return model


def batches(overflowing: Sequence[int], count: int = 9, large: float = 1e6) -> list[tuple[Tensor, Tensor]]:
    """Batches of which some have a sample of large numbers: a million is infinite in float16."""
    result = [(x.float(), y) for x, y in (batch_of(8, seed=i) for i in range(count))]
    for step in overflowing:
        result[step][0][5] = large
    return result


class Run(NamedTuple):
    """Scales and rates before each step and after the last, weights after each, and norms of its gradients."""

    scales: list[float]
    rates: list[float]
    states: list[dict[str, Tensor]]
    norms: Sequence[float] = ()


Optimizer = Callable[[Any], torch.optim.Optimizer]


def adam(pairs: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in pairs], lr=0.01, **options)


def fused(pairs: Any) -> torch.optim.Optimizer:
    return adam(pairs, fused=True)


def momentum(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in pairs], lr=0.1, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def on_one_device(
    data: Sequence[tuple[Tensor, Tensor]],
    optimizer: Optimizer,
    microbatches: int = 1,
    clip_norm: float | None = None,
    scheduler: Any = None,
    build: Callable[[], nn.Module] = Residual,
) -> Run:
    """Torch's own loop, with GradScaler; the scheduler steps where the optimizer does."""
    model = build()
    steps = optimizer(model.named_parameters())
    schedule = scheduler and scheduler(steps)
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    run, norms = Run([scaler.get_scale()], [steps.param_groups[0]["lr"]], []), list[float]()
    for batch in data:
        steps.zero_grad()
        for start, stop in split_bounds(len(batch[0]), microbatches):
            with torch.autocast("cpu", dtype=torch.float16):
                value = classify(model, (batch[0][start:stop], batch[1][start:stop]))
            scaler.scale(value * ((stop - start) / len(batch[0]))).backward()
        scaler.unscale_(steps)
        if clip_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        scaler.step(steps)
        before = scaler.get_scale()
        scaler.update()
        if schedule and scaler.get_scale() >= before:
            schedule.step()
        run.scales.append(scaler.get_scale())
        run.rates.append(steps.param_groups[0]["lr"])
        run.states.append({name: value.clone() for name, value in model.state_dict().items()})
    return run._replace(norms=norms)


def scale_of(job: Job) -> float:
    """The loss scale of the next step, on this worker."""
    found = job.worker._updates["loss"].loss_scale
    assert found is not None
    return found.collect()[0]


def recorded(job: Job, data: Sequence[tuple[Tensor, Tensor]]) -> Run:
    groups = job.optimizer.param_groups
    run = Run([scale_of(job)], [groups[0]["lr"]], [])
    for batch in data:
        job.step(batch)
        run.scales.append(scale_of(job))
        run.rates.append(groups[0]["lr"])
        run.states.append(job.state_dict())
    return run


def by_plan(
    plan: str,
    data: Sequence[tuple[Tensor, Tensor]],
    optimizer: Optimizer,
    build: Callable[[], nn.Module] = Residual,
    **options: Any,
) -> list[Run]:
    plan = f"{plan},precision=float16"
    return workers(lambda job: recorded(job, data), build(), plan, optimizer=optimizer, example=data[0], **options)


def assert_alike(run: Run, reference: Run, far: float = 2e-2) -> None:
    """The same scales and rates, and weights to rounding; an update is left out in the same steps."""
    assert run.scales == reference.scales
    assert run.rates == reference.rates
    for step, (state, expected) in enumerate(zip(run.states, reference.states, strict=True)):
        for name, value in expected.items():
            error = float((state[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
            assert error < far, f"{name} of step {step}: {error:.1e}"
    for step in range(1, len(run.states)):
        left_out = run.scales[step + 1] < run.scales[step]
        assert left_out == all(torch.equal(run.states[step][n], run.states[step - 1][n]) for n in run.states[step])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", [momentum, fused])
def test_scales_and_updates_are_those_of_grad_scaler(plan: str, optimizer: Optimizer) -> None:
    data = batches(overflowing=[1, 5, 6])
    reference = on_one_device(data, optimizer, parse(plan).microbatches or 1)
    changes = [b / a for a, b in zip(reference.scales, reference.scales[1:], strict=False)]
    assert changes.count(0.5) == 3 and 2.0 in changes
    for run in by_plan(plan, data, optimizer):
        assert_alike(run, reference)


@pytest.mark.parametrize("plan", ["pipeline=2,microbatches=4", "data=2,shard=gradients", "data=2,pipeline=2"])
@pytest.mark.parametrize("optimizer", [momentum, fused])
def test_a_gradient_that_one_worker_has_stops_the_update_of_all(plan: str, optimizer: Optimizer) -> None:
    """All numbers are finite but the gradient of the first layer's weight, the product of large inputs and a scale."""
    data = batches(overflowing=[0], count=3, large=3e4)
    model = slight()
    with torch.autocast("cpu", torch.float16):
        (classify(model, data[0]) * 2.0**16).backward()
    infinite = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert infinite == ["layers.0.weight"]
    reference = on_one_device(data, optimizer, parse(plan).microbatches or 1, build=slight)
    assert reference.scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
    for run in by_plan(plan, data, optimizer, build=slight):
        assert_alike(run, reference)


@pytest.mark.parametrize("plan", ["data=2,pipeline=2,microbatches=2", "data=2,shard=gradients"])
def test_clipping_sees_unscaled_gradients_and_schedulers_wait(plan: str) -> None:
    data = batches(overflowing=[0, 4])
    microbatches = parse(plan).microbatches or 1
    reference = on_one_device(data, momentum, microbatches, clip_norm=CLIP, scheduler=halving)
    assert reference.rates[1] == 0.1 and reference.rates[-1] < 0.1
    finite = list(filter(math.isfinite, reference.norms))
    assert len(finite) == len(data) - 2 and min(finite) < CLIP < max(finite)
    for run in by_plan(plan, data, momentum, clip_norm=CLIP, scheduler=halving):
        assert_alike(run, reference)


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads of tensors, for which it would wait for an accelerator."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("optimizer", "reads"), [(fused, 0), (momentum, 1)])
def test_the_host_reads_at_most_one_number_of_an_update(optimizer: Optimizer, reads: int) -> None:
    def count(job: Job) -> int:
        job.step(batches([])[0])
        with Reads() as counted:
            job.worker._updates["loss"].update_weights()
        return counted.count

    plan = "data=2,shard=gradients,precision=float16"
    assert workers(count, Residual(), plan, optimizer=optimizer, example=batches([])[0]) == [reads, reads]


def test_small_gradients_are_kept() -> None:
    """Those of a loss that is a ten-millionth: without a scale they would be zero in float16."""

    def faint(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * 1e-7

    (gradients, _) = workers(
        lambda job: (job.step(batches([])[0]), {n: g.clone() for n, g in job.gradients().items()})[1],
        Residual(),
        "data=2,precision=float16",
        loss=faint,
        example=batches([])[0],
    )
    model = Residual()
    faint(model, batches([])[0]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 2e-2, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("first", "then"), [("data=2", "data=2"), ("data=2", "pipeline=2"), ("tensor=2", "data=2,shard=parameters")]
)
def test_a_resumed_training_has_the_scale_of_the_unbroken_one(first: str, then: str, tmp_path: Path) -> None:
    data, at = batches(overflowing=[1, 2, 6]), 4  # after one good update of three, at a quarter of the first scale

    def save(job: Job) -> Run:
        recorded(job, data[:at])
        job.save_checkpoint(tmp_path)
        return recorded(job, data[at:])

    def resume(job: Job) -> Run:
        job.load_checkpoint(tmp_path)
        return recorded(job, data[at:])

    options = {"optimizer": momentum, "example": data[0]}
    (unbroken, *_) = workers(save, Residual(), f"{first},precision=float16", **options)
    assert unbroken.scales[0] == 2.0**14 and len(set(unbroken.scales)) > 1
    for run in workers(resume, Residual(), f"{then},precision=float16", **options):
        assert_alike(run, unbroken)
        assert first != then or all(torch.equal(run.states[-1][n], v) for n, v in unbroken.states[-1].items())


def sparse(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in pairs], lr=0.1)


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2"])
def test_sums_over_counts_and_sparse_gradients(plan: str) -> None:
    """A loss that is a total and its count, with rows of a table that only some samples read."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(6, 8, sparse=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    def counted(model: nn.Module, batch: Any) -> polylane.Mean:
        rows, labels = batch
        losses = torch.nn.functional.cross_entropy(model(rows), labels, reduction="none", ignore_index=0)
        return polylane.Mean(losses.sum(), (labels != 0).sum())

    generator = torch.Generator().manual_seed(0)
    data = [tuple(torch.randint(0, n, (8,), generator=generator) for n in (6, 4)) for _ in range(3)]
    model = Counted()
    steps = sparse(model.named_parameters())
    for batch in data:
        steps.zero_grad()
        with torch.autocast("cpu", torch.float16):
            mean = counted(model, batch)
        (mean.total / mean.count).backward()
        steps.step()
    run = {"loss": counted, "optimizer": sparse, "example": data[0]}
    found = workers(lambda job: recorded(job, data), Counted(), f"{plan},precision=float16", **run)
    for worker in found:
        assert_alike(Run([], [], worker.states[-1:]), Run([], [], [dict(model.state_dict())]))


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2", "data=2,shard=parameters"])
def test_scripts_leave_out_the_same_updates(plan: str) -> None:
    """An ordinary loop without a scaler, of two backward passes for each update, and two optimizers."""
    data = batches(overflowing=[5, 8], count=12)

    def loop(model: nn.Module, optimizers: Sequence[Any], scaler: Any = None) -> list[float]:
        losses = list[float]()
        for number, (x, y) in enumerate(data):
            with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                loss = torch.nn.functional.cross_entropy(model(x), y) / 2
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.item())
            if number % 2 == 1:
                for optimizer in optimizers:
                    optimizer.step() if scaler is None else scaler.step(optimizer)
                    optimizer.zero_grad()
                if scaler is not None:
                    scaler.update()
        return losses

    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = Residual()
        named = list(model.named_parameters())
        return model, [momentum(named[:4]), fused(named[4:])]

    def run(_: Any) -> tuple[list[float], dict[str, Tensor], float]:
        plain, optimizers = build()
        model, *prepared = polylane.prepare(plain, *optimizers, plan=f"{plan},precision=float16", audit="stop")
        losses = loop(model, prepared)
        role = model._polylane_loop.runner.role
        return losses, {n: v.clone() for n, v in model.state_dict().items()}, role.loss_scale("loss")

    model, optimizers = build()
    scaler = torch.amp.GradScaler("cpu")
    expected = loop(model, optimizers, scaler)
    assert scaler.get_scale() == 2.0**14
    for losses, state, scale in fork_workers(run, 2):
        assert scale == scaler.get_scale()
        assert losses == pytest.approx(expected, rel=2e-2, nan_ok=True)
        assert_alike(Run([], [], [state]), Run([], [], [dict(model.state_dict())]))


@pytest.mark.parametrize(
    "words",
    [
        "pipeline=2,schedule=pipedream",
        "data=2,every=2",
        "data=2,servers=1",
        "data=2,compress=top_k:0.1",
    ],
)
def test_what_cannot_leave_out_a_step_together_is_refused(words: str) -> None:
    with pytest.raises(PolylaneError, match=r"precision=float16 and .* exclude each other"):
        by_plan(words, batches([]), momentum)


def test_gradients_in_float16_are_refused() -> None:
    model, example = Residual().half(), (torch.ones(8, 6).half(), batches([])[0][1])
    with pytest.raises(PolylaneError, match="float16 itself"):
        workers(lambda job: None, model, "data=1,precision=float16", example=example)
