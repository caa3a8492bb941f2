"""Loaders of every kind yield after a resumption the batches that the unbroken pass would have yielded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from polylane.script.resuming.loader import LoaderPass, follow_loader


class Noisy(Dataset[Tensor]):
    """Samples that are changed by random numbers when they are read."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(2).double() + random.random()


class Streamed(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.full((2,), float(i)) + torch.rand(2) for i in range(11)])


class Observer:
    """Passes of a script that is resumed, or begins.

    Args:
        description: of the pass that is gone on with; None: there is none.
    """

    accelerator = None

    def __init__(self, description: dict[str, Any] | None = None) -> None:
        self.description, self.passed_over, self.standing = description, 0, frozenset[int]()
        self.descriptions, self.states = list[Any](), list[Any]()

    def begin_pass(self, batches: LoaderPass) -> None:
        batches.resumed, self.description = self.description, None

    def reach(self, batches: LoaderPass) -> None:
        if self.states and self.states[0] is not None and batches.resumed is not None:
            torch.set_rng_state(self.states[0][0])
            random.setstate(self.states[0][1])
            self.states[0] = None
        if batches.resumed is None:
            self.descriptions.append(batches.describe())
            self.states.append((torch.get_rng_state(), random.getstate()))

    def reach_end(self, batches: LoaderPass) -> None: ...

    def note_batch(self, batches: LoaderPass) -> None: ...


KINDS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Noisy(), batch_size=2),
    "shuffled": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(Noisy(), 2, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: DataLoader(Noisy(), 2, sampler=WeightedRandomSampler(torch.arange(1.0, 12.0), 11)),
    "batches sampled": lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 3, True)),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "collated": lambda: DataLoader(Noisy(), 2, collate_fn=lambda rows: torch.stack(rows).sum(0), drop_last=True),
    "streamed": lambda: DataLoader(Streamed(), 2),
    "read by workers": lambda: DataLoader(Noisy(), 2, shuffle=True, num_workers=2, persistent_workers=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_pass_yields_the_rest(kind: str) -> None:
    torch.manual_seed(1)
    random.seed(1)
    loader, observer = KINDS[kind](), Observer()
    length = None if kind == "streamed" else len(loader)
    follow_loader(loader, 0, observer)
    assert isinstance(loader, DataLoader)
    assert length is None or len(loader) == length
    batches = list(loader)
    assert len(observer.descriptions) == len(batches) + 1

    for count in (0, 1, 3, len(batches)):
        torch.manual_seed(99)
        random.seed(99)
        resumed_loader, resumed = KINDS[kind](), Observer(observer.descriptions[count])
        resumed.states.append(observer.states[count])
        follow_loader(resumed_loader, 0, resumed)
        remaining = list(resumed_loader)

        assert len(remaining) == len(batches) - count
        for batch, expected in zip(remaining, batches[count:], strict=True):
            assert torch.equal(batch, expected)
        assert resumed.passed_over == count


def test_a_pass_that_is_left_early_is_followed_by_a_whole_one() -> None:
    loader = DataLoader(Noisy(), 2)
    follow_loader(loader, 0, Observer())
    for _ in loader:
        break
    assert len(list(loader)) == 6


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_later_pass_of_processes_that_stay_is_resumed(count: int) -> None:
    def build() -> Any:
        return DataLoader(TensorDataset(torch.arange(11.0)), 2, shuffle=True, num_workers=1, persistent_workers=True)

    torch.manual_seed(1)
    loader, observer = build(), Observer()
    follow_loader(loader, 0, observer)
    list(loader)
    before = len(observer.descriptions)
    batches = [batch for (batch,) in loader]

    torch.manual_seed(99)
    resumed_loader, resumed = build(), Observer(observer.descriptions[before + count])
    resumed.standing = frozenset([0])
    resumed.states.append(observer.states[before + count])
    follow_loader(resumed_loader, 0, resumed)
    remaining = [batch for (batch,) in resumed_loader]
    assert torch.equal(torch.cat(remaining), torch.cat(batches[count:]))
    assert torch.equal(torch.get_rng_state(), observer.states[-1][0])
