"""Batches in an order that depends on the seed alone; each worker loads only the samples that it computes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from polylane.errors import PolylaneError
from polylane.graph.batch import flatten
from polylane.runtime.division import Batch, Share, offsets
from polylane.runtime.draws import Keyed, Stream

Collate = Callable[[list[Any]], Any]
Shares = Callable[[int], Sequence[Share]]


def batches(
    dataset: Any,
    batch_size: int,
    *,
    shares: Shares,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    collate: Collate | None = None,
    workers: int = 0,
) -> Iterator[Batch]:
    """One epoch over a dataset, every sample once, the last batch with what is left.

    Args:
        dataset: map-style (``len`` and ``[]``, a list too), or iterable.
        batch_size: samples in a whole batch, over all workers.
        shares: which samples of a batch of some size this worker computes on.
        epoch: sets the order, and what the dataset draws, together with ``seed``; iterable datasets keep their order.
        collate: samples -> batch; default: torch's default_collate.
        workers: processes that load ahead, as in torch's DataLoader.

    Raises:
        PolylaneError: the dataset is neither, or has no samples.
    """
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        yield from _mapped(dataset, batch_size, shares, epoch, seed, shuffle, collate or default_collate, workers)
    elif isinstance(dataset, Iterable):
        yield from _streamed(dataset, batch_size, shares, Stream(seed, epoch), collate or default_collate)
    else:
        raise PolylaneError(
            f"data must be a dataset, map-style or iterable, or a list of samples, not a {type(dataset).__name__}"
        )


def order(samples: int, epoch: int, seed: int) -> list[int]:
    """A permutation of all samples: a function of seed and epoch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) & 0x7FFFFFFFFFFFFFFF)
    permutation: list[int] = torch.randperm(samples, generator=generator).tolist()
    return permutation


def _mapped(
    dataset: Any, size: int, shares: Shares, epoch: int, seed: int, shuffle: bool, collate: Collate, workers: int
) -> Iterator[Batch]:
    if len(dataset) == 0:
        raise PolylaneError("the dataset has no samples")
    indices = order(len(dataset), epoch, seed) if shuffle else list(range(len(dataset)))
    whole = [indices[start : start + size] for start in range(0, len(indices), size)]
    own = [[batch[i] for share in shares(len(batch)) for i in range(share.start, share.stop)] for batch in whole]
    loader = DataLoader(
        Keyed(dataset, seed, epoch),
        batch_sampler=own,
        collate_fn=collate,
        num_workers=workers,
        generator=torch.Generator(),  # it draws a seed, and not from the user's generator
    )
    for batch, local in zip(whole, loader, strict=True):
        leaves, _ = flatten(local)
        yield Batch(len(batch), leaves, offsets(shares(len(batch))))


def _streamed(
    dataset: Iterable[Any], size: int, shares: Shares, generators: Stream, collate: Collate
) -> Iterator[Batch]:
    with generators:
        stream = iter(dataset)
    first = True
    while True:
        with generators:
            samples = list(itertools.islice(stream, size))
        if not samples:
            break
        first = False
        own = shares(len(samples))
        leaves, _ = flatten(collate([samples[i] for share in own for i in range(share.start, share.stop)]))
        yield Batch(len(samples), leaves, offsets(own))
    if first:
        raise PolylaneError("the dataset has no samples")
