"""A job whose replicas hold parts: weights, gradients and evaluation are whole; what travels is what theory says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polylane.errors import PolylaneError
from polylane.optim import LAMB
from polylane.program import lower
from polylane.runtime.job import Job
from polylane.runtime.stale_weights import allow_own_calls
from tests.support import subsets
from tests.support.workers.training import (
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

SHARDS = ("optimizer", "gradients", "parameters")
BATCHES = [batch_of(8, seed) for seed in range(3)]


@pytest.fixture(autouse=True)
def _many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "BUCKET_BYTES", 300)


@pytest.mark.parametrize("shard", subsets.one_in(3, SHARDS, first=2))
def test_what_a_user_asks_for_is_whole(shard: str) -> None:
    """Between steps, as often as is asked."""

    def work(job: Job) -> Any:
        seen = []
        for batch in BATCHES:
            job.step(batch)
            seen.append((job.state_dict(), job.whole_gradients(), job.evaluate(batch)))
        return seen

    results = workers(work, mlp(6, 8, 4), f"data=2,shard={shard}", optimizer=adamw)
    for count, batch in enumerate(BATCHES):
        expected = plainly(mlp(6, 8, 4), BATCHES[: count + 1], optimizer=adamw)
        model = mlp(6, 8, 4)
        model.load_state_dict(expected.state)
        for seen in results:
            state, gradients, loss = seen[count]
            assert_state(state, expected.state)
            assert_state(gradients, expected.gradients)  # type: ignore[arg-type]
            assert loss == pytest.approx(classify(model, batch).item(), rel=1e-10)


@pytest.mark.parametrize(
    ("plan", "ranks"), subsets.one_in(2, [("data=3", 3), ("data=4,within=2", 2)], first=1, several=True)
)
def test_who_holds_what(plan: str, ranks: int) -> None:
    elements = sum(p.numel() for p in mlp(6, 8, 8, 4).parameters())

    def work(job: Job) -> Any:
        job.step(BATCHES[0])
        states = sum(s["exp_avg"].numel() for s in job.optimizer.state.values())
        held = {name + job.worker.part_of(name): tensor.detach().clone() for name, tensor in job.worker.held().items()}
        with allow_own_calls():
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in job.model.parameters()}
        return held, states, sum(storages.values()) // 8

    for shard in SHARDS:
        results = workers(work, mlp(6, 8, 8, 4), f"{plan},shard={shard}", optimizer=adamw)
        for _, states, memory in results:
            assert abs(states - elements / ranks) <= 6  # one of each unit
            assert memory == elements if shard != "parameters" else memory <= 6
        seen: dict[str, Tensor] = {}
        for held, _, _ in results:
            for name, tensor in held.items():
                assert torch.equal(seen.setdefault(name, tensor), tensor)
        assert sum(tensor.numel() for tensor in seen.values()) == elements


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(torch.tanh(self.inner(x)).mean(1))
        return y


@pytest.mark.parametrize(
    ("plan", "shard"),
    subsets.one_in(
        3, [("data=2,microbatches=3", shard) for shard in SHARDS] + [("data=2,tensor=2", "parameters")], several=True
    ),
)
def test_batches_of_another_form_and_short_ones(plan: str, shard: str) -> None:
    def batch(samples: int, length: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(samples)
        x = torch.randn(samples, length, 6, generator=random, dtype=torch.float64)
        return x, torch.randint(0, 4, (samples,), generator=random)

    torch.manual_seed(0)
    model, batches = Sequences().double(), [batch(8, 3), batch(7, 5), batch(1, 3), batch(4, 5)]
    expected = plainly(model, batches, microbatches=3 if "micro" in plan else 1)
    for worker in trained(model, f"{plan},shard={shard}", batches):
        assert_same(worker, expected, 1e-9)


class Whichever(nn.Module):
    """Goes by its data, computes a part once more in the backward pass, and leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: torch.tanh(self.always(y)), x, use_reentrant=False)
        if x.sum().item() > 1e9:
            x = x + self.seldom(x)
        y: Tensor = self.last(x)
        return y


def leaf() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Whichever(), nn.Tanh(), nn.Linear(4, 4)).double()


@pytest.mark.parametrize("shard", subsets.one_in(3, SHARDS))
def test_the_users_own_python(shard: str) -> None:
    """A parameter without a gradient on any replica is left alone, as on one device: it does not decay."""
    expected = plainly(leaf(), BATCHES, optimizer=adamw, microbatches=2)
    assert torch.equal(expected.state["2.seldom.weight"], leaf().state_dict()["2.seldom.weight"])
    for worker in trained(leaf(), f"data=2,microbatches=2,shard={shard},per_sample=2", BATCHES, optimizer=adamw):
        assert_same(worker, expected, 1e-9)


def half(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0].float()), batch[1])


@pytest.mark.parametrize("shard", subsets.one_in(3, SHARDS, first=1))
def test_in_bfloat16_the_bits_are_those_of_whole_replicas(shard: str) -> None:
    options: dict[str, Any] = {"loss": half, "optimizer": adamw}
    (expected, _) = trained(mlp(6, 8, 8, 4).float(), "data=2,precision=bfloat16", BATCHES, **options)
    for worker in trained(mlp(6, 8, 8, 4).float(), f"data=2,precision=bfloat16,shard={shard}", BATCHES, **options):
        assert worker.losses == expected.losses
        assert all(torch.equal(value, expected.state[name]) for name, value in worker.state.items())


@pytest.mark.parametrize("shard", subsets.one_in(3, SHARDS, first=1))
def test_parameters_of_several_types(shard: str) -> None:
    def model() -> nn.Module:
        own = mlp(6, 8, 8, 4)
        own[2].float()
        own[1], own[3] = Cast(torch.float32), Cast(torch.float64)
        return own

    expected = plainly(model(), BATCHES, optimizer=adamw)
    for worker in trained(model(), f"data=2,shard={shard}", BATCHES, optimizer=adamw):
        assert_same(worker, expected, 1e-6)


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().to(self.dtype)


@pytest.mark.parametrize(
    ("plan", "shard"),
    subsets.one_in(
        2,
        [
            ("data=2", "optimizer"),
            ("data=4,within=2", "gradients"),
            ("data=2,pipeline=2,microbatches=2", "parameters"),
            ("data=2,tensor=2", "parameters"),
        ],
        first=1,
        several=True,
    ),
)
def test_norms_over_holders_of_flat_parts(plan: str, shard: str) -> None:
    def lamb(parameters: Any) -> torch.optim.Optimizer:
        return LAMB(list(parameters), lr=0.01)

    def work(job: Job) -> Any:
        losses = [job.step(batch).loss for batch in BATCHES]
        return losses, job.state_dict(), sum(p.numel() for group in job.optimizer.param_groups for p in group["params"])

    expected = plainly(mlp(6, 8, 8, 4), BATCHES, optimizer=lamb, microbatches=2 if "micro" in plan else 1)
    results = workers(work, mlp(6, 8, 8, 4), f"{plan},shard={shard}", optimizer=lamb)
    for losses, state, _ in results:
        assert losses == pytest.approx(expected.losses, rel=1e-9)
        assert_state(state, expected.state, 1e-9)
    held = [elements for *_, elements in results]
    assert max(held) - min(held) <= 6 or "tensor" in plan or "pipeline" in plan  # cut evenly, not by parameters


def test_an_optimizer_of_all_parameters_at_once_is_refused() -> None:
    class Together(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_div_(gradients, torch.stack(torch._foreach_norm(gradients)).norm().item())
            super().step()

    for shard in SHARDS:
        with pytest.raises(PolylaneError, match=r"Together looks at several parameters at once.*take shard out"):
            trained(mlp(6, 8, 4), f"data=2,shard={shard}", BATCHES, optimizer=lambda p: Together(list(p), lr=0.1))


def sent(job: Job) -> int:
    """Bytes of the second step."""
    job.step(BATCHES[0])
    before = sum(counters.sent for counters in job.worker.counters)
    job.step(BATCHES[1])
    return sum(counters.sent for counters in job.worker.counters) - before


@pytest.mark.parametrize("microbatches", subsets.one_in(2, [1, 2]))
def test_what_is_sent_is_what_theory_says(microbatches: int) -> None:
    """Of n bytes over p replicas, (p - 1) / p for each gathering and each scattering: twice a step for ZeRO-1 and, in
    one microbatch, ZeRO-2, as an all-reduce does; three times for ZeRO-3. Further microbatches scatter, and gather for
    both passes, once more."""
    model, replicas = mlp(6, 64, 64, 4), 2
    parameters = sum(p.nbytes for p in model.parameters())
    rounds = {"optimizer": 2, "gradients": 1 + microbatches, "parameters": 3 * microbatches}
    for shard, times in rounds.items():
        plan = f"data={replicas},microbatches={microbatches},shard={shard}"
        for given in workers(sent, model, plan, optimizer=sgd):
            theory = times * parameters * (replicas - 1) / replicas
            assert theory - 64 <= given <= theory + 1024, (shard, given, theory)


@pytest.mark.parametrize(
    "plan", subsets.one_in(3, ["data=3", "data=2,tensor=2", "data=2,pipeline=2,microbatches=2"], first=2)
)
def test_a_model_without_values_is_never_whole(plan: str) -> None:
    """Of a model on the meta device a worker keeps its part of each module as it gets its values."""

    def model() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def work(job: Job) -> Any:
        start = job.state_dict()
        return start, [job.step(batch).loss for batch in BATCHES], job.state_dict()

    ((begin, losses, end),) = workers(work, model(), "data=1,microbatches=2" if "micro" in plan else "data=1")
    for own_begin, own_losses, own_end in workers(work, model(), f"{plan},shard=parameters"):
        assert_state(own_begin, begin)
        assert own_losses == pytest.approx(losses, rel=1e-9)
        assert_state(own_end, end, 1e-9)


def test_a_timeline_has_the_bytes_that_were_handed_over() -> None:
    """A scattering is handed all that it sums, a gathering the part that this worker has."""
    model = mlp(6, 64, 64, 4)
    whole = sum(p.nbytes for p in model.parameters())
    for shard, gathered in (("optimizer", 1), ("gradients", 1), ("parameters", 2)):
        for timeline in workers(lambda job: job.step(BATCHES[0]).timeline, model, f"data=2,shard={shard}"):
            for given in timeline.sent():
                assert abs(given - whole - gathered * whole / 2) <= 64


class Tokens(nn.Module):
    """Its first layer refuses what is no token, while the next unit is on its way already."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.inner, self.last = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.inner(self.token(tokens))).mean(1))
        return y


def test_a_pass_that_fails_leaves_no_unit_whole() -> None:
    def batch(samples: int, highest: int = 12) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(samples * 3).view(samples, 3) % (highest + 1)
        return tokens, torch.arange(samples) % 4

    def work(job: Job) -> Any:
        job.step(batch(8))
        job.evaluate(batch(8))  # a first batch is captured as well, and that is where it would fail
        for attempt in (job.evaluate, job.step):
            with pytest.raises(PolylaneError, match="past what the model has"):
                attempt((torch.full((8, 3), 99), batch(8)[1]))
            with allow_own_calls():
                parameters = [p.untyped_storage() for p in job.model.parameters()]
                storages = {memory.data_ptr(): memory.nbytes() for memory in parameters}
            assert sum(storages.values()) <= 8 * 6
        return job.evaluate(batch(8)), job.step(batch(8)).loss, job.state_dict()

    torch.manual_seed(0)
    model = Tokens().double()
    expected = plainly(model, [batch(8), batch(8)])
    for evaluated, loss, state in workers(work, model, "data=2,shard=parameters", example=batch(8)):
        assert evaluated == pytest.approx(loss, rel=1e-10) == pytest.approx(expected.losses[1], rel=1e-10)
        assert_state(state, expected.state)
