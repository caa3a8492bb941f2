"""Distributed data loading: the sample order depends on seed and epoch alone; a worker loads only its local samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from polylane.compile.sample_shares import Batch, BatchForm, SampleShare, share_offsets
from polylane.errors import PolylaneError
from polylane.graph.batch import flatten
from polylane.runtime.data.seeded_draws import SeededDataset, SeededStream

Collate = Callable[[list[Any]], Any]
Shares = Callable[[int], Sequence[SampleShare]]


def load_batches(
    dataset: Any,
    batch_size: int,
    *,
    shares: Shares,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    collate: Collate | None = None,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield one epoch over a dataset: every sample once; the last batch may be shorter.

    Args:
        dataset: map-style (``len`` and ``[]``, so a list of samples too), or iterable.
        batch_size: number of samples in a global batch, over all workers.
        shares: maps the size of a global batch to the sample ranges that this worker computes on.
        epoch: number of the epoch from 0; with ``seed`` it decides the order (of map-style datasets) and all random
            numbers that the dataset draws.
        seed: integer seed of the training, equal on every worker.
        shuffle: whether a map-style dataset is permuted; iterable ones always keep their own order.
        drop_last: leave out a last batch that is shorter than ``batch_size``.
        collate: turns a list of samples into a batch; default: torch's ``default_collate``.
        workers: number of processes that load ahead, as ``num_workers`` of torch's DataLoader; map-style only.

    Raises:
        PolylaneError: the dataset is neither map-style nor iterable, is a DataLoader, has no samples, or has too few
            for a single batch with ``drop_last``.
    """
    refuse_data_loader(dataset, "batches(dataset, ...)")
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        sizes = batch_sizes(len(dataset), batch_size, drop_last)
        indices = sample_order(len(dataset), epoch, seed) if shuffle else list(range(len(dataset)))
        yield from _load_mapped(dataset, indices, sizes, shares, (seed, epoch), collate, workers)
    elif isinstance(dataset, Iterable):
        stream = SeededStream(seed, epoch)
        yield from _load_streamed(dataset, batch_size, drop_last, shares, stream, collate)
    else:
        raise PolylaneError(
            f"data must be a dataset, map-style or iterable, or a list of samples, not a {type(dataset).__name__}"
        )


def refuse_data_loader(dataset: Any, what: str) -> None:
    """Refuse a DataLoader where a dataset of samples is needed.

    Args:
        dataset: the object that the user passed as a dataset.
        what: name of the call or argument, which begins the error's sentence.

    Raises:
        PolylaneError: ``dataset`` is a DataLoader, whose batches would be taken for samples.
    """
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        raise PolylaneError(
            f"{what}: a DataLoader makes batches already, and a dataset of samples is wanted: give its dataset "
            "(loader.dataset), and its collate_fn as collate; --batch, or batch_size, says how many samples a batch has"
        )


def sample_order(samples: int, epoch: int, seed: int) -> list[int]:
    """Return a permutation of all sample indices, a function of seed and epoch alone."""
    # A large prime factor, so that neighbouring (seed, epoch) pairs do not share a permutation; kept non-negative.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) & 0x7FFFFFFFFFFFFFFF)
    permutation: list[int] = torch.randperm(samples, generator=generator).tolist()
    return permutation


def batch_sizes(samples: int, size: int, drop_last: bool = False) -> list[int]:
    """Return the number of samples of each batch of an epoch.

    Raises:
        PolylaneError: there are no samples, or too few for a single batch with ``drop_last``.
    """
    if samples == 0:
        raise PolylaneError("the dataset has no samples")
    full, left = divmod(samples, size)
    if not full and drop_last:
        raise _no_batches_error(samples, size)
    return [size] * full + ([left] if left and not drop_last else [])


def count_batch_sizes(dataset: Any, size: int, drop_last: bool = False) -> Iterator[int]:
    """Yield the number of samples of each batch of an epoch; an iterable dataset is read through once for that."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        yield from batch_sizes(len(dataset), size, drop_last)
        return
    stream = iter(dataset)
    while count := sum(1 for _ in itertools.islice(stream, size)):
        if count == size or not drop_last:
            yield count


def _no_batches_error(samples: int, size: int) -> PolylaneError:
    return PolylaneError(f"the dataset has {samples} samples, no batch of {size}, and a shorter one is to be dropped")


def _load_mapped(
    dataset: Any,
    indices: Sequence[int],
    sizes: Sequence[int],
    shares: Shares,
    draws: tuple[int, int],
    collate: Collate | None,
    workers: int,
) -> Iterator[Batch]:
    # The global order is a function of the seed, so every worker finds its own indices without communication. Only
    # these reach the batch sampler: samples of other workers are never loaded here.
    ends = itertools.accumulate(sizes, initial=0)
    whole = [indices[start:stop] for start, stop in itertools.pairwise(ends)]
    own = [[batch[i] for share in shares(len(batch)) for i in range(share.start, share.stop)] for batch in whole]
    loader = DataLoader(
        SeededDataset(dataset, *draws),
        batch_sampler=own,
        collate_fn=collate or default_collate,
        num_workers=workers,
        generator=torch.Generator(),  # DataLoader draws a base seed: not from the user's default generator
    )
    for batch, local in zip(whole, loader, strict=True):
        leaves, _ = flatten(local)
        yield Batch(
            len(batch),
            leaves,
            share_offsets(shares(len(batch))),
            shortest=min(sizes),
            form=BatchForm.of_batch(local),
            is_collated=collate is not None,
        )


def _load_streamed(
    dataset: Iterable[Any],
    size: int,
    drop_last: bool,
    shares: Shares,
    generators: SeededStream,
    collate: Collate | None,
) -> Iterator[Batch]:
    # A stream has no index: every worker reads all of it, with equal random states, and collates its local samples.
    with generators:
        stream = iter(dataset)
    first = True
    while True:
        # Only while the dataset runs are its generators installed: the caller's code between batches has its own.
        with generators:
            samples = list(itertools.islice(stream, size))
        # A dataset that is a multiple of the batch size ends with an empty read, not with a shorter batch.
        if not samples or (drop_last and len(samples) < size):
            break
        first = False
        own = shares(len(samples))
        local = (collate or default_collate)([samples[i] for share in own for i in range(share.start, share.stop)])
        leaves, _ = flatten(local)
        form, padded = BatchForm.of_batch(local), collate is not None
        yield Batch(len(samples), leaves, share_offsets(own), form=form, is_collated=padded)
    if first:
        raise _no_batches_error(len(samples), size) if samples else PolylaneError("the dataset has no samples")
