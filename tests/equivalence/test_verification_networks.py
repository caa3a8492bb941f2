"""Networks whose gradients and statistics are rounding in places: equal plans are equal, and faults are still found.

A convolution before BatchNorm moves nothing by its bias, nor does a BatchNorm by its own before the next one; the mean
of what is normalized is zero. Optimizers make steps of such gradients, and running statistics follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.program import lower
from polylane.runtime.job import Job
from polylane.runtime.pipeline import executor as worker
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.training_role import TrainingRole
from polylane.verify.verify import Verdict, batch_in_float64, verify, verify_compiled
from tests.support import models, subsets
from tests.support.workers.compiling import compile_training

SIDE, CLASSES = 16, 5


def convolved(inside: int, out: int, size: int = 3, stride: int = 1, groups: int = 1, bias: bool = False) -> nn.Module:
    convolution = nn.Conv2d(inside, out, size, stride, size // 2, groups=groups, bias=bias)
    return nn.Sequential(convolution, nn.BatchNorm2d(out))


class Excited(nn.Module):
    """Squeeze and excitation (Hu, Shen, Sun, CVPR 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Inverted(nn.Module):
    """An inverted residual (Sandler et al., CVPR 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.expand, self.depthwise = convolved(channels, wide, 1), convolved(wide, wide, groups=wide)
        self.excited, self.project = Excited(wide), convolved(wide, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.excited(F.hardswish(self.depthwise(self.expand(x)))))


class Mobile(nn.Module):
    """Convolution, BatchNorm, depthwise convolution, BatchNorm, with nothing in between; then down to single pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolved(3, 8, 3, 2, bias=True), convolved(8, 8, 1, groups=8), nn.ReLU6())
        self.down = nn.Sequential(*(convolved(8, 8, 3, 2, groups=8) for _ in range(3)))
        self.blocks = nn.Sequential(Inverted(8), Inverted(8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.down(self.stem(x))).mean((2, 3)))


class Inception(nn.Module):
    """Branches that are put together, and an auxiliary head (Szegedy et al., CVPR 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolved(3, 8, 3, 2), convolved(8, 8, 1, groups=8), nn.ReLU())
        self.narrow, self.wide = convolved(8, 4, 1), nn.Sequential(convolved(8, 4, 1), convolved(4, 4))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), convolved(8, 4, 1))
        self.side = nn.Sequential(convolved(12, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
        self.tail, self.head = nn.Sequential(convolved(12, 12, groups=12), nn.ReLU()), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        x = torch.cat([self.narrow(x), self.wide(x), self.pooled(x)], 1)
        return self.head(self.tail(x).mean((2, 3))), self.side(x)


class Hybrid(nn.Module):
    """Convolutions, then attention between what they found."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolved(3, 8, 3, 2), convolved(8, 8, 1, groups=8), convolved(8, 8, 3, 2))
        self.norm, self.all, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.all(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(x.mean(1))


class GPT(nn.Module):
    """Two blocks of attention, keys with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, 8), nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, norm_first=True) for _ in "12")
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.embed(tokens) + self.place.weight[: tokens.shape[1]]).transpose(0, 1)
        mask = torch.full((x.shape[0], x.shape[0]), -1e9, dtype=x.dtype).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.transpose(0, 1))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    first, *others = out if isinstance(out, tuple) else (out,)
    return F.cross_entropy(first, batch[1]) + sum(0.4 * F.cross_entropy(other, batch[1]) for other in others)


def images(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randn(samples, 3, SIDE, SIDE, generator=random)
    return pixels, torch.randint(0, CLASSES, (samples,), generator=random)


BATCHES = [images(7, seed) for seed in range(3)]
NETWORKS = {"mobile": Mobile, "inception": Inception, "hybrid": Hybrid}
PLANS = ["data=2", "data=3", "tensor=2", "pipeline=2,microbatches=3"]


@functools.cache
def training(network: str, plan: str) -> CompiledTraining:
    batch, compute = (models.tokens(7, 0), models.next_token) if network == "gpt" else (BATCHES[0], loss)
    objective, example = Objective("loss", compute, models.adamw), batch_in_float64(batch)
    return compile_training(model_of(network), {"loss": objective}, example, plan, in_float64=True, shared=True)


@functools.cache
def model_of(network: str) -> nn.Module:
    torch.manual_seed(0)
    return (GPT() if network == "gpt" else NETWORKS[network]()).double()


def verdict(network: str, plan: str, optimizer: Callable[..., Any] = models.adamw, steps: int = 3) -> Verdict:
    shared = training(network, plan)
    objective = replace(shared.objectives["loss"], optimizer=optimizer)
    batches = [models.tokens(7, seed) for seed in range(3)] if network == "gpt" else BATCHES
    return verify_compiled(replace(shared, objectives={"loss": objective}), batches[:steps])


OPTIMIZERS = {"adamw": models.adamw, "sgd": models.sgd}


@pytest.mark.parametrize(
    ("trained", "plan"),
    subsets.one_in(2, subsets.pairs([f"{n} {o}" for n in NETWORKS for o in OPTIMIZERS], PLANS), several=True),
)
def test_equal_plans_are_equal(trained: str, plan: str) -> None:
    network, optimizer = trained.split()
    result = verdict(network, plan, OPTIMIZERS[optimizer])
    assert result.passed and result.worst <= 1e-9, (result.worst, result.culprit)
    assert result.undetermined  # of each of them something is rounding
    assert result.culprit is None and result.replicas_equal


# ---- faults --------------------------------------------------------------------------------------------------------


def fails(network: str, plan: str, *words: str, steps: int = 2) -> None:
    """A fault is found, and where."""
    result = verdict(network, plan, steps=steps)
    assert not result.passed
    assert result.culprit is not None and all(word in result.culprit for word in words), result.culprit


def test_statistics_of_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    part = worker.SampleSlice
    monkeypatch.setattr(worker, "SampleSlice", lambda **fields: part(**{**fields, "sum_replicas": None}))
    fails("mobile", "data=2", "stem.0.1/batch_norm")


def test_running_statistics_that_move_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = TrainingRole._apply_update

    def spoiled(self: TrainingRole, *rest: Any) -> None:
        for name, buffer in self.held().items():
            if name == "down.1.1.running_var":
                buffer.lerp_(torch.ones_like(buffer), 0.1)
        finish(self, *rest)

    monkeypatch.setattr(TrainingRole, "_apply_update", spoiled)
    fails("mobile", "data=2", "the buffer down.1.1.running_var differs", "down.1.1/batch_norm")


def test_a_mean_that_is_rounding_and_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of what is normalized is zero but for rounding; 1e-8 is not."""
    finish = TrainingRole._apply_update

    def spoiled(self: TrainingRole, *rest: Any) -> None:
        self.held()["stem.1.1.running_mean"].add_(1e-8)
        finish(self, *rest)

    clean = verdict("mobile", "data=2", steps=1)
    assert clean.passed and "buffer stem.1.1.running_mean" in clean.undetermined
    monkeypatch.setattr(TrainingRole, "_apply_update", spoiled)
    fails("mobile", "data=2", "the buffer stem.1.1.running_mean differs", "stem.1.1/batch_norm", steps=1)


@pytest.mark.parametrize(
    ("network", "name"),
    subsets.one_in(
        3, [("mobile", "blocks.0.excited.up.weight"), ("mobile", "stem.0.0.bias"), ("gpt", "head.weight")], several=True
    ),
)
def test_a_gradient_that_is_off_in_the_second_step(monkeypatch: pytest.MonkeyPatch, network: str, name: str) -> None:
    finish = TrainingRole._apply_update

    def spoiled(self: TrainingRole, objective: str, *rest: Any) -> None:
        gradient = self._updates[objective].local_parameters[name].grad
        if self._step == 1 and gradient is not None:
            gradient += 1e-3 * (1 + gradient)
        finish(self, objective, *rest)

    monkeypatch.setattr(TrainingRole, "_apply_update", spoiled)
    fails(network, "data=2", f"that of {name}", "step 2")


@pytest.mark.parametrize("network", subsets.except_slow(["mobile", "gpt"], ["gpt"]))
def test_a_replica_whose_gradients_are_not_summed(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    init, wait = AllReducer.__init__, AllReducer.wait_bucket

    def without_the_last_bucket(self: AllReducer, buckets: tuple[lower.GradientBucket, ...], *rest: object) -> None:
        init(self, buckets[:-1], *rest)  # type: ignore[arg-type]
        self.bucket_names = tuple(bucket.name for bucket in buckets)

    monkeypatch.setattr(lower, "BUCKET_BYTES", 0)  # a bucket for each parameter
    monkeypatch.setattr(AllReducer, "__init__", without_the_last_bucket)
    monkeypatch.setattr(
        AllReducer, "wait_bucket", lambda self, name: wait(self, name) if name in self._launched else 0.0
    )
    first = next(iter(training(network, "data=2").main_partition.graph.parameters))
    fails(network, "data=2", "gradient", first)


@pytest.mark.parametrize("network", subsets.except_slow(["mobile", "gpt"], ["gpt"]))
def test_parts_weighted_alike(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    backward = worker.StageRunner.backward

    def mean_of_means(self: worker.StageRunner, i: int, gradients: dict[str, Tensor], seed: Tensor | None) -> Any:
        return backward(self, i, gradients, None if seed is None else torch.full_like(seed, 1 / 3))

    monkeypatch.setattr(worker.StageRunner, "backward", mean_of_means)
    fails(network, "pipeline=2,microbatches=3", "every forward value of step 1 agrees", "gradient")


@pytest.mark.parametrize("network", subsets.except_slow(["mobile", "gpt"], ["gpt"]))
def test_a_stale_memory_of_the_optimizer(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    finish = TrainingRole._apply_update

    def spoiled(self: TrainingRole, objective: str, *rest: Any) -> None:
        for state in self.optimizer_of(objective).state.values():
            state["exp_avg_sq"].zero_()
        finish(self, objective, *rest)

    monkeypatch.setattr(TrainingRole, "_apply_update", spoiled)
    fails(network, "tensor=2", "of step 2 agrees: what differs is an update", "exp_avg_sq")


@pytest.mark.parametrize("network", subsets.except_slow(["mobile", "gpt"], ["gpt"]))
def test_a_start_that_is_not_the_same(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    """Of the first step nothing is taken over from the reference."""
    init = Job.__init__

    def spoiled(self: Job, prepared: CompiledTraining, *args: Any, **options: Any) -> None:
        init(self, prepared, *args, **options)
        if self.world.rank == 1:
            with torch.no_grad():
                self.held()["head.weight"].mul_(1.001)

    monkeypatch.setattr(Job, "__init__", spoiled)
    fails(network, "data=2", "head/linear")


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.scale * model(batch[0]), batch[1])


@pytest.mark.parametrize("wrong", [False, True])
def test_parameters_of_a_loss(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    finish = TrainingRole._apply_update

    def spoiled(self: TrainingRole, objective: str, *rest: Any) -> None:
        finish(self, objective, *rest)
        with torch.no_grad():
            self.held()["loss.scale"].add_(1e-6)

    if wrong:
        monkeypatch.setattr(TrainingRole, "_apply_update", spoiled)
    torch.manual_seed(0)
    result = verify(nn.Linear(16, 4), Objective("loss", Scaled(), models.adamw), [models.vectors(7, 0)] * 2, "data=2")
    assert result.passed != wrong
    assert {d.name for d in result.deviations if d.worst > result.tolerance} == ({"loss.scale"} if wrong else set())
    assert not wrong or (result.culprit is not None and "an update, first that of loss.scale" in result.culprit)
