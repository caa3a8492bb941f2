"""Distributed data loading: the sample order depends on seed and epoch alone; a worker loads only its local samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from polylane.compile.sample_shares import Batch, BatchForm, SampleShare, list_positions, share_offsets
from polylane.errors import PolylaneError, format_plural
from polylane.graph.batch import flatten, sample_count
from polylane.runtime.data.read_trial import ReadTrials
from polylane.runtime.data.sample_errors import RAISED, explain_batch, misfit_error, sample_error
from polylane.runtime.data.sample_order import SamplerFactory, choose_order, refuse_endless
from polylane.runtime.data.seeded_draws import SeededDataset, SeededStream
from polylane.runtime.data.stream_state import StreamState
from polylane.runtime.workers.forked_child import end_forked_children

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
    sampler: SamplerFactory | None = None,
    drop_last: bool = False,
    collate: Collate | None = None,
    workers: int = 0,
    prefetch: int | None = None,
    whole: bool = False,
    skip: int = 0,
    state: StreamState | None = None,
    trials: ReadTrials | None = None,
    compared: bool = False,
    resumed: bool = False,
) -> Iterator[Batch]:
    """Yield the batches of one epoch; the last one may be shorter.

    Args:
        dataset: map-style (``len`` and ``[]``, so a list of samples too), or iterable.
        batch_size: number of samples in a global batch, over all workers.
        shares: maps the size of a global batch to the sample ranges that this worker computes on.
        epoch: number of the epoch from 0; with ``seed`` it decides the order, and all numbers that the dataset draws.
        seed: of the training, equal on every worker.
        shuffle: whether a map-style dataset is permuted; iterable ones always keep their own order.
        sampler: makes the order of a map-style dataset, see :func:`order_by_sampler`; None: as ``shuffle`` says.
        drop_last: leave out a last batch that is shorter than ``batch_size``.
        collate: turns a list of samples into a batch; default: torch's ``default_collate``.
        workers, prefetch: processes that load ahead, and batches of each, as of torch's DataLoader; map-style only.
        whole: load all samples of every batch on this worker, which takes its own from them.
        skip: number of first samples of the epoch's order that are passed over; iterable datasets read them.
        state: follows an iterable dataset, and puts it where a checkpoint knows that it was.
        trials: show whether a map-style dataset may be read in parts; None: it may.
        compared: whether what workers have read is compared; then now and then each reads a whole batch.
        resumed: whether the training resumes from a checkpoint in this epoch.

    Raises:
        PolylaneError: it is no dataset, or a DataLoader, or has too few samples for a single batch.
    """
    refuse_data_loader(dataset, "batches(dataset, ...)")
    begin_epoch(dataset, epoch)
    shares = share_of_all if whole else shares
    if is_mapped(dataset):
        order, draws = choose_order(dataset, sampler, shuffle, epoch, seed), (seed, epoch)
        if not (batches := _divide_order(order, batch_size, drop_last, skip)):
            return
        if trials is not None:
            shares = _find_shares(trials, dataset, batches[0], shares, draws, collate, resumed)
        total = epoch * (len(batches) + (first_batch := skip // batch_size)) + first_batch
        parts = _find_own(batches, shares, total if compared else None)
        yield from _load_mapped(dataset, batches, parts, shares, draws, collate, (workers, prefetch), first_batch)
    elif isinstance(dataset, Iterable):
        stream = SeededStream(seed, epoch)
        yield from _load_streamed(dataset, batch_size, drop_last, shares, stream, collate, epoch, skip, state)
    else:
        raise _no_dataset_error(dataset)


def _divide_order(order: list[int], size: int, drop_last: bool, skip: int) -> list[list[int]]:
    """Return the indices of each batch of an epoch; none where all of it was passed over.

    Raises:
        PolylaneError: for the reasons of :func:`batch_sizes`.
    """
    remainder = len(order) - skip
    if skip and (remainder <= 0 or (drop_last and remainder < size)):
        return []
    ends = itertools.accumulate(batch_sizes(remainder, size, drop_last), initial=skip)
    return [order[start:stop] for start, stop in itertools.pairwise(ends)]


def is_mapped(dataset: Any) -> bool:
    """Return whether a dataset is map-style or a list: its samples have numbers.

    torch's IterableDataset inherits a ``__getitem__`` that only raises; many have a length as well.
    """
    has_items = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_items and not isinstance(dataset, IterableDataset)


def begin_epoch(dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a dataset, and of what it wraps (``dataset``, ``datasets``, ``sampler``), as loops do."""
    todo, seen_ids = [dataset], set[int]()
    while todo:
        if id(inner := todo.pop()) in seen_ids:
            continue
        seen_ids.add(id(inner))
        if callable(method := getattr(inner, "set_epoch", None)):
            method(epoch)
        else:  # what has the method hands it on itself
            wrapped = getattr(inner, "datasets", ())
            todo += [getattr(inner, name) for name in ("dataset", "sampler") if hasattr(inner, name)]
            todo += wrapped if isinstance(wrapped, list | tuple) else []


def share_of_all(samples: int) -> tuple[SampleShare, ...]:
    """Return the share of a worker that loads all samples of a batch."""
    return (SampleShare(0, 0, samples, 1),)


def refuse_data_loader(dataset: Any, label: str) -> None:
    """Refuse a DataLoader where a dataset of samples is needed.

    Args:
        dataset: the object that the user passed as a dataset.
        label: name of the call or argument, which begins the error's sentence.

    Raises:
        PolylaneError: ``dataset`` is a DataLoader, whose batches would be taken for samples.
    """
    if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
        raise PolylaneError(
            f"{label}: a DataLoader makes batches already, and a dataset of samples is wanted: give its dataset "
            "(loader.dataset), and its collate_fn as collate; --batch, or batch_size, says how many samples a batch has"
        )


def batch_sizes(samples: int, size: int, drop_last: bool = False) -> list[int]:
    """Return the number of samples of each batch of an epoch.

    Raises:
        PolylaneError: there are no samples, or too few for a single batch with ``drop_last``.
    """
    if samples == 0:
        raise PolylaneError("the dataset has no samples")
    refuse_endless(samples)
    full, remainder = divmod(samples, size)
    if not full and drop_last:
        raise _no_batches_error(samples, size)
    return [size] * full + ([remainder] if remainder and not drop_last else [])


def count_batch_sizes(dataset: Any, size: int, drop_last: bool = False, skip: int = 0) -> Iterator[int]:
    """Yield the number of samples of each batch of an epoch; an iterable dataset is read through once for that."""
    if is_mapped(dataset):
        if not skip:
            yield from batch_sizes(len(dataset), size, drop_last)
        elif (remainder := len(dataset) - skip) > 0 and not (drop_last and remainder < size):
            yield from batch_sizes(remainder, size, drop_last)
        return
    stream = itertools.islice(dataset, skip, None)
    while count := sum(1 for _ in itertools.islice(stream, size)):
        if count == size or not drop_last:
            yield count


def _no_dataset_error(value: Any) -> PolylaneError:
    kind = type(value).__name__
    return PolylaneError(f"data must be a dataset, map-style or iterable, or a list of samples, not a {kind}")


def _no_batches_error(samples: int, size: int) -> PolylaneError:
    return PolylaneError(
        f"the dataset has {format_plural(samples, 'sample')}, no batch of {size}, and a shorter one is to be dropped"
    )


def _find_shares(
    trials: ReadTrials,
    dataset: Any,
    batch: Sequence[int],
    shares: Shares,
    draws: tuple[int, int],
    collate: Collate | None,
    resumed: bool,
) -> Shares:
    """Return the samples of a batch that this worker reads: its own, or all where these would not be the same.

    A trial on the first batch shows that; ``batch`` are its indices, ``draws`` seed and epoch.

    Raises:
        PolylaneError: the training resumes from a checkpoint, with a dataset that keeps state.
    """
    positions = list_positions(shares(len(batch)))
    if not resumed and positions == list(range(len(batch))):
        return shares
    reads = trials.find(dataset, SeededDataset(dataset, *draws).__getitems__, batch, positions, collate)
    if resumed:
        reads.refuse_to_resume()
    return share_of_all if reads.reason else shares


def _find_own(batches: Sequence[list[int]], shares: Shares, start: int | None) -> list[list[int]]:
    """Return the indices of each batch whose samples this worker reads.

    Batches 1, 3, 6, 12, ... of a training, and the second of a later epoch or of a resumed one, are read whole by all
    workers, where they compare what they have read. Others are audited (1, 2, 4, 8, ...), as they are mostly read.

    Args:
        batches: the indices of each batch of an epoch.
        shares: maps the size of a batch to the samples that this worker computes on.
        start: number of the first of these batches among all of the training, from 0; None: nothing is compared.
    """
    parts = [[batch[i] for i in list_positions(shares(len(batch)))] for batch in batches]
    if start is None:
        return parts
    numbers = range(start, start + len(batches))
    flags = [number in (0, find_next_whole(number - 1)) or start + 1 == number > 1 for number in numbers]
    if not any(flags[:2]):  # an epoch of one batch
        flags[0] = True
    return [batch if is_whole else part for batch, part, is_whole in zip(batches, parts, flags, strict=True)]


def find_next_whole(number: int) -> int:
    """Return the number, from 0, of the next batch that all workers read whole, after one with a number."""
    count = 3
    while count - 1 <= number:
        count *= 2
    return count - 1


def _load_mapped(
    dataset: Any,
    order: Sequence[list[int]],
    parts: Sequence[list[int]],
    shares: Shares,
    draws: tuple[int, int],
    collate: Collate | None,
    processes: tuple[int, int | None],
    first_batch: int,
) -> Iterator[Batch]:
    # The global order is a function of the seed, so every worker finds its own indices without communication. Only
    # these reach the batch sampler: samples of other workers are never loaded here.
    seeded, collate_own = SeededDataset(dataset, *draws), collate or default_collate
    loader = DataLoader(
        seeded,
        batch_sampler=parts,
        collate_fn=collate_own,
        num_workers=processes[0],
        prefetch_factor=processes[1] if processes[0] else None,
        generator=torch.Generator(),  # DataLoader draws a base seed: not from the user's default generator
    )
    batches = iter(loader)
    for number, batch in enumerate(order):
        name = f"batch {first_batch + number + 1} of epoch {draws[1] + 1}"
        try:
            with end_forked_children():
                local = next(batches)
        except RAISED as error:
            raise explain_batch(
                name, lambda index: seeded.__getitems__([index])[0], parts[number], collate_own, error
            ) from error
        offsets = None if parts[number] == batch else share_offsets(shares(len(batch)))
        loaded = _make_batch(name, local, len(batch), len(parts[number]), offsets, len(order[-1]), collate is not None)
        yield replace(loaded, read_order=hash((draws[1], first_batch + number, *batch)) or 1)


def _load_streamed(
    dataset: Iterable[Any],
    size: int,
    drop_last: bool,
    shares: Shares,
    generators: SeededStream,
    collate: Collate | None,
    epoch: int,
    skip: int,
    state: StreamState | None,
) -> Iterator[Batch]:
    # A stream has no index: every worker reads all of it, with equal random states, and collates its local samples.
    is_there = state is not None and state.open(dataset, generators, epoch, skip)
    with generators:
        stream = iter(dataset)
        for _ in itertools.islice(stream, 0 if is_there else skip):
            pass
    is_empty, read, collate_own = not skip, skip, collate or default_collate
    for number in itertools.count(skip // size + 1):
        name, samples = f"batch {number} of epoch {epoch + 1}", list[Any]()
        # Only while the dataset runs are its generators installed: the caller's code between batches has its own.
        with generators:
            try:
                with end_forked_children():
                    samples.extend(itertools.islice(stream, size))
            except PolylaneError:
                raise
            except RAISED as error:
                raise sample_error(f"{name}: sample {read + len(samples)}", error) from error
        # A dataset that is a multiple of the batch size ends with an empty read, not with a shorter batch.
        if not samples or (drop_last and len(samples) < size):
            break
        is_empty = False
        local_shares = shares(len(samples))
        positions = list_positions(local_shares)
        try:
            local = collate_own([samples[i] for i in positions])
        except PolylaneError:
            raise
        except RAISED as error:
            raise misfit_error(name, [read + i for i in positions], [samples[i] for i in positions], error) from error
        read += len(samples)
        offsets = None if positions == list(range(len(samples))) else share_offsets(local_shares)
        loaded = _make_batch(name, local, len(samples), len(positions), offsets, 0, collate is not None)
        # Each worker has read all samples: a few of them are compared, the first and the last among them.
        few = {0, number % len(samples), len(samples) - 1}
        leaves = [leaf for i in sorted(few) for leaf in flatten(samples[i])[0]]
        yield replace(loaded, read_order=hash((epoch, number, len(samples))) or 1, read_samples=leaves)
    if is_empty:
        raise _no_batches_error(len(samples), size) if samples else PolylaneError("the dataset has no samples")


def _make_batch(
    name: str,
    local: Any,
    samples: int,
    loaded: int,
    offsets: dict[int, int] | None,
    shortest: int,
    is_collated: bool,
) -> Batch:
    """Wrap what was collated.

    Args:
        name: the batch, in words.
        local: the batch of this worker's samples.
        samples: number of samples of the whole batch.
        loaded: number of samples that this worker has loaded.
        offsets: see :class:`Batch`; None where it has loaded all of them.
        shortest: samples of the shortest batch of the epoch; 0 where that is not known.
        is_collated: whether a function of the user's own collated them.
    """
    (leaves, _), form, of_dataset = flatten(local), BatchForm.of_batch(local), samples
    rows = sample_count(leaves)
    if offsets is None:
        # What the model takes for samples are the rows: nodes of several graphs, words of several texts.
        samples = rows
    elif rows != loaded:
        raise PolylaneError(
            f"{name}: collate(samples) made {format_plural(rows, 'row')} of {format_plural(loaded, 'sample')} in the "
            "batch's first tensor, by whose rows a batch is divided: let a tensor with one row for each sample come "
            "first, such as their lengths"
        )
    return Batch(
        samples, leaves, offsets, shortest=shortest, form=form, is_collated=is_collated, loaded_samples=of_dataset
    )
