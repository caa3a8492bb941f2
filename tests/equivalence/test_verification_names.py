"""What a verdict names: values whose gradients differ, in the order of a backward pass; and replicas that go apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.operators.whole_batch_counts import WholeBatchStatistic
from polylane.graph.precision import to_float64
from polylane.placement.kernels import ring_attention as ring
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.sync import local_sgd
from polylane.verify.first_difference import find_differing_nodes
from polylane.verify.record import ComparedTraining
from polylane.verify.verify import Verdict, batch_in_float64, verify
from tests.mutants.proofs import MODELS, Proof, objective_of
from tests.support import subsets
from tests.support.workers.compiling import compile_training


def prepared(model: str, plan: str, loss: str = "mean") -> tuple[CompiledTraining, Any]:
    """A training by some plan, and a batch."""
    made, _, batch, _, classes = MODELS[model]
    torch.manual_seed(0)
    example = batch_in_float64(batch(7, classes, torch.Generator().manual_seed(1)))
    objective = objective_of(Proof(model, plan, loss=loss))
    return compile_training(to_float64(made(classes)), {"loss": objective}, example, plan, in_float64=True), example


EXACT = [
    ("gpt", "data=2,microbatches=4"),  # one replica has no sample of the last microbatch
    ("gpt", "pipeline=2,microbatches=3"),
    ("gpt", "tensor=2"),
    ("gpt", "data=2,sequence=2"),
    ("gpt", "[data=2|sequence=2,tensor=2],microbatches=2"),
    ("network", "data=3"),
    ("network", "tensor=2"),
    ("network", "sequence=2"),
    ("network", "data=2,pipeline=2,microbatches=2"),
]


@pytest.mark.parametrize(
    "exact", subsets.one_in(2, subsets.except_slow(EXACT, [EXACT[1], EXACT[2], EXACT[5], EXACT[7]]))
)
def test_of_exact_plans_the_gradient_of_every_value_agrees(exact: tuple[str, str]) -> None:
    """Or a verdict would name what is right."""
    model, plan = exact
    training, batch = prepared(model, plan)
    assert list(find_differing_nodes(ComparedTraining(training, [batch]), 0, backward=True)) == []


def verdict(model: str, plan: str, steps: int = 2) -> Verdict:
    made, _, batch, _, classes = MODELS[model]
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    batches = [batch(7, classes, random) for _ in range(steps)]
    return verify(made(classes), objective_of(Proof(model, plan)), batches, plan)


@pytest.mark.parametrize(
    "plan", subsets.one_in(3, ["data=2,servers=1", "data=2,servers=2", "data=2,servers=1,dedicated=yes"])
)
def test_an_optimizer_that_never_steps_is_not_asked_what_it_remembers(plan: str) -> None:
    """A worker where no server lives has an optimizer of its own, which stays as it was made."""
    assert verdict("gpt", plan).passed


def culprit(model: str, plan: str, steps: int = 2) -> str:
    found = verdict(model, plan, steps)
    assert not found.passed and found.culprit is not None
    return found.culprit


def test_the_operator_that_loses_a_gradient_not_the_tied_weight_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of words is the head too, which a backward pass meets first; its gradient is complete at the words."""
    backward = ring._AttentionFunction.backward

    def halved(ctx: Any, *grads: Tensor) -> Any:
        query, key, *others = backward(ctx, *grads)
        return (query, key / 2, *others)

    monkeypatch.setattr(ring._AttentionFunction, "backward", staticmethod(halved))
    said = culprit("gpt", "sequence=2")
    assert "the value of blocks.1/transpose" in said and "which blocks.1/scaled_dot_product_attention" in said


def test_a_gradient_that_is_halved_where_passes_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Executor._backward

    def halved(self: Executor, action: Any, state: Any) -> None:
        state.samples_in_mean *= 2
        plain(self, action, state)
        state.samples_in_mean /= 2

    monkeypatch.setattr(Executor, "_backward", halved)
    said = culprit("network", "data=2")
    assert "the first gradient" in said and "loss/" in said


def test_of_replicas_that_go_apart_the_first_whose_gradient_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Executor._backward

    def halved(self: Executor, action: Any, state: Any) -> None:
        own = state.samples_in_mean
        state.samples_in_mean = own * 2 if self.program.replica else own
        plain(self, action, state)
        state.samples_in_mean = own

    monkeypatch.setattr(Executor, "_backward", halved)
    said = culprit("network", "data=2,every=2")
    assert said.startswith("step 1 of replica 1: the first gradient that differs, from the loss backwards, is that of")
    assert "head/linear" in said


def test_replicas_that_agree_on_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = local_sgd.average_over_replicas

    def alike(tensors: Any, seen: Any, *rest: Any) -> Any:
        return plain(tensors, [1] * len(seen), *rest)

    monkeypatch.setattr(local_sgd, "average_over_replicas", alike)
    said = culprit("gpt", "data=2,every=2")
    assert said.startswith(
        "every update of step 2 agrees; what differs is what replicas agree on after it, first tokens"
    )


@pytest.mark.parametrize("model", subsets.one_in(2, ["gpt", "network"]))
def test_what_a_batch_counts_is_counted_by_other_code_than_the_plans(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean over labels is divided by each part's own number of them, in the plan and wherever its code is used."""
    monkeypatch.setattr(WholeBatchStatistic, "__call__", lambda self, part, own: own)
    assert culprit(model, "pipeline=2,microbatches=3").startswith("loss/whole_batch")
