"""What follows for a job that is open when its interpreter ends."""

from __future__ import annotations

import atexit
import gc
import weakref

import pytest

from polylane.runtime.workers.close_at_exit import CloseAtExit


class Job:
    """What is closed; it notes its end in a list."""

    def __init__(self, closed: list[str]) -> None:
        self._closed = closed

    def close(self) -> None:
        self._closed.append("closed")


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list:
    """The functions that the interpreter would call at its end."""
    registered: list = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    return registered


@pytest.mark.parametrize("keeps_job", [True, False])
def test_a_job_that_nobody_refers_to_is_closed_if_it_has_servers_and_freed_else(hooks: list, keeps_job: bool) -> None:
    closed = list[str]()
    job = Job(closed)
    CloseAtExit(job.close, keeps_job)
    reference = weakref.ref(job)
    del job
    gc.collect()
    assert (reference() is not None) == keeps_job
    for hook in hooks:
        hook()
    assert closed == ["closed"] * keeps_job


@pytest.mark.parametrize("keeps_job", [True, False])
def test_a_job_is_closed_once(hooks: list, keeps_job: bool) -> None:
    closed = list[str]()
    job = Job(closed)
    at_exit = CloseAtExit(job.close, keeps_job)
    for hook in hooks:
        hook()
    assert closed == ["closed"]
    at_exit.mark_closed()
    assert not hooks
