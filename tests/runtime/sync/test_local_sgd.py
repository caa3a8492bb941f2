"""Replicas that train alone and then average equal the same done by hand in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.speed import stragglers
from benchmarks.speed.stragglers import Straggler, slow_down
from polylane.auto.parallelize import parallelize
from polylane.compile.objectives import Objective
from polylane.compile.sample_shares import compute_shares
from polylane.errors import PolylaneError
from polylane.plan.spec import parse
from polylane.verify.verify import verify
from tests.support import subsets
from tests.support.workers.training import (
    Trained,
    adamw,
    assert_same,
    assert_state,
    batch_of,
    classify,
    mlp,
    plainly,
    sgd,
    trained,
    workers,
)


def mean_of(models: Sequence[nn.Module], weights: Sequence[float]) -> dict[str, Tensor]:
    states = [model.state_dict() for model in models]
    return {
        name: sum(weight * state[name] for weight, state in zip(weights, states, strict=True))
        if states[0][name].is_floating_point()
        else states[0][name]
        for name in states[0]
    }


def simulated(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    replicas: int,
    every: int,
    *,
    warmup: int = 0,
    outer: tuple[float, float] | None = None,
    optimizer: Any = sgd,
    loss: Any = classify,
    clip_norm: float | None = None,
    microbatches: int = 1,
) -> Trained:
    """Local SGD, written out: a copy of the model for each replica, in one process."""
    models = [copy.deepcopy(model) for _ in range(replicas)]
    steps = [optimizer(list(each.named_parameters())) for each in models]
    seen, losses = [0] * replicas, []
    anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in anchor.items()}
    for number, batch in enumerate(batches):
        samples, total = len(batch[1]), 0.0
        for replica, each in enumerate(models):
            own = [s for s in compute_shares(samples, microbatches, replicas, replica) if s.weight]
            count = sum(share.samples for share in own)
            over = samples if number < warmup else count
            each.zero_grad()
            for share in own:
                value = loss(each, tuple(leaf[share.start : share.stop] for leaf in batch))
                (value * share.samples / over).backward()
                total += value.item() * share.samples
            seen[replica] += count
        losses.append(total / samples)
        if number < warmup:
            for parameters in zip(*(m.parameters() for m in models), strict=True):
                grad = sum(p.grad for p in parameters if p.grad is not None)
                for parameter in parameters:
                    parameter.grad = grad.clone()
        for each, step, count in zip(models, steps, seen, strict=True):
            if count or number < warmup:
                if clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(each.parameters(), clip_norm)
                step.step()
        if number < warmup:
            seen = [0] * replicas
            anchor = {name: p.detach().clone() for name, p in models[0].named_parameters()}
        elif (number + 1 - warmup) % every == 0:
            mean = mean_of(models, [count / sum(seen) for count in seen])
            if outer is not None:
                rate, momentum = outer
                for name in anchor:
                    delta = anchor[name] - mean[name]
                    velocity[name] = momentum * velocity[name] + delta
                    anchor[name] = anchor[name] - rate * (delta + momentum * velocity[name])
                    mean[name] = anchor[name]
            for each in models:
                each.load_state_dict(mean)
            seen = [0] * replicas
    shares_of = [count / sum(seen) for count in seen] if sum(seen) else [1.0] + [0.0] * (replicas - 1)
    return Trained(losses, mean_of(models, shares_of))


BATCHES = [batch_of(8, seed=i) for i in range(7)]


@pytest.mark.parametrize(
    "plan", subsets.one_in(2, ["data=2", "data=3", "data=2,pipeline=2,microbatches=2", "data=2,tensor=2"])
)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_local_sgd(plan: str, optimizer: Any) -> None:
    spec = parse(plan)
    expected = simulated(mlp(6, 8, 4), BATCHES, spec.data, 3, optimizer=optimizer, microbatches=spec.microbatches or 1)
    for worker in trained(mlp(6, 8, 4), f"{plan},every=3", BATCHES, optimizer=optimizer):
        assert_same(worker, expected)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("every=2,warmup=3", {"every": 2, "warmup": 3}),
        ("every=2,outer=0.7:0.9", {"every": 2, "outer": (0.7, 0.9)}),
        ("every=3,warmup=1,outer=0.5:0.8", {"every": 3, "warmup": 1, "outer": (0.5, 0.8)}),
        ("every=100", {"every": 100}),
    ],
)
def test_its_family(words: str, options: dict[str, Any]) -> None:
    expected = simulated(mlp(6, 8, 4), BATCHES, 2, clip_norm=0.5, **options)
    for worker in trained(mlp(6, 8, 4), f"data=2,{words}", BATCHES, clip_norm=0.5):
        assert_same(worker, expected)


def test_batches_that_do_not_divide_count_each_sample_alike() -> None:
    batches = [batch_of(n, seed=n) for n in (7, 5, 1, 4, 3)]
    expected = simulated(mlp(6, 8, 4), batches, 3, 2)
    for worker in trained(mlp(6, 8, 4), "data=3,every=2", batches, example=batch_of(8)):
        assert_same(worker, expected)


def test_running_statistics_are_averaged() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()

    expected = simulated(model(), BATCHES, 2, 3)
    for worker in trained(model(), "data=2,every=3", BATCHES):
        assert_same(worker, expected)


def test_steps_before_the_warmup_ends_are_those_of_one_device() -> None:
    expected = plainly(mlp(6, 8, 4), BATCHES)
    assert_same(trained(mlp(6, 8, 4), "data=2,every=4,warmup=7", BATCHES)[0], expected)


def test_evaluation_and_weights_between_agreements_are_the_means_and_change_nothing() -> None:
    def work(job: Any) -> Trained:
        losses, seen = [], []
        for batch in BATCHES:
            losses.append(job.step(batch).loss)
            seen.append((job.evaluate(batch), job.state_dict()))
        return Trained(losses, job.state_dict(), seen)

    expected = simulated(mlp(6, 8, 4), BATCHES, 2, 3)
    for worker in workers(work, mlp(6, 8, 4), "data=2,every=3"):
        assert_same(worker, expected)
        for count, (loss, state) in enumerate(worker.extra, start=1):
            partial = simulated(mlp(6, 8, 4), BATCHES[:count], 2, 3).state
            assert_state(state, partial)
            model = mlp(6, 8, 4)
            model.load_state_dict(partial)
            assert loss == pytest.approx(classify(model, BATCHES[count - 1]).item(), rel=1e-10)


def test_only_samples_that_do_not_meet() -> None:
    def contrastive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores = model(batch[0])
        return torch.nn.functional.cross_entropy(scores @ scores.t(), torch.arange(len(scores)))

    with pytest.raises(PolylaneError, match="samples meet"):
        trained(mlp(6, 8, 4), "data=2,every=2", BATCHES, loss=contrastive)


def test_stages_with_as_many_replicas() -> None:
    with pytest.raises(PolylaneError, match="needs as many replicas of every stage"):
        trained(mlp(6, 8, 4), "[data=2 | 1],every=2", BATCHES)


def test_stragglers_change_no_numbers_and_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as long, in every second step: what rank 1 sleeps is 99 times what it worked."""
    slept = list[float]()
    monkeypatch.setattr(stragglers.time, "sleep", slept.append)

    def work(job: Any) -> tuple[Trained, list[tuple[float, ...]]]:
        losses, seen = [], list[tuple[float, ...]]()
        slept.clear()  # of waiting for the others at the start
        for batch in BATCHES[:4]:
            losses.append(job.step(batch).loss)
            seen.append(tuple(slept))
            slept.clear()
        return Trained(losses, job.state_dict()), seen

    expected = simulated(mlp(6, 8, 4), BATCHES[:4], 2, 2)
    with slow_down({1: Straggler(100, 2)}):
        (first, fast), (second, slow) = workers(work, mlp(6, 8, 4), "data=2,every=2")
    assert_same(first, expected)
    assert_same(second, expected)
    assert fast == [(), (), (), ()]
    assert [len(each) for each in slow] == [0, 2, 0, 2]  # a forward and a backward pass
    assert all(seconds > 0 for each in slow for seconds in each)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def test_a_short_batch_has_as_many_samples_as_each_replica_needs() -> None:
    """A batch of 5 is divided into one microbatch, not two: so its replicas have 3 and 2 samples, and 3 and 2 count."""
    batches = [batch_of(n, seed=n) for n in (8, 5, 8, 5)]
    verdict = verify(normed(), Objective("loss", classify, sgd), batches, "data=2,microbatches=2,every=4")
    assert verdict.passed and verdict.rule == "every=4", verdict.worst


def test_a_batch_that_is_too_short_for_each_replica() -> None:
    with pytest.raises(PolylaneError, match="needs 2 samples at once in training in each of 4 replicas"):
        trained(normed(), "data=4,every=2", [batch_of(8), batch_of(5)], example=batch_of(8))


@pytest.mark.parametrize("words", ["every=2", "shard=parameters,within=2", "servers=2,staleness=1"])
def test_alone_there_is_nobody_to_agree_with(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    expected = plainly(mlp(6, 8, 4), BATCHES[:3])
    model = mlp(6, 8, 4)
    with parallelize(model, classify, sgd, example=BATCHES[0], plan=f"data=4,{words}", alone=True) as job:
        losses = [job.step(batch).loss for batch in BATCHES[:3]]
        assert_same(Trained(losses, job.state_dict()), expected)
