"""Loops that write into batches, keep what they compute from many of them, or read them by loaders of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.script.loading.loader_loops import Prepare, train
from tests.script.loops import samples, sums_of


def write_views(prepare: Prepare) -> list[float]:
    """Writes into views of a batch, beside what was computed from it before, and by functions of Python's."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        doubled, first, rest = x * 2, x[:, 0], x[:, 1:]
        rest[:, 0].zero_()
        rest += 1
        x.clamp_(-2, 2)
        y.apply_(lambda label: (label + 1) % 3)
        sums.append(x.sum().item() + first.sum().item())
        return F.cross_entropy(model(doubled), y) + F.mse_loss(model(x), rest)

    sums = list[float]()
    return train(prepare, DataLoader(samples(), batch_size=6, shuffle=True), step) + sums


def write_arrays(prepare: Prepare) -> list[float]:
    """Writes into the arrays of a batch, which share its memory."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        doubled, array = x * 2, x.numpy()
        array -= array.mean(0)
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(doubled), y)

    return train(prepare, DataLoader(samples(), batch_size=6, shuffle=True), step)


def flip_rows(prepare: Prepare) -> list[float]:
    """Rows that are flipped one by one."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        for row in range(len(x)):
            if random.random() < 0.5:
                x[row] = x[row].flip(0)
        return F.cross_entropy(model(x), y)

    random.seed(7)
    return train(prepare, DataLoader(samples(), batch_size=6, shuffle=True), step)


def follow_mean(prepare: Prepare) -> list[float]:
    """A mean that follows all batches so far."""
    kept = {"mean": torch.zeros(4).double()}

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * x.mean(0)
        return F.cross_entropy(model(x - kept["mean"]), y)

    return train(prepare, DataLoader(samples(), batch_size=6), step)


def collect_labels(prepare: Prepare) -> list[float]:
    """Labels and sums that are put together of all batches."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 3).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(samples(), batch_size=4)
    model, optimizer, loader = prepare(model, optimizer, loader)
    numbers = list[float]()
    for _ in range(3):
        labels = list[Tensor]()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            labels.append(y)
        mean = sum(x.sum(0) for x, _ in loader) / len(loader.dataset)
        numbers += [*mean.tolist(), float(torch.cat(labels).numpy().std())]
    return numbers + sums_of(model)


class Doubling(DataLoader[Any]):
    """A loader with an __iter__ of its own."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x * 2, y


class Skipping(Dataset[Any]):
    """Samples that are read in batches, of which some are left out."""

    def __init__(self) -> None:
        self.rows = samples()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.rows[index] for index in indices if index % 7]


class Ranges:
    """Batches of indices that are generators."""

    def __iter__(self) -> Any:
        return ((index for index in range(start, start + 6)) for start in range(0, 36, 6))


def read_unlike(prepare: Prepare) -> list[float]:
    """Loaders that read otherwise than torch's: by an __iter__ or collate of their own, or other numbers of samples."""

    def step(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def read_first(*objects: Any) -> Any:
        next(iter(objects[2]))
        return prepare(*objects)

    def collate_last(*objects: Any) -> Any:
        prepared = prepare(*objects)
        prepared[2].collate_fn = lambda rows: [torch.stack([x * 2 for x, _ in rows]), torch.stack([y for _, y in rows])]
        return prepared

    torch.manual_seed(3)
    numbers = train(prepare, Doubling(samples(), batch_size=6, shuffle=True), step)
    numbers += train(prepare, DataLoader(Skipping(), batch_size=9, shuffle=True), step)
    numbers += train(prepare, DataLoader(samples(), batch_sampler=Ranges()), step)
    numbers += train(prepare, DataLoader(samples(), sampler=np.arange(35, -1, -1), batch_size=6), step)
    options: Any = {"num_workers": 1, "persistent_workers": True, "shuffle": True}
    numbers += train(read_first, DataLoader(samples(), batch_size=6, **options), step)
    return numbers + train(collate_last, DataLoader(samples(), batch_size=6), step)


UNUSUAL_LOOPS: dict[str, Callable[[Prepare], list[float]]] = {
    loop.__name__: loop for loop in (write_views, write_arrays, flip_rows, follow_mean, collect_labels, read_unlike)
}
