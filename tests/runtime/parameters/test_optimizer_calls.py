"""What is called of an optimizer besides step(): train() and eval(); and the generators that it draws from."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.graph.python_state.random_generators import generator_states, seeded, states_equal
from polylane.runtime.job import Job
from polylane.verify.verify import verify_compiled
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import assert_state, batch_of, classify, mlp, plainly, workers

BATCHES = [batch_of(samples, seed) for seed, samples in enumerate((8, 7, 5))]
PIPELINE = "pipeline=2,microbatches=2"
SLOW = [pytest.param(plan, marks=pytest.mark.slow) for plan in (PIPELINE, "data=2,shard=parameters")]


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024): what is trained lies between two sequences of weights."""

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], {"lr": 0.1, "beta": 0.9, "k": 0, "training": False})

    def eval(self) -> None:
        self._exchange(False, lambda beta: 1 - 1 / beta)

    def train(self) -> None:
        self._exchange(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def _exchange(self, training: bool, weight: Any) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["training"] is not training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["training"], "not in train mode"
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Loop(ScheduleFree):
    """Calls what a user of such an optimizer calls in a plain loop."""

    def step(self, closure: Any = None) -> None:
        self.train()
        super().step()


@functools.cache
def on_one_device() -> tuple[dict[str, torch.Tensor], float]:
    """The weights of the end, and their loss on the first batch."""
    built: list[Loop] = []

    def build(named: Any) -> Loop:
        built.append(Loop(named))
        return built[-1]

    state, model = plainly(mlp(6, 8, 8, 4), BATCHES, optimizer=build).state, mlp(6, 8, 8, 4)
    before = {name: value.clone() for name, value in state.items()}
    built[0].eval()
    assert not all(torch.equal(before[name], value) for name, value in state.items())
    model.load_state_dict(state)
    return state, classify(model, BATCHES[0]).item()


@pytest.mark.parametrize("plan", ["data=2", "data=2,shard=optimizer", *SLOW])
def test_weights_are_exchanged_before_they_are_evaluated_and_saved(plan: str, tmp_path: Path) -> None:
    def work(job: Job) -> Any:
        for batch in BATCHES[:2]:
            job.step(batch)
            job.evaluate(batch)
        job.save_checkpoint(tmp_path)
        job.step(BATCHES[2])
        return job.evaluate(BATCHES[0]), job.state_dict()

    def resumed(job: Job) -> Any:
        job.load_checkpoint(tmp_path)
        job.step(BATCHES[2])
        return job.evaluate(BATCHES[0]), job.state_dict()

    state, loss = on_one_device()
    results = workers(work, mlp(6, 8, 8, 4), plan, optimizer=ScheduleFree, evaluates=True)
    if plan == "data=2":
        results += workers(resumed, mlp(6, 8, 8, 4), PIPELINE, optimizer=ScheduleFree, evaluates=True)
    for evaluated, saved in results:
        assert_state(saved, state)
        assert evaluated == pytest.approx(loss, rel=1e-10)


def test_verify_exchanges_weights_too() -> None:
    objectives = build_objectives(classify, ScheduleFree, None)
    prepared = compile_training(mlp(6, 8, 4), objectives, BATCHES[0], "pipeline=2,microbatches=2", in_float64=True)
    verdict = verify_compiled(prepared, BATCHES)
    assert verdict.passed and verdict.worst < 1e-9


@pytest.mark.parametrize("plan", ["data=2,every=2", "data=2,servers=1"])
def test_exchanged_weights_are_not_handed_on(plan: str) -> None:
    with pytest.raises(
        PolylaneError, match=r"ScheduleFree.train\(\) and eval\(\) exchange the weights.*(every|servers)="
    ):
        compile_training(mlp(6, 4), build_objectives(classify, ScheduleFree, None), BATCHES[0], plan)


# Noise ----------------------------------------------------------------------------------------------------------------


class Noisy(torch.optim.SGD):
    """Langevin dynamics, by all generators."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p) + random.gauss(0, 1), alpha=0.01)


def noisy(named: Any) -> torch.optim.Optimizer:
    return Noisy([p for _, p in named], lr=0.1)


@pytest.mark.parametrize("plan", ["data=2", pytest.param("tensor=2", marks=pytest.mark.slow)])
def test_replicas_draw_the_same_noise_whatever_their_scripts_have_drawn(plan: str) -> None:
    def spoil(job: Job) -> bool:
        torch.manual_seed(job.world.rank)
        random.seed(job.world.rank)
        before = generator_states()
        job.step(BATCHES[0])
        return states_equal(before, generator_states())

    def work(job: Job) -> Any:
        return [spoil(job) for _ in BATCHES], job.state_dict()

    (alone,) = workers(work, mlp(6, 8, 4), "data=1", optimizer=noisy)
    for same, state in workers(work, mlp(6, 8, 4), plan, optimizer=noisy):
        assert all(same)
        assert_state(state, alone[1])
    calm = plainly(
        mlp(6, 8, 4), BATCHES[:1] * 3, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    )
    assert not torch.allclose(alone[1]["0.weight"], calm.state["0.weight"], atol=1e-3)


def test_verify_draws_the_same_noise() -> None:
    objectives = build_objectives(classify, noisy, None)
    prepared = compile_training(mlp(6, 4), objectives, BATCHES[0], "data=2", in_float64=True)
    assert verify_compiled(prepared, BATCHES, seed=3).passed


def test_seeding_leaves_no_trace() -> None:
    before = generator_states()
    with seeded(1, 2):
        first = torch.randn(3), random.random()
    with seeded(1, 2):
        assert torch.equal(torch.randn(3), first[0]) and random.random() == first[1]
    assert states_equal(before, generator_states())
