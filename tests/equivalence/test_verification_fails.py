"""Verification can fail: every fault that a runtime might have is found, and the culprit named makes sense."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_graph import compile_graph
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.graph.partition import Partition
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.spec import parse
from polylane.program import lower
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.pipeline import executor as worker
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.step_result import StepState
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.training_role import TrainingRole
from polylane.schedule.action import Action
from polylane.sharding.stage_layouts import StageLayouts
from polylane.verify.verify import Verdict, batch_in_float64, verify_compiled
from tests.support import models, subsets
from tests.support.workers.compiling import compile_training


class Model(nn.Module):
    """A skip over all of the middle, a tied weight at both ends, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8, bias=False)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.norm(self.middle(x))
        y = self.out(self.dropout(y) + x)
        return y @ self.embed.weight


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


BATCHES = [models.vectors(samples, seed, size=6) for seed, samples in enumerate((9, 8))]


@pytest.fixture(scope="module")
def training() -> tuple[CompiledTraining, Partition]:
    torch.manual_seed(0)
    objective = Objective("loss", loss, models.sgd)
    prepared = compile_training(
        Model().double(),
        {"loss": objective},
        batch_in_float64(BATCHES[0]),
        "pipeline=3,microbatches=2",
        in_float64=True,
    )
    # By module, so that the skip crosses both cuts, whatever was measured.
    position = {node.module: i for i, node in reversed(list(enumerate(prepared.main_partition.graph.nodes)))}
    return prepared, Partition(prepared.main_partition.graph, (position["middle.0"], position["norm"]))


def verdict(training: tuple[CompiledTraining, Partition], plan: str) -> Verdict:
    shared, partition = training
    spec = parse(plan)
    if spec.pipeline == 1:
        partition = Partition(partition.graph, ())
    chosen = plan_from_partition(partition, spec, spec.microbatches or 1)
    graph = compile_graph(partition, chosen, StageLayouts((None,) * chosen.pipeline), {})
    return verify_compiled(replace(shared, graphs={"loss": graph}, plan=chosen), BATCHES)


def culprit_of(training: tuple[CompiledTraining, Partition], plan: str) -> str:
    result = verdict(training, plan)
    assert not result.passed and result.worst > 1e-6
    assert result.culprit is not None
    return result.culprit


@pytest.mark.parametrize("plan", subsets.one_in(2, ["data=2,microbatches=2", "pipeline=3,microbatches=2"]))
def test_without_a_fault_it_passes(training: tuple[CompiledTraining, Partition], plan: str) -> None:
    result = verdict(training, plan)
    assert result.passed and result.culprit is None and result.replicas_equal


def test_a_skip_without_its_gradient(
    training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The skip leaves stage 0 for two stages: the later gradient takes the place of the sum."""
    receive = Executor._receive

    def forgetful(self: Executor, action: Action, state: StepState) -> None:
        if action.gradient and action.value is not None and action.microbatch is not None:
            state.gradients.setdefault((action.stage, action.microbatch), {}).pop(action.value, None)
        receive(self, action, state)

    monkeypatch.setattr(Executor, "_receive", forgetful)
    culprit = culprit_of(training, "pipeline=3,microbatches=2")
    assert "every forward value of step 1 agrees" in culprit and "first gradient" in culprit
    assert "the value of embed/linear" in culprit


def test_a_replica_with_another_weight(
    training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = LocalModel.__init__

    def forget(self: LocalModel, *args: Any, **options: Any) -> None:
        hold(self, *args, **options)
        if self.world.rank == 1:
            with torch.no_grad():
                self.prepared.model.get_parameter("middle.2.weight").mul_(1.001)

    monkeypatch.setattr(LocalModel, "__init__", forget)
    result = verdict(training, "data=2,microbatches=2")
    assert not result.passed and not result.replicas_equal
    assert result.culprit is not None and result.culprit.startswith("middle.2/linear")


def test_a_tied_weight_that_is_not_summed(
    training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = lower.build_buckets

    def apart(cut: Partition, plan: object, *others: object) -> tuple[object, ...]:
        return tuple(b for b in buckets(cut, plan, *others) if not b.name.startswith("tied"))  # type: ignore[arg-type]

    monkeypatch.setattr(lower, "build_buckets", apart)
    result = verdict(training, "pipeline=3,microbatches=2")
    assert not result.passed and not result.replicas_equal
    assert result.culprit is not None and "first gradient" in result.culprit and "embed.weight" in result.culprit


def test_gradients_that_are_not_reduced(
    training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    init = AllReducer.__init__

    def without_the_last_bucket(self: AllReducer, buckets: tuple[lower.GradientBucket, ...], *rest: object) -> None:
        init(self, buckets[:-1], *rest)  # type: ignore[arg-type]
        self.bucket_names = tuple(bucket.name for bucket in buckets)

    monkeypatch.setattr(lower, "BUCKET_BYTES", 0)  # a bucket for each parameter
    monkeypatch.setattr(AllReducer, "__init__", without_the_last_bucket)
    wait = AllReducer.wait_bucket
    monkeypatch.setattr(
        AllReducer, "wait_bucket", lambda self, name: wait(self, name) if name in self._launched else 0.0
    )
    result = verdict(training, "data=2,microbatches=2")
    assert not result.passed and not result.replicas_equal
    assert result.culprit is not None and "embed.weight" in result.culprit  # first used, so last reduced


def test_parts_weighted_alike_whatever_their_size(
    training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of the means: right for equal parts only."""
    backward = worker.StageRunner.backward

    def mean_of_means(self: worker.StageRunner, i: int, gradients: dict[str, Tensor], seed: Tensor | None):
        return backward(self, i, gradients, None if seed is None else torch.full_like(seed, 0.25))

    monkeypatch.setattr(worker.StageRunner, "backward", mean_of_means)
    culprit = culprit_of(training, "data=2,microbatches=2")
    assert "every forward value of step 1 agrees" in culprit and "gradient" in culprit


def _part_with(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    part = worker.SampleSlice

    def changed(**fields: object) -> object:
        own = {name: value(fields[name]) if callable(value) else value for name, value in changes.items()}
        return part(**{**fields, **own})  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "SampleSlice", changed)


def test_dropout_keyed_by_rank(training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch) -> None:
    _part_with(monkeypatch, seed=lambda seed: seed + int(multiprocessing.current_process().name[-1]))
    for plan in ("data=2,microbatches=2", "pipeline=3,microbatches=2"):
        assert culprit_of(training, plan).startswith("dropout/dropout")


def test_dropout_that_ignores_the_samples_place(
    training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    _part_with(monkeypatch, first=0)
    assert culprit_of(training, "data=2,microbatches=1").startswith("dropout/dropout")


def test_batch_norm_with_local_statistics(
    training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    _part_with(monkeypatch, sum_replicas=None)
    assert culprit_of(training, "data=2,microbatches=2").startswith("norm/batch_norm")


def test_an_optimizer_that_steps_twice(
    training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = TrainingRole._apply_update

    def twice(self: TrainingRole, objective: str, *rest: object) -> None:
        finish(self, objective, *rest)  # type: ignore[arg-type]
        self.optimizer_of(objective).step()

    monkeypatch.setattr(TrainingRole, "_apply_update", twice)
    assert "what differs is an update" in culprit_of(training, "data=2,microbatches=2")


def test_a_nan_never_passes(training: tuple[CompiledTraining, Partition], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = worker.StageRunner.forward

    def poisoned(self: worker.StageRunner, i: int, *rest: object):
        live = forward(self, i, *rest)  # type: ignore[arg-type]
        return replace(live, loss=tuple(value * float("nan") for value in live.loss))

    monkeypatch.setattr(worker.StageRunner, "forward", poisoned)
    result = verdict(training, "data=2,microbatches=2")
    assert not result.passed


def test_verification_leaves_the_model_alone(training: tuple[CompiledTraining, Partition]) -> None:
    model = training[0].model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verdict(training, "data=2,microbatches=2")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
