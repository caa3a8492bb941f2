"""Replicas that hold parts of the optimizer, of gradients, of parameters compute what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import Objective, build_objectives
from polylane.plan.spec import parse
from polylane.program import lower
from polylane.recipe import Mean
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.verify.rounding_floor import relative_error
from polylane.verify.verify import verify
from tests.equivalence.test_gan import BATCHES as SIZES
from tests.equivalence.test_gan import LOSSES, images, network, plain_loop
from tests.equivalence.test_gan import OPTIMIZERS as TWO
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import adamw, assert_same, batch_of, plainly, sgd, trained

SHARDS = ("optimizer", "gradients", "parameters")
BATCHES = [batch_of(samples, seed) for seed, samples in enumerate((9, 8, 6))]


@pytest.fixture(autouse=True)
def _many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small models have several units; some parameters are larger, and have one of their own."""
    monkeypatch.setattr(lower, "BUCKET_BYTES", 300)


class Everything(nn.Module):
    """A layer used at both ends, statistics of the batch, a scalar, a frozen layer, and a layer of no use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ends, self.norm, self.scale = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Parameter(torch.tensor(0.5))
        self.wide, self.narrow, self.last = nn.Linear(6, 11), nn.Linear(11, 6), nn.Linear(6, 4)
        self.frozen, self.useless = nn.Linear(6, 6).requires_grad_(False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.ends(x)))
        x = torch.tanh(self.frozen(self.narrow(torch.tanh(self.wide(x))))) * self.scale
        y: Tensor = self.last(torch.tanh(self.ends(x)))
        return y


def everything() -> nn.Module:
    return Everything().double()


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """Makes its state at once."""
    return torch.optim.Adagrad(list(parameters), lr=0.05, initial_accumulator_value=0.1)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """Must see a parameter's rows and columns."""
    return torch.optim.Adafactor(list(parameters), lr=0.01)


def mixed(parameters: Any) -> torch.optim.Optimizer:
    """Groups with options of their own, the first with nothing of some stages."""
    named = dict(parameters)
    slow = [p for name, p in named.items() if name.startswith("wide")]
    rest = [p for name, p in named.items() if not name.startswith("wide")]
    return torch.optim.AdamW([{"params": slow, "lr": 1e-3}, {"params": rest, "weight_decay": 0.2}], lr=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adamw": adamw,
    "mixed": mixed,
    "adagrad": adagrad,
    "adafactor": adafactor,
}

ROWS = """
plan                                   | optimizer | gradients | parameters
---------------------------------------+-----------+-----------+-----------
data=2                                 | adamw     | adafactor | mixed
data=3,microbatches=2                  | adafactor | mixed     | sgd
data=2,pipeline=2,microbatches=2       | mixed     | adamw     | adafactor
data=2,tensor=2                        |           | sgd       | adamw
data=4,within=2,microbatches=2         | sgd       | adamw     | adagrad
[data=2 / 1],microbatches=2            | adamw     | adagrad   | adafactor
[1 / data=3],microbatches=2            |           |           | sgd
"""


def rows() -> list[tuple[str, str]]:
    head, _, *lines = ([cell.strip() for cell in line.split("|")] for line in ROWS.strip().splitlines())
    return [
        (f"{plan.replace('/', '|')},shard={shard}", cell)
        for plan, *cells in lines
        for shard, cell in zip(head[1:], cells, strict=True)
        if cell
    ]


def check(plan: str, optimizer: str) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "clip_norm": 0.3}
    expected = plainly(everything(), BATCHES, microbatches=parse(plan).microbatches or 1, **options)
    for worker in trained(everything(), plan, BATCHES, **options):
        assert_same(worker, expected, 1e-9)


@pytest.mark.parametrize("row", subsets.one_in(2, rows()))
def test_covering(row: tuple[str, str]) -> None:
    check(*row)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", [plan for plan, _ in rows()])
def test_every_combination(plan: str, optimizer: str) -> None:
    check(plan, optimizer)


class Text(nn.Module):
    """Tokens in, tokens out, by the same matrix; with dropout, whose masks no layout may change."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.norm, self.drop = nn.Embedding(13, 8), nn.LayerNorm(8), nn.Dropout(0.3)
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.inner:
            x = x + self.drop(F.gelu(layer(self.norm(x))))
        return x @ self.token.weight.t()


def next_token(model: nn.Module, batch: Tensor) -> Mean:
    """The mean over all tokens but those that are 0: how many they are is known only now."""
    losses = F.cross_entropy(
        model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0, reduction="sum"
    )
    return Mean(losses, (batch[:, 1:] != 0).sum())


@pytest.mark.parametrize(
    ("plan", "shard"),
    subsets.one_in(
        2,
        [
            ("data=2,microbatches=2", "optimizer"),
            ("data=3", "gradients"),
            ("data=2,microbatches=2", "parameters"),
            ("data=2,pipeline=2,microbatches=2", "parameters"),
            ("data=2,sequence=2", "parameters"),
        ],
        several=True,
    ),
)
def test_dropout_tied_ends_and_means_over_what_counts(plan: str, shard: str) -> None:
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 13, (samples, 6), generator=random) for samples in (8, 7, 5)]
    objective = Objective(
        "loss", next_token, adamw, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    )
    verdict = verify(Text(), objective, batches, f"{plan},shard={shard}", clip_norm=0.3)
    assert verdict.passed and verdict.replicas_equal and verdict.worst <= 1e-9, verdict.culprit
    assert all(deviation.gradient is not None for deviation in verdict.deviations)


CONSTANT = [
    *(f"data=2,shard={shard}" for shard in SHARDS),
    "data=2,pipeline=2,microbatches=2,shard=parameters",
    "[data=2 | tensor=2],microbatches=2,shard=parameters",
    "[data=2 | data=2,tensor=2],microbatches=2,shard=parameters",  # held where this loss does not use it
    "data=2,pipeline=3,microbatches=2,shard=parameters",
]


@pytest.mark.parametrize(
    "plan",
    subsets.one_in(
        2, subsets.except_slow(CONSTANT, ["data=2,shard=parameters", "data=2,shard=optimizer", CONSTANT[-1]])
    ),
)
def test_what_one_objective_trains_is_constant_in_another(plan: str) -> None:
    """A GAN: each of two losses has parameters of both networks, and trains one of them."""
    prepared = compile_training(network(), build_objectives(LOSSES, TWO, None), images(10, 0), plan, in_float64=True)

    def work(_: Any) -> tuple[list[float], dict[str, Tensor]]:
        with Job(prepared, World.join(), example=images(10, 0)) as job:
            losses = [job.step(images(n, step), name).loss for step, n in enumerate(SIZES) for name in LOSSES]
            return losses, job.state_dict()

    results = fork_workers(work, prepared.plan.workers)
    losses, state = plain_loop(prepared)
    for own, weights in results:
        assert own == pytest.approx(losses, rel=1e-9)
        assert max(relative_error(state[name], weights[name], 1e-3) for name in state) < 1e-9
