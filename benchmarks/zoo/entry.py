"""Entries of the zoo: a model of another package, a loss, and batches to train it on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 7  # of a batch: odd, so that no plan divides it evenly
CLASSES = 10
STEPS = 2


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        name: as it stands in the table, unique.
        family: the file of the zoo that it is in, which is a section of the table.
        package: the package on the index that has the model.
        make: builds the model, small, with random weights, in training mode.
        loss: (model, batch) to a scalar, as its users write it.
        batches: returns as many whole batches as asked for.
        optimizer: of the names and parameters.
        steps: that are proven, where no others are asked for.
    """

    name: str
    family: str
    package: str
    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any]
    batches: Callable[[int], Sequence[Any]]
    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    steps: int = STEPS


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-3, weight_decay=0.05)


class Family:
    """A section of the zoo, which its models are entered into.

    Args:
        name: of the file, which names the section.
        title: of the section on the page.
    """

    def __init__(self, name: str, title: str) -> None:
        self.name, self.title = name, title
        self.entries: dict[str, Entry] = {}

    def add(
        self,
        name: str,
        package: str,
        make: Callable[[], nn.Module],
        loss: Callable[[Any, Any], Any],
        batches: Callable[[int], Sequence[Any]],
        optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None,
        steps: int = STEPS,
    ) -> None:
        """Enter a model; optimizers alternate where none is said."""
        if name in self.entries:
            raise ValueError(f"{name} is in the zoo already")
        optimizer = optimizer or (sgd, adamw)[len(self.entries) % 2]
        self.entries[name] = Entry(name, self.name, package, make, loss, batches, optimizer, steps)


# Data -----------------------------------------------------------------------------------------------------------------


def numbers(step: int) -> torch.Generator:
    """Random numbers of a step's batch, the same every time."""
    return torch.Generator().manual_seed(100 + step)


def images(
    side: int = 32, channels: int = 3, classes: int = CLASSES, samples: int = SAMPLES
) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    """Batches of images, [samples, channels, side, side], and labels."""

    def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
        return [
            (
                torch.randn(samples, channels, side, side, generator=numbers(step)),
                torch.randint(0, classes, (samples,), generator=numbers(1000 + step)),
            )
            for step in range(steps)
        ]

    return batches


def tokens(length: int = 12, vocabulary: int = 64, samples: int = SAMPLES) -> Callable[[int], list[dict[str, Tensor]]]:
    """Batches of text: input_ids [samples, length] of ragged lengths, their attention_mask, labels, -100 beyond."""

    def batch(step: int) -> dict[str, Tensor]:
        ids = torch.randint(3, vocabulary, (samples, length), generator=numbers(step))
        lengths = torch.randint(length // 2, length + 1, (samples, 1), generator=numbers(1000 + step))
        lengths[0] = length
        mask = (torch.arange(length) < lengths).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    return lambda steps: [batch(step) for step in range(steps)]


# Losses ---------------------------------------------------------------------------------------------------------------


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy; of auxiliary heads too, at 0.3 each, as Inception's are trained."""
    out = model(batch[0])
    if not isinstance(out, tuple):
        return F.cross_entropy(out, batch[1])
    heads = [F.cross_entropy(head, batch[1]) for head in out if head is not None]
    return heads[0] + 0.3 * sum(heads[1:])


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model itself returns, as transformers' models do."""
    loss: Tensor = model(**batch).loss
    return loss
