"""A job whose operators are split: weights, clipping, evaluation and optimizers see through the parts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from polylane.compile.optimizer_probe import find_whole_parameters
from polylane.runtime.job import Job
from tests.support import subsets
from tests.support.workers import training
from tests.support.workers.training import adamw, batch_of, classify, mlp, sgd, workers

Pairs = Iterable[tuple[str, nn.Parameter]]
PLANS = ["tensor=2", "tensor=3", "data=2,tensor=2", "pipeline=2,tensor=2,microbatches=2"]


class Lars(torch.optim.Optimizer):
    """A step as long as the parameter (You et al., Large Batch Training of Convolutional Networks, 2017)."""

    def __init__(self, parameters: Pairs, lr: float) -> None:
        super().__init__([{"params": [p for _, p in parameters]}], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = parameter.norm() / parameter.grad.norm().clamp_min(1e-9)
                    parameter.sub_(parameter.grad * trust, alpha=group["lr"])


def trained(plan: str, model: nn.Module, **options: Any) -> list[dict[str, Tensor]]:
    def work(job: Job) -> dict[str, Tensor]:
        for step in range(3):
            job.step(batch_of(8, seed=step))
        return job.state_dict()

    results: list[dict[str, Tensor]] = workers(work, model, plan, **options)
    return results


def same(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for state in results:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("plan", subsets.one_in(2, PLANS, first=1))
def test_clipping_sees_the_norm_of_the_whole(plan: str) -> None:
    alone = "data=1,microbatches=2" if "microbatches" in plan else "data=1"
    (expected,) = trained(alone, mlp(6, 9, 8, 4), clip_norm=0.05)
    same(trained(plan, mlp(6, 9, 8, 4), clip_norm=0.05), expected)


@pytest.mark.parametrize(
    "optimizer",
    subsets.one_in(
        2, [sgd, adamw, lambda p: torch.optim.Adagrad(list(p), lr=0.1), lambda p: Lars(list(p), 0.01)], first=1
    ),
)
def test_every_optimizer_steps_as_on_one_device(optimizer: Any) -> None:
    (expected,) = trained("data=1", mlp(6, 9, 8, 4), optimizer=optimizer)
    same(trained("tensor=2", mlp(6, 9, 8, 4), optimizer=optimizer), expected)


def test_an_optimizer_that_takes_norms_needs_whole_parameters() -> None:
    named = list(mlp(6, 8, 4).named_parameters())
    assert find_whole_parameters(named, [sgd, adamw]) == {}
    assert set(find_whole_parameters(named, [lambda p: Lars(list(p), 0.1)])) == {name for name, _ in named}
    factored = set(find_whole_parameters(named, [lambda p: torch.optim.Adafactor([q for _, q in p])]))
    assert factored in ({name for name, p in named if p.dim() == 2}, {name for name, _ in named})


class RowWise(torch.optim.Optimizer):
    """One rate for each row, as for large embedding tables."""

    def __init__(self, parameters: Pairs) -> None:
        super().__init__([{"params": [p for _, p in parameters]}], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.sub_(parameter.grad / parameter.grad.square().mean(-1, keepdim=True).sqrt().add(1e-3), alpha=0.01)


def test_an_optimizer_that_looks_at_rows_needs_whole_parameters() -> None:
    named = list(mlp(6, 8, 4).named_parameters())
    assert set(find_whole_parameters(named, [lambda p: RowWise(list(p))])) == {name for name, _ in named}


def test_bfloat16_goes_with_split_operators() -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.LayerNorm(2), nn.Linear(2, 4))  # two features over three ranks

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0].float()), batch[1])

    plan = "tensor=3,precision=bfloat16"
    ((expected,),) = workers(lambda j: [j.step(batch_of(8)).loss], model, "data=1,precision=bfloat16", loss=loss)
    for (found,) in workers(lambda j: [j.step(batch_of(8)).loss], model, plan, loss=loss):
        assert found == pytest.approx(expected, rel=0.05)


def test_a_worker_holds_its_part_and_saves_the_whole(tmp_path: Path) -> None:
    model = mlp(6, 16, 16, 4)
    whole = sum(p.numel() for p in model.parameters())

    def work(job: Job) -> int:
        job.step(batch_of(8))
        job.save(tmp_path / "model.safetensors")
        return sum(tensor.numel() for tensor in job.worker.held().values())

    held = workers(work, model, "tensor=4")
    assert max(held) < 0.35 * whole
    plain = mlp(6, 16, 16, 4)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    (expected,) = workers(lambda job: (job.step(batch_of(8)), job.state_dict())[1], mlp(6, 16, 16, 4), "data=1")
    same([plain.state_dict()], expected)


@pytest.mark.parametrize("plan", subsets.one_in(2, ["tensor=2", "data=2,tensor=2"]))
def test_batches_of_another_form_and_evaluation(plan: str) -> None:
    """Captured anew, when the worker holds only parts of the weights."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.norm(self.up(x).tanh().flatten(0, -2))
            return self.down(out).unflatten(0, x.shape[:-1])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    def batch(samples: int, rows: int) -> tuple[Tensor, Tensor]:
        inputs, labels = batch_of(samples * rows)
        return inputs.view(samples, rows, 6), labels.view(samples, rows)

    def work(job: Job) -> list[float]:
        losses = [job.step(batch(4, rows)).loss for rows in (2, 3, 2, 3)]
        return [*losses, job.evaluate(batch(5, 2)), job.evaluate(batch(3, 4))]

    (expected,) = workers(work, Mixing().double(), "data=1", loss=loss, example=batch(4, 2))
    for losses in workers(work, Mixing().double(), plan, loss=loss, example=batch(4, 2)):
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("plan", subsets.one_in(2, ["tensor=2", "pipeline=2,tensor=2,microbatches=2"], first=1))
def test_a_model_on_the_meta_device_is_never_whole(plan: str) -> None:
    def model() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()

    def work(job: Job) -> Any:
        held = max((t.numel() for t in job.worker.held().values()), default=0)
        first = job.state_dict()
        losses = [job.step(batch_of(8)).loss for _ in range(2)]
        return held, first, [*losses, job.evaluate(batch_of(5))]

    alone = "data=1,microbatches=2" if "micro" in plan else "data=1"
    ((_, expected, losses),) = workers(work, model(), alone)
    for held, first, own in workers(work, model(), plan):
        assert held <= 16 * 16 // 2
        same([first], expected)
        assert own == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(
    "plan", subsets.except_slow(["data=2", "data=3", "data=2,tensor=2"], ["data=2", "data=2,tensor=2"])
)
def test_samples_that_meet_are_trained_together(plan: str) -> None:
    """In-batch negatives: every sample is held against those of the other replica too."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = nn.functional.normalize(model(batch[0]), dim=-1)
        return nn.functional.cross_entropy(out @ out.t() * 3.0, torch.arange(len(out)))

    def work(job: Job) -> tuple[list[float], dict[str, Tensor]]:
        losses = [job.step(batch_of(samples, seed)).loss for seed, samples in enumerate((8, 7, 1, 5))]
        return [*losses, job.evaluate(batch_of(5))], job.state_dict()

    ((expected, weights),) = workers(work, mlp(6, 8, 4), "data=1", loss=loss)
    for losses, state in workers(work, mlp(6, 8, 4), plan, loss=loss):
        assert losses == pytest.approx(expected, rel=1e-9, abs=1e-12)
        same([state], weights)


@pytest.mark.parametrize("plan", ["tensor=2", "data=2,shard=parameters", "pipeline=2,microbatches=2"])
def test_a_loss_that_the_script_still_has(plan: str) -> None:
    """Its graph refers to the whole parameters, of which a worker then has parts."""
    model = mlp(6, 8, 8, 4)
    alive = classify(model, batch_of(8))
    (alone,) = training.trained(mlp(6, 8, 8, 4), "data=1", 2 * [batch_of(8)])
    for worker in training.trained(model, plan, 2 * [batch_of(8)]):
        assert worker.losses == pytest.approx(alone.losses, rel=1e-9)
    assert alive.requires_grad
