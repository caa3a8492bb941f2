"""Batches: an order that seed and epoch decide alone, every sample once, each worker loading its own samples only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from polylane.compile.sample_shares import Batch, SampleShare, compute_shares
from polylane.errors import PolylaneError
from polylane.runtime.data.loader import _find_own, begin_epoch, load_batches
from polylane.runtime.data.sample_order import sample_order
from polylane.runtime.workers.team import (  # loading processes leave a resource tracker behind: not in this process
    fork_workers,
)


class Counting(torch.utils.data.Dataset[int]):
    """Sample i is the number i; notes which were loaded."""

    def __init__(self, samples: int) -> None:
        self.samples, self.loaded = samples, list[int]()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        yield from range(self.samples)


def own(microbatches: int, replicas: int, replica: int) -> Any:
    return lambda samples: compute_shares(samples, microbatches, replicas, replica)


def global_batches(dataset: Any, size: int, microbatches: int, replicas: int, **options: Any) -> list[list[Any]]:
    """The batches that all replicas see together, from the parts that count."""
    wholes: list[list[Any]] = []
    for replica in range(replicas):
        mine = own(microbatches, replicas, replica)
        for i, batch in enumerate(load_batches(dataset, size, shares=mine, **options)):
            if replica == 0:
                wholes.append([-1] * batch.samples)
            for share in mine(batch.samples):
                if share.weight:
                    wholes[i][share.start : share.stop] = values(batch, share)
    return wholes


def values(batch: Batch, share: SampleShare) -> list[Any]:
    return batch.leaves_of(share)[0].tolist()


# Order


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    torch.manual_seed(1)
    first = sample_order(20, epoch=0, seed=0)
    torch.manual_seed(2)
    assert sample_order(20, epoch=0, seed=0) == first
    others = [sample_order(20, epoch=1, seed=0), sample_order(20, epoch=0, seed=1), sample_order(20, epoch=1, seed=1)]
    assert len({tuple(o) for o in [first, *others]}) == 4
    assert all(sorted(o) == list(range(20)) for o in others)


def test_asking_for_an_order_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    sample_order(20, 0, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_negative_and_huge_seeds() -> None:
    assert all(sorted(sample_order(5, 3, seed)) == list(range(5)) for seed in (-1, 2**63, 2**80))


# Every sample once, the same batches whatever the layout


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_the_same_batches_whatever_the_layout(samples: int, size: int, microbatches: int, replicas: int) -> None:
    whole = global_batches(Counting(samples), size, 1, 1, epoch=2, seed=5)
    assert [len(batch) for batch in whole[:-1]] == [size] * (len(whole) - 1) and 1 <= len(whole[-1]) <= size
    assert [i for batch in whole for i in batch] == sample_order(samples, 2, 5)
    assert global_batches(Counting(samples), size, microbatches, replicas, epoch=2, seed=5) == whole


@pytest.mark.parametrize("dataset", [Stream(11), list(range(11)), Counting(11)], ids=["iterable", "list", "map"])
def test_kinds_of_datasets(dataset: Any) -> None:
    for replicas in (1, 3):
        whole = global_batches(dataset, 4, 2, replicas, shuffle=False)
        assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_a_generator_is_a_stream_too() -> None:
    whole = list(load_batches((i for i in range(5)), 2, shares=own(1, 1, 0)))
    assert [batch.leaves[0].tolist() for batch in whole] == [[0, 1], [2, 3], [4]]


def test_streams_are_not_shuffled() -> None:
    assert global_batches(Stream(6), 4, 1, 1, shuffle=True) == [[0, 1, 2, 3], [4, 5]]


def test_a_worker_loads_its_own_samples_only() -> None:
    datasets = [Counting(24), Counting(24)]
    for replica, dataset in enumerate(datasets):
        assert len(list(load_batches(dataset, 8, shares=own(2, 2, replica), seed=3))) == 3
    assert sorted(datasets[0].loaded + datasets[1].loaded) == list(range(24))
    assert len(datasets[0].loaded) == 12


def test_a_stand_in_loads_one_sample_of_another() -> None:
    dataset = Counting(1)
    (batch,) = load_batches(dataset, 4, shares=own(1, 2, 1))
    assert (batch.samples, dataset.loaded) == (1, [0])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_processes_change_nothing(workers: int) -> None:
    (whole,) = fork_workers(lambda _: global_batches(Counting(13), 4, 2, 2, workers=workers, seed=1), 1)
    assert [i for batch in whole for i in batch] == sample_order(13, 0, 1)


def test_samples_of_any_form() -> None:
    samples = [{"x": torch.full((2,), float(i)), "pair": (i, [i, i])} for i in range(5)]
    (first, second) = load_batches(samples, 3, shares=own(1, 1, 0), shuffle=False)
    assert [leaf.shape[0] for leaf in first.leaves] == [3] * 4
    assert second.leaves[1].tolist() == [3, 4]


def test_the_users_own_collate() -> None:
    (batch,) = load_batches(
        ["a", "bc"], 2, shares=own(1, 1, 0), shuffle=False, collate=lambda s: torch.tensor([len(t) for t in s])
    )
    assert batch.leaves[0].tolist() == [1, 2]


WORDS = [torch.zeros(length) for length in (1, 3, 2, 4)]


@pytest.mark.parametrize("dataset", [WORDS, iter(WORDS)], ids=["list", "iterable"])
def test_rows_that_are_not_samples_are_of_a_whole_batch(dataset: Any) -> None:
    """Words of several texts in a row: the model takes each row for a sample, as where it is called by itself."""
    (batch,) = load_batches(dataset, 4, shares=own(2, 1, 0), shuffle=False, collate=torch.cat)
    assert batch.samples == 10 and batch.is_whole
    assert [len(batch.leaves_of(share)[0]) for share in own(2, 1, 0)(10)] == [5, 5]


@pytest.mark.parametrize("dataset", [WORDS, iter(WORDS)], ids=["list", "iterable"])
def test_rows_that_are_not_samples_are_not_loaded_in_parts(dataset: Any) -> None:
    with pytest.raises(PolylaneError, match=r"^batch 1 of epoch 1: collate\(samples\) made 4 rows of 2 samples"):
        next(load_batches(dataset, 4, shares=own(1, 2, 0), shuffle=False, collate=torch.cat))


# A short last batch


@pytest.mark.parametrize("dataset", [Stream(11), list(range(11)), Counting(11)], ids=["iterable", "list", "map"])
def test_a_short_last_batch_may_be_left_out(dataset: Any) -> None:
    whole = global_batches(dataset, 4, 2, 2, shuffle=False, drop_last=True)
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert global_batches(Counting(8), 4, 2, 2, shuffle=False, drop_last=True) == whole
    with pytest.raises(PolylaneError, match="the dataset has 11 samples, no batch of 12, and a shorter one is to be"):
        global_batches(dataset, 12, 1, 1, drop_last=True)


def test_a_batch_knows_the_shortest_of_its_epoch() -> None:
    def shortest(dataset: Any, **options: Any) -> list[int]:
        return [batch.shortest for batch in load_batches(dataset, 4, shares=own(1, 1, 0), **options)]

    assert shortest(Counting(9)) == [1, 1, 1] and shortest(Counting(8)) == shortest(Counting(9), drop_last=True) == [
        4,
        4,
    ]
    assert shortest(Stream(9)) == [4, 4, 1]  # of a stream only what has come is known


# What a dataset draws


class Noisy(Counting):
    """Augmentation: every sample is its number, and what three generators draw."""

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        self.loaded.append(index)
        return torch.stack(
            [torch.tensor(float(index)), torch.rand(()), torch.tensor(random.random() + np.random.rand())]
        )


def drawn(dataset: Any, microbatches: int, replicas: int, **options: Any) -> dict[int, list[float]]:
    """Sample number -> what it drew, over all replicas."""
    torch.manual_seed(replicas)  # other workers, other states
    random.seed(replicas)
    before = torch.get_rng_state(), random.getstate()
    rows = [row for batch in global_batches(dataset, 5, microbatches, replicas, **options) for row in batch]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    return {int(number): rest for number, *rest in rows}


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_sample_draws_does_not_depend_on_the_layout(workers: int) -> None:
    alone = drawn(Noisy(12), 1, 1, seed=3)
    assert len({tuple(rest) for rest in alone.values()}) == 12
    assert fork_workers(lambda _: drawn(Noisy(12), 2, 3, seed=3, workers=workers), 1) == [alone]
    assert drawn(Noisy(12), 2, 3, seed=3, epoch=1) != alone
    assert drawn(Noisy(12), 2, 3, seed=4) != alone


def test_what_a_stream_draws_does_not_depend_on_the_layout() -> None:
    class NoisyStream(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from (torch.stack([torch.tensor(float(i)), torch.rand(())]) for i in range(self.samples))

    alone = drawn(NoisyStream(12), 1, 1, seed=3)
    assert len(alone) == len({tuple(rest) for rest in alone.values()}) == 12
    assert drawn(NoisyStream(12), 2, 3, seed=3) == alone
    assert drawn(NoisyStream(12), 1, 1, seed=3, epoch=1) != alone


def test_a_dataset_that_draws_nothing_is_asked_once() -> None:
    quiet, noisy = Counting(10), Noisy(10)
    for dataset in (quiet, noisy):
        list(load_batches(dataset, 5, shares=own(1, 1, 0)))
    assert len(quiet.loaded) == 10
    assert len(noisy.loaded) == 15  # the first batch twice


# What is refused


@pytest.mark.parametrize("dataset", [[], Counting(0), Stream(0), iter(())], ids=["list", "map", "iterable", "iterator"])
def test_no_samples(dataset: Any) -> None:
    with pytest.raises(PolylaneError, match="the dataset has no samples"):
        list(load_batches(dataset, 4, shares=own(1, 1, 0)))


def test_no_dataset() -> None:
    with pytest.raises(
        PolylaneError, match="data must be a dataset, map-style or iterable, or a list of samples, not a int"
    ):
        list(load_batches(7, 4, shares=own(1, 1, 0)))


def test_a_loader_is_no_dataset() -> None:
    with pytest.raises(PolylaneError, match=r"a DataLoader makes batches already, .*loader.dataset"):
        next(load_batches(DataLoader(Counting(8), batch_size=4), 4, shares=own(1, 1, 0)))
    samples = DataLoader(Counting(8), batch_size=None)  # which makes none
    assert [batch.samples for batch in load_batches(samples, 4, shares=own(1, 1, 0))] == [4, 4]


class Curriculum(Counting):
    """Sample i is the number i in the first epoch, and 100 more in each further one."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return super().__getitem__(index) + 100 * self.epoch


class CurriculumStream(Stream):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (i + 100 * self.epoch for i in range(self.samples))


@pytest.mark.parametrize(
    "make", [Curriculum, CurriculumStream, lambda n: torch.utils.data.Subset(Curriculum(n), range(n))]
)
def test_a_dataset_is_told_the_epoch(make: Any) -> None:
    dataset = make(6)
    for epoch in (0, 2):
        (batch,) = load_batches(dataset, 6, shares=own(1, 1, 0), epoch=epoch, shuffle=False)
        assert batch.leaves[0].tolist() == [100 * epoch + i for i in range(6)]


def test_wrapped_datasets_and_samplers_are_told_the_epoch() -> None:
    first, second = Curriculum(2), Curriculum(3)
    begin_epoch(torch.utils.data.ConcatDataset([first, second]), 4)
    sampler = torch.utils.data.DistributedSampler(Counting(4), 2, 0)
    begin_epoch(DataLoader(second, batch_size=None, sampler=sampler), 5)
    assert (first.epoch, second.epoch, sampler.epoch) == (4, 5, 5)


def test_what_all_read_whole_is_not_what_is_audited() -> None:
    """Audits are at batches 1, 2, 4, 8, ... and the first of an epoch: there workers read as they mostly do."""

    def find_whole(batches: int, start: int) -> list[int]:
        parts = _find_own([[0, 1]] * batches, lambda samples: (SampleShare(0, 0, 1, 1),), start)
        return [number for number, part in enumerate(parts, start + 1) if len(part) == 2]

    assert find_whole(30, 0) == [1, 3, 6, 12, 24]
    assert find_whole(4, 8) == [10, 12] and find_whole(1, 8) == [9] and find_whole(2, 1) == [3]
