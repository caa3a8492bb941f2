"""What an optimizer keeps beside its state goes into checkpoints, and on with every plan that it trains by."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from tests.support.workers.training import assert_state, batch_of, mlp, plainly, workers

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


class InFirstStep(torch.optim.Optimizer):
    """Momenta that the first step makes, in a way of its own."""

    def __init__(self, parameters: Any, way: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.way, self.momenta = way, None

    def find_momenta(self) -> list[torch.Tensor]:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        made = [torch.zeros_like(p) for p in own]
        if self.way == "option":
            return [
                m
                for g in self.param_groups
                for m in g.setdefault("momenta", [torch.zeros_like(p) for p in g["params"]])
            ]
        if self.momenta is None:
            by_group = [[torch.zeros_like(p) for p in group["params"]] for group in self.param_groups]
            ways: dict[str, Any] = {
                "list": made,
                "tuple": tuple(made),
                "groups": by_group,
                "ids": {id(p): m for p, m in zip(own, made, strict=True)},
                "parameters": dict(zip(own, made, strict=True)),
                "states": [{"momentum": m, "steps": 0} for m in made],
                "numbers": dict(enumerate(made)),
                "numbers from 1": dict(enumerate(made, 1)),
            }
            self.momenta = ways[self.way]
        kept: Any = list(self.momenta.values()) if isinstance(self.momenta, dict) else self.momenta
        if self.way == "groups":
            return [m for each in kept for m in each]
        return [each["momentum"] if self.way == "states" else each for each in kept]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, m in zip(own, self.find_momenta(), strict=True):
            p.sub_(m.mul_(0.9).add_(p.grad), alpha=0.1)


class Around(torch.optim.Optimizer):
    """Steps an optimizer inside, whose state it does not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inside = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


def around(named: Any) -> torch.optim.Optimizer:
    return Around([p for _, p in named])


def in_first_step(way: str) -> Any:
    def build(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        return InFirstStep([{"params": [p for n, p in named if ("bias" in n) == bias]} for bias in (True, False)], way)

    return build


def lookahead(named: Any) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9))


def averages(named: Any) -> torch.optim.Optimizer:
    return Averages([p for _, p in named])


def means(named: Any) -> torch.optim.Optimizer:
    return MeansById([p for _, p in named])


@pytest.mark.parametrize(
    ("optimizer", "plan", "after"),
    [
        pytest.param(lookahead, "data=2", "data=1", marks=pytest.mark.slow),
        (averages, "data=1", "data=2"),
        pytest.param(means, "pipeline=2,microbatches=2", "data=2", marks=pytest.mark.slow),
        (lookahead, "data=2,servers=1", "data=1"),
        (in_first_step("list"), "pipeline=2,microbatches=2", "tensor=2"),
        (in_first_step("option"), "tensor=2", "data=2,shard=parameters"),
        (in_first_step("states"), "data=2,shard=parameters", "data=1"),
        pytest.param(in_first_step("groups"), "data=1", "pipeline=2,microbatches=2", marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (around, "data=2", "pipeline=2,microbatches=2"),
                (in_first_step("ids"), "data=2,servers=2", "data=2,shard=optimizer"),
                (in_first_step("parameters"), "data=2,shard=optimizer", "pipeline=2,microbatches=2"),
                (in_first_step("tuple"), "data=2,shard=gradients", "data=2,servers=2"),
                (in_first_step("option"), "pipeline=2,microbatches=2", "data=2"),
                (in_first_step("list"), "data=2,servers=2", "data=2,servers=1"),
                (in_first_step("numbers"), "pipeline=2,microbatches=2", "data=2"),
            ]
        ),
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


class Late(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        vars(self).setdefault("seen", torch.zeros(())).add_(1)
        vars(self).setdefault("history", deque[Any](maxlen=2)).append(self.seen.clone())
        return super().step(closure)


def test_what_a_step_has_made_since_is_made_again(tmp_path: Path) -> None:
    def work(job: Job) -> None:
        job.step(BATCHES[0])
        job.save_checkpoint(tmp_path)

    def resumed(job: Job) -> None:
        (own,) = job.worker.stepping()
        for number in range(3):
            if number:
                job.step(BATCHES[0])
            job.load_checkpoint(tmp_path)
            made: Any = own.optimizer
            assert (made.seen.item(), [each.item() for each in made.history], made.history.maxlen) == (1, [1], 2)

    for run in (work, resumed):
        workers(run, mlp(6, 4), "data=1", optimizer=lambda named: Late([p for _, p in named], lr=0.1))


def test_what_the_checkpoint_does_not_have_yet_is_gone(tmp_path: Path) -> None:
    def work(job: Job) -> None:
        job.save_checkpoint(tmp_path)
        job.step(BATCHES[0])
        job.load_checkpoint(tmp_path)
        assert not {"seen", "history"} & vars(job.worker.stepping()[0].optimizer).keys()

    workers(work, mlp(6, 4), "data=1", optimizer=lambda named: Late([p for _, p in named], lr=0.1))


def test_what_nothing_here_can_make_is_missed(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            vars(self).setdefault("seen", defaultdict(lambda: torch.zeros(())))["a"].add_(1)
            return super().step(closure)

    def work(job: Job) -> None:
        job.step(BATCHES[0])
        job.save_checkpoint(tmp_path)

    def resumed(job: Job) -> str:
        with pytest.raises(PolylaneError, match="has seen of the Odd, which makes it in a step") as caught:
            job.load_checkpoint(tmp_path)
        return str(caught.value)

    for run in (work, resumed):
        workers(run, mlp(6, 4), "data=1", optimizer=lambda named: Odd([p for _, p in named], lr=0.1))


def test_tensors_of_which_nobody_knows_the_parameters(tmp_path: Path) -> None:
    """By numbers of their own."""

    def work(job: Job) -> str:
        job.step(BATCHES[0])
        with pytest.raises(PolylaneError) as caught:
            job.save_checkpoint(tmp_path)
        return str(caught.value)

    for said in workers(work, mlp(6, 8, 4), "pipeline=2,microbatches=2", optimizer=in_first_step("numbers from 1")):
        assert (
            "keeps a tensor in momenta/1 that no checkpoint can hold under this plan: a worker has some of the" in said
        )
