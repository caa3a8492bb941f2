"""A training whose loss is not what its first batch shows: what ``same_numbers`` holds against one device.

A training here is a small model, a loss as people write it, and a few whole batches of odd sizes. Most are innocent at
first: on their first batch the loss is a mean over samples, every row counts, no branch is taken. What changes later is
what a look at one example batch cannot see. Each says what dividing its batches naively (parts trained alone, their
losses averaged over samples) makes of it, and on which plans it must be equal to one device; on the others it may be
refused. It must never be different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.recipe import Mean

# In an order in which neighbours are of different kinds: the covering selection takes two neighbours for each training.
PLANS = (
    "data=2",
    "pipeline=2,microbatches=3",
    "data=3",
    "data=2,pipeline=2,microbatches=2",
    "data=2,shard=parameters",
    "tensor=2",
)
ALONE = "data=1"
MICROBATCHES = tuple(plan for plan in PLANS if "microbatches" in plan)
DIVIDED = tuple(plan for plan in PLANS if plan != "tensor=2")  # those that divide a batch
# What averaging over parts makes of a training:
RIGHT = "right"  # the same numbers, on every batch
LATER = "wrong later"  # the same on the first batch, other numbers after
AT_ONCE = "wrong at once"  # other numbers on the first batch
STATE = "state"  # the division is not the point: Python state, random numbers, attributes that change
BY_SAMPLE, BY_PASS = "by sample", "by pass"
SIZES = (7, 9, 8, 7, 3)
IGNORED = -100


@dataclass(frozen=True)
class Training:
    """A model, a loss and the batches of its steps.

    Attributes:
        model: freshly initialised, the same weights every time, in float64.
        loss: (model, batch) to a scalar or a Mean; one that has state is copied for each run.
        batches: whole ones, in float64, one a step; the first is the example.
        naive: what averaging over parts makes of it.
        refusable: plans on which it may be refused; on all others it must be equal.
        optimizer: plain SGD unless said: noise is not amplified.
        before: (model, step), what the user's script does to the model before a step.
        promoted: casts to lower types inside keep float64, on both sides.
        draws: it draws random numbers, which workers draw by key, so that it is held against one worker and not against
            a loop: BY_SAMPLE, whatever the microbatches; or BY_PASS, by the user's own Python, once for each of them.
        in_turn: its forward pass moves state of its own (batch statistics, a counter): held against a loop over the
            plan's microbatches, which are what passes forward there.
        counted: how much a batch counts in such a loop; default: its samples.
        isolated: it writes into the Python around it: every run of it has a process of its own.
        data: the samples, as a recipe's data("train"): trained by ``train``, in place of batches.
        collate, epochs, scheduler: of such a training.
        script: the user's whole script, called with a function that has the place of ``polylane.parallelize``; returns
            losses and weights.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor | Mean]
    batches: Callable[[], Sequence[Any]]
    naive: str = LATER
    refusable: tuple[str, ...] = ()
    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None
    before: Callable[[Any, int], None] | None = None
    promoted: bool = False
    draws: str = ""
    in_turn: bool = False
    counted: Callable[[Any], float] | None = None
    isolated: bool = False
    data: Callable[[], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    epochs: int = 2
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    script: Callable[[Callable[..., Any]], tuple[list[float], Any]] | None = None

    @property
    def is_launched(self) -> bool:
        """Whether a command or a script trains it, and not a job in a test's hands."""
        return self.data is not None or self.script is not None

    @property
    def optimizer_or_sgd(self) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
        return self.optimizer or sgd


ENTERED: dict[str, Callable[[], Training]] = {}  # of the families that are imported so far


def training(make: Callable[[], Training]) -> Callable[[], Training]:
    """Enter a training into the table under its function's name."""
    ENTERED[make.__name__] = make
    return make


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.2)


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=0.01, weight_decay=0.1)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same weights every time, in float64."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return model


def perceptron(outputs: int = 4) -> Callable[[], nn.Module]:
    """Three layers from 6 features."""
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs)))


def numbers(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def features(step: int, samples: int, *shape: int) -> Tensor:
    return torch.randn(samples, *(shape or (6,)), generator=numbers(step), dtype=torch.float64)


def labels(step: int, *shape: int, classes: int = 4) -> Tensor:
    return torch.randint(0, classes, shape, generator=numbers(1000 + step))


def chances(step: int, *shape: int) -> Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(*shape, generator=numbers(2000 + step), dtype=torch.float64)


def classified(step: int, samples: int) -> tuple[Tensor, Tensor]:
    return features(step, samples), labels(step, samples)


def plain_batches() -> list[tuple[Tensor, Tensor]]:
    return [classified(step, samples) for step, samples in enumerate(SIZES)]


def with_weights(step: int, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples with weights: all of them 1 at first and at last; between, some are 0, and one has the most."""
    weights = chances(step, samples).round(decimals=2)
    weights[0], weights[-1] = 1.5, 0.0
    return *classified(step, samples), torch.ones_like(weights) if step in (0, 4) else weights


def weighted_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    return [with_weights(step, samples) for step, samples in enumerate(SIZES)]


def each(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The loss of every sample."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def classify(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
