"""Training loops that compute on what their loaders return, before and beside the model; each returns its numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from tests.script.loops import samples, sums_of

Prepare = Callable[..., Any]
Step = Callable[[Any, Any], Tensor]


def train(prepare: Prepare, loader: Any, step: Step, epochs: int = 2, **options: Any) -> list[float]:
    """Train a classifier of rows of four numbers with the loss that ``step`` makes of the model and a batch."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = prepare(model, optimizer, loader, **options)
    numbers = list[float]()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = step(model, batch)
            loss.backward()
            optimizer.step()
            numbers.append(loss.item())
    return numbers + sums_of(model)


def flatten_batches(prepare: Prepare) -> list[float]:
    """Views, casts and numbers of a batch, whose last one is short; accuracy by numpy."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        x = x.to("cpu", torch.float64).unsqueeze(1).reshape(x.size(0), -1) / 2 - 0.5
        output = model(x)
        right.append(float((output.detach().argmax(1).numpy() == y.numpy()).mean()))
        return F.cross_entropy(output, y.long())

    right = list[float]()
    return train(prepare, DataLoader(samples(), batch_size=10, shuffle=True), step) + right


def mix_batches(prepare: Prepare) -> list[float]:
    """Mixup: samples of a batch are mixed before the model is called."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        share, order = random.random(), torch.randperm(len(x))
        output = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(output, y) + (1 - share) * F.cross_entropy(output, y[order])

    random.seed(3)
    return train(prepare, DataLoader(samples(), batch_size=12, shuffle=True), step)


def add_noise(prepare: Prepare) -> list[float]:
    """Noise that the script draws, and a write in place."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        x = x + 0.1 * torch.randn_like(x)
        x[:, 0] = 0
        x *= 2
        return F.cross_entropy(model(x), y)

    return train(prepare, DataLoader(samples(), batch_size=12), step)


def shift_columns(prepare: Prepare) -> list[float]:
    """An augmentation at a place that is drawn for each batch."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        at = random.randrange(4)
        return F.cross_entropy(model(torch.cat([x[:, at:], x[:, :at]], dim=1)), y)

    random.seed(4)
    return train(prepare, DataLoader(samples(), batch_size=12), step, epochs=4)


def join_views(prepare: Prepare) -> list[float]:
    """Two views of each sample in one call of the model, whose results are told apart again."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        first, second = model(torch.cat([x, -x])).chunk(2)
        return F.cross_entropy(first, y) + F.mse_loss(first, second)

    return train(prepare, DataLoader(samples(), batch_size=12), step)


def compare_within(prepare: Prepare) -> list[float]:
    """A loss in which all samples of a batch meet."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        output = model(x.double())
        is_same = (y[:, None] == y[None]).double()
        return F.mse_loss(output @ output.t(), is_same)

    return train(prepare, DataLoader(samples(), batch_size=12), step)


class Named(Dataset[Any]):
    """Samples as dicts; some have names."""

    def __init__(self, has_names: bool) -> None:
        self.rows, self.has_names = samples(), has_names

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        sample = {"x": x, "of": {"y": int(y), "weight": 0.5 + index % 2}}
        return sample | {"name": f"sample {index}"} if self.has_names else sample


def weigh_samples(prepare: Prepare) -> list[float]:
    """Nested batches, drawn by weights."""

    def step(model: Any, batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch["x"]), batch["of"]["y"], reduction="none")
        return (losses * batch["of"]["weight"]).mean()

    sampler = WeightedRandomSampler(torch.linspace(0.1, 1, 36).tolist(), 36, generator=torch.Generator().manual_seed(5))
    return train(prepare, DataLoader(Named(False), batch_size=12, sampler=sampler), step)


def read_names(prepare: Prepare) -> list[float]:
    """Batches with texts."""

    def step(model: Any, batch: Any) -> Tensor:
        lengths.append(float(sum(map(len, batch["name"]))))
        return F.cross_entropy(model(batch["x"]), batch["of"]["y"])

    lengths = list[float]()
    return train(prepare, DataLoader(Named(True), batch_size=12, shuffle=True), step) + lengths


class Augmented(Named):
    """Samples that draw random numbers: all of them, or from one on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(False)
        self.first = first

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample | {"x": sample["x"] + 0.1 * random.random()} if index >= self.first else sample


def augment_samples(prepare: Prepare) -> list[float]:
    """A data set that draws random numbers."""
    random.seed(6)
    step = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["of"]["y"])  # noqa: E731
    return train(prepare, DataLoader(Augmented(), batch_size=12), step)


def pad_samples(prepare: Prepare) -> list[float]:
    """A collate function of the script's own, whose result depends on all samples."""

    def collate(rows: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        return x - x.mean(0), y

    step = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return train(prepare, DataLoader(samples(), batch_size=12, collate_fn=collate), step)


def load_ahead(prepare: Prepare) -> list[float]:
    """Processes that load ahead and stay; a batch that ends an epoch early; two passes at a time."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 3).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(samples(), batch_size=6, shuffle=True, num_workers=2, persistent_workers=True)
    other: Any = DataLoader(samples(48), batch_size=6, num_workers=1)
    model, optimizer, loader, other = prepare(model, optimizer, loader, other)
    numbers = list[float]()
    for _ in range(3):
        for number, ((x, y), (z, _)) in enumerate(zip(loader, other, strict=False)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + model(z).pow(2).mean()
            loss.backward()
            optimizer.step()
            numbers.append(loss.item())
            if number == 4:
                break
    return numbers + sums_of(model)


def keep_batches(prepare: Prepare) -> list[float]:
    """Batches that are kept in a list, statistics of the data, and an evaluation."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(samples(), batch_size=12)
    model, optimizer, loader = prepare(model, optimizer, loader)
    numbers = list[float]()
    for _ in range(3):
        batches = list(loader)
        mean = torch.cat([x for x, _ in batches]).mean(0)
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x - mean), y)
            loss.backward()
            optimizer.step()
            numbers += [loss.item(), x.mean().item(), float(np.asarray(y).sum())]
        model.eval()
        with torch.no_grad():
            for x, y in loader:
                output = model(x)
                numbers.append(output.argmax(1).eq(y).sum().item())
                numbers.append(F.cross_entropy(output, y).item())
        model.train()
    return numbers + sums_of(model)


def accumulate_batches(prepare: Prepare) -> list[float]:
    """Several batches for one step, one-hot labels, and masks."""

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        output = model(x)
        targets = F.one_hot(y, 3).double()
        losses = F.binary_cross_entropy_with_logits(output, targets, reduction="none").sum(1)
        return losses.sum() / len(x) + losses[y > 0].sum() / 100

    return train(prepare, DataLoader(samples(), batch_size=12), step)


def follow_teachers(prepare: Prepare) -> list[float]:
    """Teachers that were not prepared: one with gradients, one that moves statistics, one of compiled code."""
    torch.manual_seed(1)
    teacher: Any = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)).double()
    moving: Any = nn.BatchNorm1d(4).double()
    scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(4, 12), nn.Tanh()).double())

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            target = teacher(moving(x)) + scripted(x)[:, :3]
        return F.mse_loss(model(x), target) + F.cross_entropy(model(x), y)

    numbers = train(prepare, DataLoader(samples(), batch_size=12), step)
    return [*numbers, *moving.running_mean.tolist()]


def imitate_frozen(prepare: Prepare) -> list[float]:
    """A frozen teacher that was not prepared, means and deviations of columns, and a copy that is averaged."""
    torch.manual_seed(1)
    teacher: Any = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)).double().requires_grad_(False)
    mean, deviation = torch.rand(4).double(), torch.rand(4).double() + 1

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        x = (x - mean) / deviation[None]
        return F.mse_loss(model(x), teacher(x)) + F.cross_entropy(model(x), y)

    return train(prepare, DataLoader(samples(), batch_size=12), step)


def predict_masked(prepare: Prepare) -> list[float]:
    """Shifted tokens, and targets that are written in place where a mask says so."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (36, 9), generator=torch.Generator().manual_seed(2))
    model: Any = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader([{"ids": row} for row in tokens], batch_size=12, shuffle=True)
    model, optimizer, loader = prepare(model, optimizer, loader)
    numbers = list[float]()
    for _ in range(2):
        for batch in loader:
            inputs, targets = batch["ids"][:, :-1], batch["ids"][:, 1:].clone()
            targets[targets == 0] = -100
            output = model(inputs)
            loss = F.cross_entropy(output.reshape(-1, output.size(-1)), targets.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            numbers += [loss.item(), float((targets != -100).sum())]
    return numbers + sums_of(model)


LOADER_LOOPS: dict[str, Callable[[Prepare], list[float]]] = {
    loop.__name__: loop
    for loop in (
        flatten_batches,
        mix_batches,
        add_noise,
        shift_columns,
        join_views,
        compare_within,
        weigh_samples,
        read_names,
        augment_samples,
        pad_samples,
        load_ahead,
        keep_batches,
        accumulate_batches,
        follow_teachers,
        imitate_frozen,
        predict_masked,
    )
}
