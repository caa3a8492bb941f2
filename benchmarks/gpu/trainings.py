"""The small models whose numbers are compared, and the plain loop that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import gpt

SAMPLES = 8


class Images(nn.Module):
    """Convolutions with batch normalization and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm1, self.norm2, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.first(x)))
        x = x + F.relu(self.norm2(self.second(x)))
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(13, 12), nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1, momentum=0.9)


Training = tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor], Callable[[int], tuple[Tensor, Tensor]]]


def trainings() -> dict[str, Training]:
    """Return by name the model, the loss and the batch of each step."""

    def images(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(SAMPLES, 3, 8, 8, generator=generator), torch.randint(0, 5, (SAMPLES,), generator=generator)

    def words(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        both = torch.randint(0, 13, (SAMPLES, 6), generator=generator)
        return both, torch.randint(0, 5, (SAMPLES,), generator=generator)

    def text(step: int) -> tuple[Tensor, Tensor]:
        return gpt.tokens(SAMPLES, 16, gpt.SMALL["vocabulary"], step)

    small = {**gpt.SMALL, "length": 16, "layers": 4}
    return {
        "gpt": (lambda: gpt.model(**small), gpt.loss, text),
        "gpt, untied": (lambda: gpt.model(**small, tied=False), gpt.loss, text),
        "convolutions": (Images, classify, images),
        "lstm": (Recurrent, classify, words),
    }


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """Return a model with the same weights on every machine."""
    torch.manual_seed(0)
    return trainings()[name][0]().to(dtype)


def batch_of(name: str, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the batch of a step."""
    first, second = trainings()[name][2](step)
    return first.to(dtype) if first.is_floating_point() else first, second


def train_plainly(
    name: str,
    steps: int,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    autocast: bool = False,
    order: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the weights of a plain training loop on one device.

    Args:
        name: the training.
        steps: number of steps.
        device: device that trains.
        dtype: of parameters and inputs.
        autocast: whether passes run in bfloat16.
        order: order of the samples in each batch; None: as they come.
    """
    model, loss = build(name, dtype).to(device), trainings()[name][1]
    optimizer = sgd(list(model.named_parameters()))
    for step in range(steps):
        batch = tuple((t if order is None else t[order]).to(device) for t in batch_of(name, step, dtype))
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16) if autocast else nullcontext():
            value = loss(model, batch)
        value.backward()
        optimizer.step()
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def train_by_plan(
    name: str, steps: int, plan: str, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], float]:
    """Return the weights of the same training by a plan on the workers that are there, and its last loss.

    Args:
        name: the training.
        steps: number of steps.
        plan: the plan in one line.
        dtype: of parameters and inputs.
    """
    import polylane

    model, loss = build(name, dtype), trainings()[name][1]
    job = polylane.parallelize(model, loss, sgd, example=batch_of(name, 0, dtype), plan=plan, alone=False)
    try:
        value = [job.step(batch_of(name, step, dtype)).loss for step in range(steps)][-1]
        return job.state_dict(), value
    finally:
        job.close()
