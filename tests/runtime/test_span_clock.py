"""Spans of an accelerator: between events, in the host's seconds, and nobody waits before they are asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch

from polylane.observe.timeline import Span
from polylane.runtime import span_clock
from polylane.runtime.span_clock import CollectiveWaits, DeviceClock, HostClock, clock_of_device
from polylane.schedule.action import Action, ActionKind

CUDA = torch.device("cuda", 0)
FORWARD = Action(ActionKind.FORWARD, 0, 0)


@dataclass
class FakeDevice:
    """A device whose stream reaches what is recorded after a second each; it counts how often it is waited for."""

    now: float = 0.0
    waits: int = 0
    events: list[FakeEvent] = field(default_factory=list)

    def event(self, device: torch.device, enable_timing: bool) -> FakeEvent:
        assert device == CUDA and enable_timing
        self.events.append(FakeEvent(self))
        return self.events[-1]


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self, stream: str) -> None:
        assert stream == "current stream"
        self.device.now += 1.0
        self.at = self.device.now

    def synchronize(self) -> None:
        self.device.waits += 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at - self.at) * 1000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice()
    monkeypatch.setattr(torch, "Event", made.event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "current stream")
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    return made


def test_spans_lie_between_their_events_in_seconds_of_the_host(device: FakeDevice):
    waits = CollectiveWaits(clock_of_device(CUDA))
    start = waits.begin_action()  # the anchor at device second 1, which is 100 of the host; the mark a second later
    with waits.timing():
        pass
    waits.bytes = 8
    span = waits.make_span(3, FORWARD, start)
    assert device.waits == 1  # for the anchor alone
    assert span.resolve() == Span(3, FORWARD, 101.0, 104.0, waited=1.0, bytes=8)
    waited = device.waits
    assert span.resolve() == span.resolve() and device.waits == waited  # read once


def test_recording_waits_for_nothing(device: FakeDevice):
    waits = CollectiveWaits(DeviceClock(CUDA))
    for _ in range(5):
        waits.clock.begin_step()
        waits.make_span(0, FORWARD, waits.begin_action())
    assert device.waits == 1


def test_a_minute_later_there_is_a_new_anchor(device: FakeDevice, monkeypatch: pytest.MonkeyPatch):
    clock = DeviceClock(CUDA)
    before = clock.mark()
    monkeypatch.setattr(time, "perf_counter", lambda: 200.0)
    clock.begin_step()
    assert device.waits == 2
    assert (before.seconds, clock.mark().seconds) == (101.0, 201.0)


def test_on_the_host_spans_are_known_at_once():
    waits = CollectiveWaits(clock_of_device(torch.device("cpu")))
    assert isinstance(waits.clock, HostClock)
    start = waits.begin_action()
    with waits.timing():
        time.sleep(0.001)
    span = waits.make_span(0, FORWARD, start).resolve()
    assert span.start == start and 0.001 <= span.waited <= span.end - span.start
    assert isinstance(span_clock.clock_of_device(torch.device("cpu")), span_clock.HostClock)


def test_waits_are_of_one_action():
    waits = CollectiveWaits()
    with waits.timing():
        pass
    waits.begin_action()
    assert waits.marks == [] and waits.bytes == 0
