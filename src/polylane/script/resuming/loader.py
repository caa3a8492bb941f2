"""Loaders of a prepared script: a ``DataLoader`` stays what it is, and counts the batches that are asked of it."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from polylane.graph.python_state.random_generators import generators_kept
from polylane.runtime.state.plain_values import from_plain, to_plain
from polylane.runtime.state.random_state import collect_generators, restore_generators


class LoopObserver(Protocol):
    """What follows a loop, to save it between two steps: see :mod:`polylane.script.resuming.progress`."""

    def note_backward(self) -> None:
        """Note that parameters have gradients that wait for a step."""

    def note_step(self) -> None:
        """Note a step."""

    def finish(self) -> None:
        """End what is under way; collective."""


class PassObserver(Protocol):
    """What follows the passes through loaders: see :mod:`polylane.script.resuming.progress`."""

    passed_over: int
    standing: frozenset[int]  # numbers of loaders whose processes had begun to load, and stay, in the run resumed

    @property
    def accelerator(self) -> torch.device | None:
        """The device of this worker, or None where it computes on the CPU."""

    def begin_pass(self, batches: LoaderPass) -> None:
        """Give a new pass its number, and what of it a checkpoint has."""

    def reach(self, batches: LoaderPass) -> None:
        """Restore or save, where a pass is asked for its next batch."""

    def reach_end(self, batches: LoaderPass) -> None:
        """Save, where a pass has no further batch."""

    def note_batch(self, batches: LoaderPass) -> None:
        """Note which pass has yielded a batch."""


def follow_loader(loader: DataLoader[Any], number: int, progress: PassObserver) -> None:
    """Have a loader count its batches, and pass over those that a resumed script has trained on.

    Args:
        loader: the script's loader, whose class becomes one derived from it.
        number: of the loader among those of the script.
        progress: where the script is in its loops.
    """
    vars(loader).update(script_progress=progress, loader_number=number)
    kind: Any = type(loader)
    loader.__class__ = _following_class(kind)


@functools.cache
def _following_class(kind: Any) -> Any:
    """Return a class of loaders whose passes are followed, and which are all else that ``kind`` is."""

    def follow_batches(loader: Any) -> LoaderPass:
        return LoaderPass(loader, kind.__iter__)

    return type(kind.__name__, (kind,), {"__iter__": follow_batches, "__module__": kind.__module__})


class LoaderPass:
    """One pass through a loader.

    Args:
        loader: the loader, with its number and the script's progress.
        begin: begins a plain pass through a loader.

    Attributes:
        number: of the loader among those of the script.
        index: number of earlier passes of the epoch through the loader in the same modes.
        has_gradients: whether it was begun with gradients, and a model in training mode.
        trains: whether the optimizers step on batches of this loader.
        is_finished: whether its batches have ended.
        batches: number of batches that it has yielded, or passed over.
        resumed: what a checkpoint has of this pass; None where nothing of it is passed over.
    """

    def __init__(self, loader: Any, begin: Callable[[Any], Iterator[Any]]) -> None:
        self._loader, self._progress, self.number = loader, loader.script_progress, loader.loader_number
        self.index, self.has_gradients, self.is_finished, self.batches = 0, False, False, 0
        self.trains = vars(loader).get("trains", False)
        self.resumed: dict[str, Any] | None = None
        self._accelerator = self._progress.accelerator
        self._start_processes(begin)
        self._progress.begin_pass(self)
        self._begun_at = self._generators("begun_at")
        self._read_at: dict[str, Any] | None = None
        self._unread = 0 if self.resumed is None else self.resumed["batches"]
        passes_over = getattr(begin, "passes_over", begin is DataLoader.__iter__)
        self._reads_on = not (passes_over and is_skippable(loader))
        if self._unread and not self._reads_on:
            loader = _rest_of(loader, self._unread, lambda: self._generators("read_at"))
        self._batches: Iterator[Any] = begin(loader)

    def _start_processes(self, begin: Callable[[Any], Iterator[Any]]) -> None:
        """Start the processes of a loader that had them before the pass that is resumed: a first pass draws a seed."""
        had_processes = has_standing_processes(self._loader)
        vars(self._loader)["has_begun"] = True
        if not had_processes and has_standing_processes(self._loader) and self.number in self._progress.standing:
            states = own_generator_states(self._loader)
            with generators_kept():
                begin(self._loader)
            restore_own_generators(self._loader, states)

    def _generators(self, moment: str) -> dict[str, Any]:
        """Return the states of the generators; before, set them to those that the saved pass had at the moment."""
        if self.resumed is not None:
            states = from_plain(self.resumed[moment])
            restore_generators(states["global"], self._accelerator)
            restore_own_generators(self._loader, states["own"])
        return self._collect_generators()

    def _collect_generators(self) -> dict[str, Any]:
        return {"global": collect_generators(self._accelerator), "own": own_generator_states(self._loader)}

    def __iter__(self) -> LoaderPass:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        if self._read_at is None:
            self._pass_over()
        self._progress.reach(self)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._progress.reach_end(self)
            self.is_finished = True
            raise
        self.batches += 1
        self._progress.note_batch(self)
        return batch

    def _pass_over(self) -> None:
        """Pass over the batches that the script has trained on."""
        if not self._unread:
            self._read_at = self._collect_generators()
            return
        with generators_kept():
            self._read_at = self._generators("read_at")
            for _ in itertools.islice(self._batches, self._unread if self._reads_on else 0):
                pass
        self.batches = self._unread
        self._progress.passed_over += self._unread

    def note_step(self) -> None:
        """Note that an optimizer has stepped on a batch of this loader."""
        self.trains = vars(self._loader)["trains"] = True

    @property
    def samples(self) -> int:
        """Number of samples that were trained on, where batches have a size; else 0."""
        return self.batches * (self._loader.batch_size or 0)

    def describe(self) -> dict[str, Any]:
        """Return what a resumed script needs of this pass, as plain values."""
        read_at = self._collect_generators() if self._read_at is None else self._read_at
        return {
            "loader": self.number,
            "index": self.index,
            "has_gradients": self.has_gradients,
            "batches": self.batches,
            "begun_at": to_plain(self._begun_at, "random state"),
            "read_at": to_plain(read_at, "random state"),
        }

    def is_described_by(self, saved: dict[str, Any]) -> bool:
        """Return whether a description is of this pass."""
        position = self.number, self.index, self.has_gradients
        return position == (saved["loader"], saved["index"], saved["has_gradients"])


def is_skippable(loader: DataLoader[Any]) -> bool:
    """Return whether batches need not be read to be passed over: no worker draws on the way, and nothing streams."""
    return loader.num_workers == 0 and not isinstance(loader.dataset, IterableDataset)


def has_standing_processes(loader: DataLoader[Any]) -> bool:
    """Return whether processes load, and stay from one pass of a followed loader to the next."""
    return loader.num_workers > 0 and loader.persistent_workers and vars(loader).get("has_begun", False)


def own_generator_states(loader: DataLoader[Any]) -> list[torch.Tensor]:
    """Return the states of the generators that a loader and its samplers were given."""
    return [generator.get_state() for generator in _own_generators(loader)]


def restore_own_generators(loader: DataLoader[Any], states: Sequence[torch.Tensor]) -> None:
    """Restore states of :func:`own_generator_states`."""
    for generator, state in zip(_own_generators(loader), states, strict=False):
        generator.set_state(state)


def _own_generators(loader: Any) -> list[torch.Generator]:
    holders = loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    generators = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in generators if generator is not None}.values())


def _rest_of(loader: DataLoader[Any], count: int, draw_from: Callable[[], Any]) -> DataLoader[Any]:
    """Return a loader of the batches that come after ``count`` of one pass.

    Args:
        loader: the script's loader, which stays as it is.
        count: number of batches that are passed over.
        draw_from: sets the generators that the order is drawn from.
    """
    remaining_batches = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(remaining_batches)[name] = _RestOfSampler(loader, getattr(loader, name), count, draw_from)
    return remaining_batches


class _RestOfSampler:
    """What a sampler yields after some first values, which are drawn and passed over."""

    def __init__(self, loader: Any, sampler: Any, count: int, draw_from: Callable[[], Any]) -> None:
        self._loader, self._sampler, self._count, self._draw_from = loader, sampler, count, draw_from

    def __iter__(self) -> Iterator[Any]:
        values: Iterator[Any] = iter(self._sampler)
        states = own_generator_states(self._loader)
        with generators_kept():
            self._draw_from()
            for _ in itertools.islice(values, self._count):
                pass
        restore_own_generators(self._loader, states)
        return values

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._count)
