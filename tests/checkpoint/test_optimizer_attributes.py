"""What an optimizer keeps beside its state goes into checkpoints, and on with every plan that it trains by."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from training import assert_state, batch_of, mlp, plainly, workers

BATCHES = [batch_of(8, seed) for seed in range(5)]


class Lookahead(torch.optim.Optimizer):
    """Slow weights every second step, in a list beside the groups (Zhang et al., 2019)."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.calls = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        self.calls += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True) if self.calls % 2 == 0 else ():
            for p, s in zip(group["params"], slow, strict=True):
                p.copy_(s.lerp_(p, 0.5))


class Averages(torch.optim.SGD):
    """Moves with a mean of the weights by id, bounded by a history of norms, with noise of its own generator."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.mean = {id(p): p.detach().clone() for p in self.param_groups[0]["params"]}
        self.norms, self.noise = deque[float](maxlen=3), torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        own = self.param_groups[0]["params"]
        self.norms.append(float(torch.stack([p.grad.norm() for p in own]).norm()))
        torch.nn.utils.clip_grad_norm_(own, min(self.norms))
        super().step(closure)
        for p in own:
            p.add_(torch.randn(p.shape, generator=self.noise, dtype=p.dtype), alpha=0.01)
            p.lerp_(self.mean[id(p)].lerp_(p, 0.1), 0.2)


class MeansById(torch.optim.SGD):
    """An average of the weights by id, for which each stage has its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.mean = {id(p): p.detach().clone() for p in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.lerp_(self.mean[id(p)].lerp_(p, 0.1), 0.2)


def lookahead(named: Any) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9))


def averages(named: Any) -> torch.optim.Optimizer:
    return Averages([p for _, p in named])


def means(named: Any) -> torch.optim.Optimizer:
    return MeansById([p for _, p in named])


@pytest.mark.parametrize(
    ("optimizer", "plan", "after"),
    [
        (lookahead, "data=2", "data=1"),
        (averages, "data=1", "data=2"),
        (means, "pipeline=2,microbatches=2", "data=2"),
        pytest.param(lookahead, "tensor=2", "data=2", marks=pytest.mark.slow),
        pytest.param(averages, "tensor=2", "tensor=2", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_with_what_the_optimizer_has_kept(
    optimizer: Any, plan: str, after: str, tmp_path: Path
) -> None:
    def work(job: Job) -> Any:
        for batch in BATCHES[:3]:
            job.step(batch)
        job.save_checkpoint(tmp_path)
        for batch in BATCHES[3:]:
            job.step(batch)
        return job.state_dict()

    def resumed(job: Job) -> Any:
        job.load_checkpoint(tmp_path)
        for batch in BATCHES[3:]:
            job.step(batch)
        return job.state_dict()

    reference = plainly(mlp(6, 8, 4), BATCHES, optimizer=optimizer).state
    results = workers(work, mlp(6, 8, 4), plan, optimizer=optimizer)
    for state in (*results, *workers(resumed, mlp(6, 8, 4), after, optimizer=optimizer)):
        assert_state(state, reference)


@pytest.mark.parametrize("optimizer", [lookahead, means])
def test_tensors_that_no_shard_finds_are_refused(optimizer: Any) -> None:
    with pytest.raises(PolylaneError, match=r"keeps tensors for its parameters in self\.(slow|mean), where no plan"):
        workers(lambda job: None, mlp(6, 8, 4), "data=2,shard=parameters", optimizer=optimizer)


def test_what_only_a_step_makes_is_missed(tmp_path: Path) -> None:
    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            vars(self).setdefault("seen", torch.zeros(())).add_(1)
            return super().step(closure)

    def work(job: Job) -> None:
        job.step(BATCHES[0])
        job.save_checkpoint(tmp_path)

    def resumed(job: Job) -> str:
        with pytest.raises(PolylaneError, match="has seen of the Late, which makes it in a step") as caught:
            job.load_checkpoint(tmp_path)
        return str(caught.value)

    for run in (work, resumed):
        workers(run, mlp(6, 4), "data=1", optimizer=lambda named: Late([p for _, p in named], lr=0.1))
