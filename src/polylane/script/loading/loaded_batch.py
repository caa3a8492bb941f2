"""Loaded batches: what a loader has read of a batch on this worker, and the whole of it where the script asks for that.

The script sees deferred tensors of the whole batch's shape. What it computes from them before a model is called becomes
part of the tape, of which each worker computes its samples; what it asks of them (``y.numpy()``, a metric) is gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from polylane.runtime.guarded_tensors import guard_of
from polylane.script.deferred import DeferredTensor, find_frame, flatten_arguments


class LoaderReads(Protocol):
    """How the workers read a loader: see :class:`polylane.script.loading.loader_shares.LoaderShares`."""

    reads_whole: bool

    def read_whole(self, reason: str) -> None:
        """Have every worker read whole batches from now on."""

    def gather(self, rows: Tensor, samples: int) -> Tensor:
        """Return the rows of all workers as a whole batch; collective."""


@dataclass(eq=False)
class LoadedBatch:
    """A batch of a loader, of which this worker has read its samples.

    Attributes:
        reads: how the workers read its loader.
        leaves: the flat tensors, with the samples that were read along dimension 0.
        samples: number of samples of the whole batch.
        is_whole: whether every worker has read all of them.
        order: a number for the samples that the whole batch was to be made of, the same on every worker.
    """

    reads: LoaderReads
    leaves: Sequence[Tensor]
    samples: int
    is_whole: bool
    order: int
    rows: list[LoadedRows] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [LoadedRows(self, leaf) for leaf in self.leaves]

    def gather(self, position: int) -> Tensor:
        """Return one of its tensors, whole on every worker; collective, unless it was read whole."""
        rows = self.leaves[position]
        return rows if self.is_whole else self.reads.gather(rows, self.samples)


@dataclass(eq=False)
class LoadedRows:
    """A tensor of a loaded batch, as an input of a tape.

    Attributes:
        batch: the batch that the tensor is part of.
        rows: what this worker has read of it.
    """

    batch: LoadedBatch
    rows: Tensor

    @cached_property
    def shaped(self) -> Tensor:
        """A tensor of the whole batch's shape; what was not read whole has no values, and takes no memory."""
        if self.batch.is_whole:
            return self.rows
        shape = self.batch.samples, *self.rows.shape[1:]
        return self.rows.new_empty(1).expand(shape) if self.rows.numel() else self.rows.new_empty(shape)

    @cached_property
    def whole(self) -> Tensor:
        """The tensor of the whole batch, into which the script may write; collective, unless it was read whole."""
        return self.batch.gather(next(i for i, leaf in enumerate(self.batch.leaves) if leaf is self.rows))

    def take(self, positions: Sequence[int]) -> Tensor:
        """Return the rows at the positions that were read, as they are now."""
        return self.whole[list(positions)] if "whole" in vars(self) else self.rows


TapeInput = Tensor | LoadedRows


def shape_of(inputs: Iterable[TapeInput]) -> list[Tensor]:
    """Return tensors of the shapes of a tape's inputs, which are these where all workers have them."""
    return [value.shaped if isinstance(value, LoadedRows) else value for value in inputs]


def gather_inputs(inputs: Iterable[TapeInput]) -> list[Tensor]:
    """Return a tape's inputs whole on every worker; collective where workers have read their samples alone."""
    return [value.whole if isinstance(value, LoadedRows) else value for value in inputs]


BY_PYTHON = frozenset(["apply_", "map_", "map2_"])  # functions of numbers, which fake tensors have none of
CHANGES = 4  # constants of a line of the script, from batch to batch, after which whole batches are read


class BatchSites:
    """Where the script computes from batches before it calls a model, and with which constants.

    A constant is part of a tape, and each further one would be a further tape: a crop at a place that is drawn anew.
    """

    def __init__(self) -> None:
        self._constants = dict[Any, Any]()  # by function and place in the script
        self._changes = Counter[Any]()

    def must_compute(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a function of batches alone is computed from whole ones, and not recorded."""
        readers = find_readers(args, kwargs)
        if not readers:
            return False
        leaves, _ = flatten_arguments(args, kwargs)
        if func.__name__ in BY_PYTHON or any(reader.reads_whole for reader in readers):
            return True
        frame = find_frame()
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if any(isinstance(leaf, Tensor) and leaf.requires_grad and guard_of(leaf) is None for leaf in leaves):
            read_whole(readers, f"a module that was not prepared computes from them ({line})")
            return True
        constants = [_identify(leaf) for leaf in leaves if not isinstance(leaf, (Tensor, float))]
        # In sum(batches) the first sum begins with 0.
        site = func, line, frame.f_lasti, len(constants)
        if self._constants.setdefault(site, constants) == constants:
            return False
        self._changes[site] += 1
        if self._changes[site] == CHANGES:
            read_whole(readers, f"{line} computes from them with other constants each time")
        return True


def _identify(constant: Any) -> Any:
    """Return what tells a constant from others, alike on every worker: not the address that an object prints."""
    try:
        hash(constant)
    except TypeError:
        return repr(constant)
    return type(constant), constant


def find_readers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[LoaderReads]:
    """Return how the loaders are read from whose batches arguments follow; empty where others are among them."""
    tensors = [leaf for leaf in flatten_arguments(args, kwargs)[0] if isinstance(leaf, DeferredTensor)]
    if not all(tensor.call.readers for tensor in tensors):
        return set()
    return {reader for tensor in tensors for reader in tensor.call.readers}


def read_whole(readers: Iterable[LoaderReads], reason: str) -> None:
    """Have every worker read whole batches of loaders from now on; ``reason`` ends the sentence that says so."""
    for reader in readers:
        reader.read_whole(reason)


def have_read_whole(args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> bool:
    """Have whole batches be read of loaders from which alone arguments follow; return whether there are any."""
    readers = find_readers(args, kwargs)
    read_whole(readers, reason)
    return bool(readers)


class NotDivided(Exception):
    """What a script computes from a batch before it calls a model, or with a model's results, is not sample by sample.

    Args:
        reason: why batches are not divided, as the end of a sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
