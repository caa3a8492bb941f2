"""Span clock: when an action began and ended on the device that computes it, in seconds of the host's clock.

    device         a mark is                              a span is known
    CPU            a reading of ``time.perf_counter()``   at once
    accelerator    an event, recorded on the stream       when it is read, which waits for the device

Kernels of an accelerator run after the calls that launch them: the host's clock would show when they were launched. An
event has the time at which the stream reaches it, and recording one makes nobody wait. Events know the times between
each other only. So one of them, the anchor, is waited for at a known time of the host, at the first mark and then once
a minute: later ones are placed by their distance from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from polylane.observe.timeline import Span
from polylane.runtime.progress_page import UNWATCHED, Progress
from polylane.schedule.action import Action

# An event's distance has the precision of a float32 of milliseconds: 8 us after two minutes.
ANCHOR_SECONDS = 60.0

Mark = Any  # a moment, as the clock that made it reads it


class TimedSpan(Protocol):
    """An action whose start and end are known, or will be."""

    def resolve(self) -> Span:
        """Return the span in seconds of ``time.perf_counter()``; waits for the device if that has not ended it."""


class SpanClock(Protocol):
    """Reads moments of the device that computes."""

    def mark(self) -> Mark:
        """Return the moment at which what was called so far is done, on the current stream."""

    def begin_step(self) -> None:
        """Prepare for the marks of a step."""

    def make_span(
        self, rank: int, action: Action, start: Mark, end: Mark, waited: Sequence[tuple[Mark, Mark]], size: int
    ) -> TimedSpan:
        """Return an action between two marks.

        Args:
            rank: rank of the worker.
            action: the program's action that ran between the marks.
            start: mark at the beginning of the action.
            end: mark at its end.
            waited: marks before and after each wait for other workers inside the action.
            size: bytes of tensors that were sent or received.
        """


@dataclass(frozen=True)
class KnownSpan:
    """A span that is known already."""

    span: Span

    def resolve(self) -> Span:
        return self.span


class HostClock:
    """The clock of the host, where it computes itself."""

    def mark(self) -> float:
        return time.perf_counter()

    def begin_step(self) -> None:
        pass

    def make_span(
        self, rank: int, action: Action, start: Mark, end: Mark, waited: Sequence[tuple[Mark, Mark]], size: int
    ) -> TimedSpan:
        return KnownSpan(Span(rank, action, start, end, sum(finish - begin for begin, finish in waited), size))


@dataclass(frozen=True)
class _Anchor:
    """An event that was waited for, and the host's time then, in seconds of ``time.perf_counter()``."""

    event: Any
    seconds: float

    def time_of(self, event: Any) -> float:
        event.synchronize()
        return self.seconds + float(self.event.elapsed_time(event)) / 1000


@dataclass(frozen=True)
class _DeviceMark:
    event: Any
    anchor: _Anchor

    @property
    def seconds(self) -> float:
        return self.anchor.time_of(self.event)


@dataclass
class DeviceSpan:
    """A span between two events; the times are read once, and the events freed."""

    rank: int
    action: Action
    start: _DeviceMark
    end: _DeviceMark
    waited: Sequence[tuple[_DeviceMark, _DeviceMark]]
    size: int
    _known: Span | None = None

    def resolve(self) -> Span:
        if self._known is None:
            start = self.start.seconds
            # Two marks may have different anchors, whose host times differ by microseconds.
            end = max(start, self.end.seconds)
            waited = sum(max(0.0, finish.seconds - begin.seconds) for begin, finish in self.waited)
            self._known = Span(self.rank, self.action, start, end, min(waited, end - start), self.size)
            del self.start, self.end, self.waited
        return self._known


@dataclass
class DeviceClock:
    """The clock of an accelerator's current stream.

    Attributes:
        device: the accelerator, with its index; events are recorded on its current stream.
    """

    device: torch.device
    _anchor: _Anchor | None = field(default=None, repr=False)

    def mark(self) -> _DeviceMark:
        if self._anchor is None:
            self._anchor = self._new_anchor()
        return _DeviceMark(self._record(), self._anchor)

    def begin_step(self) -> None:
        if self._anchor is not None and time.perf_counter() - self._anchor.seconds > ANCHOR_SECONDS:
            self._anchor = self._new_anchor()

    def make_span(
        self, rank: int, action: Action, start: Mark, end: Mark, waited: Sequence[tuple[Mark, Mark]], size: int
    ) -> TimedSpan:
        return DeviceSpan(rank, action, start, end, tuple(waited), size)

    def _new_anchor(self) -> _Anchor:
        event = self._record()
        event.synchronize()
        return _Anchor(event, time.perf_counter())

    def _record(self) -> Any:
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event


def clock_of_device(device: torch.device) -> SpanClock:
    """Return the clock for what a device computes."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


@dataclass
class CollectiveWaits:
    """What one action spends on communication; the executor resets it before each action.

    Attributes:
        clock: reads when a wait began and ended.
        progress: where this worker says what it does.
        marks: marks before and after each wait for collectives inside the action, which are not computation.
        bytes: bytes handed to the transport, or received from it.
    """

    clock: SpanClock = field(default_factory=HostClock)
    progress: Progress = UNWATCHED
    marks: list[tuple[Mark, Mark]] = field(default_factory=list)
    bytes: int = 0

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Context manager around a wait for other workers."""
        start = self.clock.mark()
        try:
            yield
        finally:
            self.marks.append((start, self.clock.mark()))

    def begin_action(self) -> Mark:
        """Forget what earlier actions spent; return the mark of now."""
        self.marks, self.bytes = [], 0
        return self.clock.mark()

    def make_span(self, rank: int, action: Action, start: Mark) -> TimedSpan:
        """Return the action that began at a mark and ends now, with what it spent on communication."""
        return self.clock.make_span(rank, action, start, self.clock.mark(), self.marks, self.bytes)
