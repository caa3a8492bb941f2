"""LARS and LAMB in a job: workers hold parts, and step as one device does with whole parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import Objective
from polylane.compile.optimizer_probe import LOOKS, find_whole_parameters
from polylane.optim import LAMB, LARS, split_decay_groups, warmed_scheduler
from polylane.optim.trust import TrustRatioOptimizer
from polylane.runtime.job import Job
from polylane.verify.verify import verify
from tests.support import subsets
from tests.support.workers.training import assert_same, batch_of, classify, mlp, plainly, trained, workers

Pairs = Sequence[tuple[str, nn.Parameter]]
BATCHES = [batch_of(samples, seed) for seed, samples in enumerate((8, 7, 5))]
SIZES = (6, 9, 8, 4)


def lars(parameters: Pairs) -> torch.optim.Optimizer:
    return LARS(
        split_decay_groups(parameters, lr=0.05), lr=2.0, trust=0.05, momentum=0.9, weight_decay=0.1, nesterov=True
    )


def lamb(parameters: Pairs) -> torch.optim.Optimizer:
    """Biases adapt too: they are whole on some ranks and parts on others."""
    return LAMB(parameters, lr=0.1, weight_decay=0.1)


FACTORIES = {"lars": lars, "lamb": lamb}
BOTH = "pipeline=2,tensor=2,microbatches=2"


@pytest.mark.parametrize("factory", [lars, lamb])
def test_no_parameter_stays_whole_for_an_optimizer_that_asks_for_sums(factory: Any) -> None:
    named = [*mlp(*SIZES).named_parameters(), ("filters", nn.Parameter(torch.zeros(3, 2, 3, 3)))]
    assert find_whole_parameters(named, [factory]) == {}


def test_who_asks_for_sums_and_then_looks_at_parts_needs_them_whole() -> None:
    class Half(LAMB):
        """Takes the sums of weights, and forgets to take those of directions."""

        def ratios(self, group: Any, weights: Tensor, directions: Tensor) -> Tensor:
            return super().ratios(group, weights, torch.full_like(directions, len(self.param_groups[0]["params"][0])))

    class Unbound(LAMB):
        def step(self, closure: Any = None) -> Any:
            self.sum_over_holders = None
            return super().step(closure)

    named = list(mlp(*SIZES).named_parameters())
    for kind in (Half, Unbound):
        assert find_whole_parameters(named, [lambda p, kind=kind: kind(p, lr=0.1)]) == dict.fromkeys(dict(named), LOOKS)


def test_sums_asked_for_by_one_worker_alone_are_told() -> None:
    turns = itertools.cycle([False, True])

    class InTurns(LAMB):
        def step(self, closure: Any = None) -> Any:
            if self.sum_over_holders is not None and self.param_groups[0]["turn"]:
                self.sum_over_holders([], torch.zeros(0, 2, dtype=torch.float64))
            return super().step(closure)

    def in_turns(parameters: Pairs) -> torch.optim.Optimizer:
        return InTurns([{"params": parameters, "turn": next(turns)}])

    named = list(mlp(*SIZES).named_parameters())
    (why,) = set(find_whole_parameters(named, [in_turns]).values())
    assert "sum_over_holders must be called once a step" in why


def shapes(job: Job) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in job.worker.held().items()}


@pytest.mark.parametrize(("plan", "name"), subsets.pairs(["tensor=3", "data=2,tensor=2", BOTH], [*FACTORIES]))
def test_parts_step_as_one_device_does(plan: str, name: str) -> None:
    factory, microbatches = FACTORIES[name], 2 if plan == BOTH else 1
    options: dict[str, Any] = {"optimizer": factory, "scheduler": warmed_scheduler(None, 2), "clip_norm": 0.5}
    reference = plainly(mlp(*SIZES), BATCHES, microbatches=microbatches, **options)
    results = trained(mlp(*SIZES), plan, BATCHES, shapes, **options)
    whole = {name: tuple(p.shape) for name, p in mlp(*SIZES).named_parameters()}
    # Of any stage: operators are timed to cut the model, and a stage may get nothing that can be split.
    parts = [(name, shape) for worker in results for name, shape in worker.extra.items() if len(whole[name]) == 2]
    assert any(shape != whole[name] for name, shape in parts)
    for worker in results:
        assert_same(worker, reference, 1e-10)
        for name, gradient in worker.gradients.items():
            assert gradient is None or tuple(gradient.shape) == worker.extra[name]


@pytest.mark.parametrize(("plan", "name"), subsets.pairs(["data=2", "pipeline=3,microbatches=2"], [*FACTORIES]))
def test_whole_parameters_need_no_sums(plan: str, name: str) -> None:
    factory = FACTORIES[name]

    def bound(job: Job) -> bool:
        assert isinstance(job.optimizer, TrustRatioOptimizer)
        return job.optimizer.sum_over_holders is not None

    microbatches = 2 if "microbatches" in plan else 1
    reference = plainly(mlp(*SIZES), BATCHES, microbatches=microbatches, optimizer=factory)
    for worker in trained(mlp(*SIZES), plan, BATCHES, bound, optimizer=factory):
        assert_same(worker, reference)
        assert not worker.extra


class Tied(nn.Module):
    """The first layer's weight is the last one's too, on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(6, 8, bias=False)
        self.inner = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.first(x).tanh()).sin().tanh()
        return self.last(x[..., :6])


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


@pytest.mark.parametrize(
    ("plan", "name"),
    subsets.one_in(2, subsets.pairs(["[data=2 | tensor=2],microbatches=2", BOTH], [*FACTORIES]), several=True),
)
def test_what_several_stages_hold_counts_once(plan: str, name: str) -> None:
    factory = FACTORIES[name]
    reference = plainly(tied(), BATCHES, microbatches=2, optimizer=factory)
    whole = {name: tuple(p.shape) for name, p in tied().named_parameters()}
    results = trained(tied(), plan, BATCHES, shapes, optimizer=factory)
    for worker in results:
        assert_same(worker, reference, 1e-10)
    assert any(shape != whole[name] for worker in results for name, shape in worker.extra.items())


def test_two_objectives_ask_for_sums_of_their_own() -> None:
    """Each optimizer has parameters of its own and of the model's, in turns."""
    losses: dict[str, Callable[..., Tensor]] = {
        "first": classify,
        "second": lambda model, batch: model[0](batch[0]).square().mean(),
    }
    factories = {"first": lamb, "second": lambda parameters: lars([pair for pair in parameters if pair[0][0] == "0"])}

    def alternating(job: Job) -> dict[str, Tensor]:
        for batch in BATCHES:
            job.step(batch, "first")
            job.step(batch, "second")
        return job.state_dict()

    (expected,) = workers(alternating, mlp(*SIZES), "data=1", loss=losses, optimizer=factories)
    for found in workers(alternating, mlp(*SIZES), "tensor=2", loss=losses, optimizer=factories):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("factory", subsets.one_in(2, [lars, lamb], first=1))
def test_the_proof_passes(factory: Any) -> None:
    verdict = verify(mlp(*SIZES), Objective("loss", classify, factory), BATCHES, "tensor=2")
    assert verdict.passed and verdict.worst < 1e-9
