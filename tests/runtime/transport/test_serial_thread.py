"""Calls that a thread makes one after another: their order, their errors, and the thread's end."""

from __future__ import annotations

import threading

import pytest

from polylane.runtime.transport.serial_thread import SerialThread


def test_calls_are_made_in_turn():
    turns, seen = SerialThread("turns"), list[int]()
    for number in range(100):
        future = turns.submit(seen.append, number)
    failing = turns.submit(lambda: seen[1000])  # type: ignore[arg-type]
    assert future.result() is None and seen == list(range(100))
    with pytest.raises(IndexError):
        failing.result()
    last = turns.submit(seen.append, 100)
    turns.close()
    assert last.done() and seen[-1] == 100
    turns.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        turns.submit(seen.append, 101)


def test_a_thread_ends_with_who_gives_it_work():
    turns = SerialThread("turns that nobody closes")
    turns.submit(lambda: None).result()
    assert any(thread.name == "turns that nobody closes" for thread in threading.enumerate())
    thread = turns._thread
    del turns
    assert thread is not None
    assert thread.daemon
    thread.join(10)
    assert not thread.is_alive()
