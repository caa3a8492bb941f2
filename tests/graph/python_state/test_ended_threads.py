"""Threads that have been joined are gone, so that processes may be forked."""

from __future__ import annotations

import os
import threading

import pytest

from polylane.graph.python_state.ended_threads import wait_gone


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system does not list threads")
def test_joined_threads_are_gone() -> None:
    for _ in range(50):
        threads = [threading.Thread(target=lambda: None) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_gone(thread.native_id for thread in threads)
        assert not {str(thread.native_id) for thread in threads} & set(os.listdir("/proc/self/task"))
