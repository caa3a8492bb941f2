"""Order of samples: a function of seed and epoch alone, so that every worker has the same without communication."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from polylane.errors import PolylaneError, describe_error
from polylane.graph.python_state.random_generators import seeded

MOST_TIMES = 1000  # as many indices as a dataset has samples, which a sampler may give in an epoch
MOST_SAMPLES = 1 << 40  # of a dataset with a length: the order of an epoch would take tens of terabytes

# Makes a sampler, or any series of indices, of a dataset.
SamplerFactory = Callable[[Any], Iterable[int]]

# Batches whose samples are sorted by length together: samples of a batch are alike then, and the order stays random.
POOL_BATCHES = 50


def sample_order(samples: int, epoch: int, seed: int) -> list[int]:
    """Return a permutation of all sample indices, a function of seed and epoch alone."""
    refuse_endless(samples)
    generator = torch.Generator().manual_seed(_mix(seed, epoch))
    permutation: list[int] = torch.randperm(samples, generator=generator, device="cpu").tolist()
    return permutation


def _mix(seed: int, epoch: int) -> int:
    # A large prime factor, so that neighbouring (seed, epoch) pairs do not share a permutation; kept non-negative.
    return (seed * 1_000_003 + epoch) & 0x7FFFFFFFFFFFFFFF


def refuse_endless(samples: int) -> None:
    """Refuse a number of samples that no order can be made of.

    Raises:
        PolylaneError: there are more than :data:`MOST_SAMPLES`.
    """
    if samples > MOST_SAMPLES:
        raise PolylaneError(
            f"len() of the dataset is {samples:,}, and an epoch is an order of all samples: give data without an end "
            "as an iterable dataset"
        )


def order_by_sampler(sampler: SamplerFactory, dataset: Any, epoch: int, seed: int) -> list[int]:
    """Return the indices that a sampler gives in an epoch, a function of seed and epoch alone.

    The sampler is made anew for each epoch, while all global generators are seeded; one that has a generator of its
    own gets that seeded, too, and one with ``set_epoch`` is told the epoch.

    Args:
        sampler: the user's function, which makes it of the dataset.
        dataset: the map-style dataset of the indices.
        epoch: number of the epoch, from 0.
        seed: of the training, equal on every worker.

    Raises:
        PolylaneError: it gives no indices of the dataset, or none at all.
    """
    size = len(dataset)
    limit = MOST_TIMES * size
    with seeded(seed, epoch):
        series = sampler(dataset)
        if not isinstance(series, Iterable):
            raise PolylaneError(
                f"sampler(dataset) must return indices one after the other, not {describe_kind(series)}"
            )
        if callable(set_epoch := getattr(series, "set_epoch", None)):
            set_epoch(epoch)
        if isinstance(generator := getattr(series, "generator", None), torch.Generator):
            generator.manual_seed(_mix(seed, epoch))
        try:
            order = list(itertools.islice(series, limit + 1))
        except PolylaneError:
            raise
        except Exception as error:
            raise PolylaneError(f"the sampler of sampler(dataset) raised {describe_error(error)}") from error
    if len(order) > limit:
        raise PolylaneError(
            f"sampler(dataset) gave more than {limit:,} indices, {MOST_TIMES} times those of the dataset: it must end, "
            "and is made anew for the next epoch"
        )
    for index in order:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
            kind = f"{index}" if isinstance(index, int) else describe_kind(index)
            raise PolylaneError(
                f"sampler(dataset) gave {kind}, and the dataset's indices are 0 to {size - 1:,}: give one after the "
                "other, which the batch size divides into batches"
            )
    if not order:
        raise PolylaneError("sampler(dataset) gave no samples")
    return order


def describe_kind(value: Any) -> str:
    """Return what a value is, for a sentence: ``a list``, ``None``."""
    return "None" if value is None else f"a {type(value).__name__}"


def choose_order(dataset: Any, sampler: SamplerFactory | None, shuffle: bool, epoch: int, seed: int) -> list[int]:
    """Return the order of an epoch: that of a sampler, shuffled, or as the dataset is.

    Args:
        dataset: map-style, so that its samples have indices.
        sampler: the user's function, see :func:`order_by_sampler`; None: there is none.
        shuffle: whether the order is a permutation; else it is the dataset's.
        epoch: number of the epoch, from 0.
        seed: of the training, equal on every worker.
    """
    if sampler is not None:
        return order_by_sampler(sampler, dataset, epoch, seed)
    return sample_order(len(dataset), epoch, seed) if shuffle else [*range(len(dataset))]


class LengthSampler(Sampler[int]):
    """Samples of similar lengths after each other, so that little of a batch is padding; else in random order.

    All samples are shuffled, cut into pools of fifty batches, and each pool is sorted; then all batches are shuffled.
    Of the whole batches the first has the longest sample, so that a lack of memory shows at once.

    Args:
        lengths: of every sample of the dataset, in any unit.
        batch: number of samples of a step.
        generator: draws the order; default: torch's global one.

    Examples:
        >>> import torch, polylane
        >>> lengths = [3, 50, 4, 52, 51, 2]
        >>> sampler = polylane.LengthSampler(lengths, batch=3, generator=torch.Generator().manual_seed(0))
        >>> [lengths[index] for index in sampler]
        [52, 51, 50, 4, 3, 2]

        In a recipe, ``sampler(dataset)`` returns one:

        >>> def sampler(dataset, batch=32):
        ...     return polylane.LengthSampler([len(tokens) for tokens in dataset], batch)
    """

    def __init__(self, lengths: Sequence[int], batch: int, generator: torch.Generator | None = None) -> None:
        if batch < 1:
            raise PolylaneError(f"LengthSampler(lengths, batch): batch must be 1 or more, not {batch}")
        self._lengths, self._batch, self.generator = lengths, batch, generator

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        order: list[int] = torch.randperm(len(self), generator=self.generator).tolist()
        pool = self._batch * POOL_BATCHES
        batches = list[list[int]]()
        for start in range(0, len(order), pool):
            ordered = sorted(order[start : start + pool], key=lambda index: self._lengths[index], reverse=True)
            batches += [ordered[at : at + self._batch] for at in range(0, len(ordered), self._batch)]
        # A short batch can only be the last one: all others keep to their bounds.
        remainder = [batches.pop()] if batches and len(batches[-1]) < self._batch else []
        shuffled = [batches[at] for at in torch.randperm(len(batches), generator=self.generator).tolist()]
        longest = max(range(len(shuffled)), key=lambda at: self._lengths[shuffled[at][0]], default=0)
        if shuffled:
            shuffled[0], shuffled[longest] = shuffled[longest], shuffled[0]
        for batch in [*shuffled, *remainder]:
            yield from batch


def count_samples(dataset: Sized, sampler: SamplerFactory | None, seed: int) -> int:
    """Return the number of samples of an epoch: the dataset's, or as many as the sampler gives in the first one."""
    return len(dataset) if sampler is None else len(order_by_sampler(sampler, dataset, 0, seed))
