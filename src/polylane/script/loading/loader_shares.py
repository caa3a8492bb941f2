"""Loader shares: a prepared loader whose batches are divided among replicas reads of each the samples of its worker.

The order is drawn by the script's own samplers, the same on every worker; each takes the positions that it computes on.

    before the plan's programs are compiled    whole batches
    the first batch under the plan             a trial in another process: do its samples depend on who reads them?
    batches 1, 3, 6, 12, ...                   whole, and compared between workers
    others                                     this worker's samples; the order is compared

A data set that draws random numbers, a collate function of the script's own, a batch with texts, or a script whose
computations mix samples before a model is called: whole batches are read, which is said once.
"""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from polylane.errors import PolylaneError
from polylane.graph.batch import flatten
from polylane.graph.python_state.random_generators import generator_states, states_equal
from polylane.plan.fixed_keys import parse_auto
from polylane.plan.plan import AnyPlan
from polylane.plan.spec import parse
from polylane.runtime.data.loader import find_next_whole
from polylane.runtime.data.read_trial import try_reads
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.workers.world import World
from polylane.script.loading.loaded_batch import LoadedBatch
from polylane.script.role import ScriptRole

WHOLE_BATCHES = "polylane.prepare(..., whole_batches=True)"


class BatchRecorder(Protocol):
    """What a loader's batches are given to: see :class:`polylane.script.loop.TrainingLoop`."""

    @property
    def world(self) -> World:
        """This worker among all workers."""

    @property
    def role(self) -> ScriptRole | None:
        """This worker's role in the training under the plan; None before that."""

    def defer_batch(self, batch: LoadedBatch) -> list[Tensor]:
        """Return deferred tensors of a batch's."""


def share_loaders(loaders: Sequence[DataLoader[Any]], recorder: BatchRecorder) -> list[LoaderShares]:
    """Have loaders read of each batch what this worker computes on, where there are several workers.

    Args:
        loaders: those that prepare() was given, in order.
        recorder: what records the script's computations.
    """
    if recorder.world.size == 1:
        return []
    shared = (_share_loader(loader, number, recorder) for number, loader in enumerate(loaders))
    return [shares for shares in shared if shares is not None]


def _share_loader(loader: DataLoader[Any], number: int, recorder: BatchRecorder) -> LoaderShares | None:
    """Have a loader read of each batch what this worker computes on; None where it reads whole batches.

    Args:
        loader: the script's loader, whose class becomes one derived from it.
        number: of the loader among those of the script.
        recorder: what records the script's computations.
    """
    if "loader_shares" in vars(loader):
        return None
    kind: Any = type(loader)
    shares = LoaderShares(loader, number, recorder)
    if reason := _why_whole(loader, kind):
        shares.read_whole(reason)
        return None
    vars(loader)["loader_shares"] = shares
    loader.__class__ = _sharing_class(kind)
    return shares


def divides_batches(plan: str | AnyPlan) -> bool:
    """Return whether a plan may divide batches among replicas."""
    if isinstance(plan, str):
        return parse_auto(plan) is not None or parse(plan).data > 1
    return plan.data > 1


def _why_whole(loader: DataLoader[Any], kind: Any) -> str:
    """Return why samples of a loader's batches cannot be read alone; "" where a trial may show that they can.

    Args:
        loader: as it is at the beginning of a pass.
        kind: the class that the script gave it.
    """
    if kind.__iter__ is not DataLoader.__iter__:
        return f"{kind.__name__} is a loader that makes its batches in an __iter__ of its own"
    if getattr(loader, "_iterator", None) is not None:
        return "the processes of the loader have begun to read before prepare() was called"
    if isinstance(loader.dataset, IterableDataset):
        return "an iterable data set has no samples by number"
    if loader.batch_sampler is None:
        return "a loader without batch_size has batches that are not made of samples"
    if loader.collate_fn is not default_collate:
        return "the loader's collate_fn may depend on all samples of a batch"
    return "" if getattr(loader, "in_order", True) else "the loader does not keep the order of batches"


@functools.cache
def _sharing_class(kind: Any) -> Any:
    """Return a class of loaders that read shares, and which are all else that ``kind`` is."""

    def begin_pass(loader: Any) -> Iterator[Any]:
        shares: LoaderShares = vars(loader)["loader_shares"]
        if reason := _why_whole(loader, kind):  # a collate_fn that was assigned since
            shares.read_whole(reason)
            return DataLoader.__iter__(loader)
        return SharedPass(shares, loader)

    begin_pass.passes_over = True  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"__iter__": begin_pass, "__module__": kind.__module__})


class LoaderShares:
    """What of a loader's batches the workers read.

    Args:
        loader: the script's loader, which stays as it is.
        number: of the loader among those of the script.
        recorder: what records the script's computations.

    Attributes:
        reads_whole: whether every worker reads whole batches, which the script sees as they are.
    """

    def __init__(self, loader: DataLoader[Any], number: int, recorder: BatchRecorder) -> None:
        self.reads_whole, self._number, self._recorder = False, number, recorder
        self._loader, self._reader = loader, None
        self._has_tried, self._batches = False, 0  # batches under the plan
        self._role: ScriptRole | None = None  # of the training under the plan, while batches are under way

    @property
    def world(self) -> World:
        """This worker among all workers."""
        return self._recorder.world

    # ---- reading -----------------------------------------------------------------------------------------------------

    def make_reader(self, loader: DataLoader[Any]) -> Any:
        """Return a loader like the script's, or like the rest of a pass of it, that reads shares."""
        if loader is self._loader and self._reader is not None:
            return self._reader
        reader: Any = copy.copy(loader)
        collate = _WatchedCollate()
        vars(reader).update(
            batch_sampler=_ShareSampler(loader.batch_sampler),
            collate_fn=collate,
            worker_init_fn=_WatchedStart(loader, collate),
        )
        if loader is self._loader and loader.persistent_workers:
            self._reader = reader
        return reader

    def choose(self, indices: Sequence[Any]) -> Sequence[Any]:
        """Return the indices that this worker reads of a batch, the same object if all read all; may be collective."""
        role = self._role = self._recorder.role or self._role
        if self.reads_whole or role is None or _number_samples(indices) is None:
            return indices
        positions = role.rows.find_positions(len(indices))
        if positions is None:
            return indices
        if not self._has_tried:
            self._has_tried = True
            self._try_reading(role, indices, positions)
            if self.reads_whole:
                return indices
        number, self._batches = self._batches, self._batches + 1
        if number in (0, find_next_whole(number - 1)):
            return indices
        return [indices[i] for i in positions]

    @collective("the loader's next batch")
    def _try_reading(self, role: ScriptRole, indices: Sequence[Any], positions: Sequence[int]) -> None:
        """Read a batch in another process, whole and in part; read whole batches from then on if that differs."""
        dataset: Any = self._loader.dataset
        reason = ""
        if type(dataset) not in (list, tuple):

            def read(numbers: Sequence[Any]) -> list[Any]:
                load_all = getattr(dataset, "__getitems__", None)
                samples = [dataset[i] for i in numbers] if load_all is None else load_all(list(numbers))
                return [*samples, generator_states()]  # alike, if nothing was drawn

            part = [*positions, len(indices)], lambda: read([indices[i] for i in positions])
            reason = try_reads(lambda: read(indices), part, [dataset], None).reason
        if reason := next(filter(None, role.exchange(reason)), ""):
            self.read_whole(reason)

    def read_whole(self, reason: str) -> None:
        """Have every worker read whole batches from now on; ``reason`` ends the sentence that says so."""
        if not self.reads_whole and reason and self._recorder.world.rank == 0:
            warnings.warn(f"every worker reads whole batches, for {reason}", stacklevel=2)
        self.reads_whole = True

    # ---- batches -----------------------------------------------------------------------------------------------------

    def defer(self, batch: Any, indices: Sequence[Any], read_indices: Sequence[Any]) -> Any:
        """Return a batch as the script sees it; collective where it was read in part, and is to be seen whole.

        Args:
            batch: what this worker has read.
            indices: of all samples of the batch.
            read_indices: of the samples that this worker has read; the same object where all workers have read all.
        """
        (leaves, rebuild), is_whole = flatten(batch), read_indices is indices
        if not self.reads_whole and not (leaves and all(_has_samples(leaf, len(read_indices)) for leaf in leaves)):
            if not is_whole:
                raise PolylaneError(
                    "a batch of the loader has something else than tensors with a row for each sample, which those "
                    f"before had not: have every worker read whole batches, by {WHOLE_BATCHES}"
                )
            self.read_whole("a batch of the loader has something else than tensors with a row for each sample")
        if self.reads_whole and is_whole:
            return batch
        order = hash((self._number, *(_number_samples(indices) or ()))) or 1
        loaded = LoadedBatch(self, leaves, len(indices), is_whole, order)
        if self.reads_whole:
            return rebuild([rows.whole for rows in loaded.rows])
        return rebuild(self._recorder.defer_batch(loaded))

    @collective("the batch's values")
    def gather(self, rows: Tensor, samples: int) -> Tensor:
        """Return the rows that the workers have read of a batch as one tensor; collective."""
        assert self._role is not None
        return self._role.rows.gather(rows, samples)


class SharedPass:
    """One pass through a loader of which each worker reads its share.

    Args:
        shares: what workers read of the loader.
        loader: the script's loader, or one of the rest of a pass of it.
    """

    def __init__(self, shares: LoaderShares, loader: DataLoader[Any]) -> None:
        self._shares, self._chosen = shares, deque[tuple[Sequence[Any], Sequence[Any]]]()
        reader = shares.make_reader(loader)
        reader.batch_sampler.choose = self._choose
        self._collate: _WatchedCollate = reader.collate_fn
        self._batches = DataLoader.__iter__(reader)

    def _choose(self, indices: Any) -> Sequence[Any]:
        indices = indices if isinstance(indices, Sized) else list(indices)
        read_indices = self._shares.choose(indices)
        self._chosen.append((indices, read_indices))
        self._collate.watch()
        return read_indices

    def __iter__(self) -> SharedPass:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        batch, has_drawn = next(self._batches)
        indices, read_indices = self._chosen.popleft()
        if has_drawn and read_indices is not indices:
            raise PolylaneError(
                "the data set draws random numbers for some samples only, and every worker reads others: draw for each "
                f"sample or for none, or have every worker read whole batches, by {WHOLE_BATCHES}"
            )
        return self._shares.defer(batch, indices, read_indices)


class _ShareSampler:
    """Batches of indices, of which a pass chooses those that this worker reads.

    Args:
        batch_sampler: yields the indices of whole batches.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self.choose: Callable[[Any], Sequence[Any]] = lambda indices: indices

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return map(self.choose, self._batch_sampler)

    def __len__(self) -> int:
        return len(self._batch_sampler)


class _WatchedCollate:
    """torch's collate, which also returns whether the data set has drawn random numbers for the batch."""

    def __init__(self) -> None:
        self._states: Any = None

    def watch(self) -> None:
        """Begin to read a batch, in the process that reads it."""
        self._states = generator_states()

    def __call__(self, samples: Any) -> tuple[Any, bool]:
        states = generator_states()
        has_drawn = self._states is not None and not states_equal(self._states, states)
        self._states = states  # in a loading process the next batch is read from here on
        return default_collate(samples), has_drawn


class _WatchedStart:
    """Start of a process that loads: the script's own, and then its generators are watched."""

    def __init__(self, loader: DataLoader[Any], collate: _WatchedCollate) -> None:
        self._start, self._collate = loader.worker_init_fn, collate

    def __call__(self, number: int) -> None:
        if self._start is not None:
            self._start(number)
        self._collate.watch()


def _number_samples(indices: Any) -> tuple[int, ...] | None:
    """Return the numbers of samples; None where they have other names, or none."""
    try:
        return tuple(map(operator.index, indices)) or None if isinstance(indices, Sequence) else None
    except TypeError:
        return None


def _has_samples(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.shape[:1] == (samples,)
