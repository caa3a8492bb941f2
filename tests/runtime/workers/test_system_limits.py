"""What the system refuses (files, processes, threads) is one sentence with what to do, whoever says it, and however."""

from __future__ import annotations

import errno
import os
import time

import pytest

from polylane.errors import PolylaneError
from polylane.runtime.workers.failure import Failure
from polylane.runtime.workers.system_limits import explain_refusal
from polylane.runtime.workers.team import fork_workers


@pytest.mark.parametrize("refused", [0, 1])
def test_a_process_that_the_system_refuses_is_one_sentence(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forks, real = iter(range(9)), os.fork

    def fork_or_not() -> int:
        if next(forks) == refused:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real()

    monkeypatch.setattr(os, "fork", fork_or_not)
    with pytest.raises(BlockingIOError) as caught:
        fork_workers(lambda context: time.sleep(60), 2)
    told = explain_refusal(caught.value, None)
    assert told is not None and str(told).startswith("this process cannot start another process or thread: the limit")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "worker 1 cannot open another file, "),
        (OSError(errno.ENFILE, "Too many open files in system"), "worker 1 cannot open another file, "),
        (RuntimeError("FileStore: Too many open files"), "worker 1 cannot open another file, "),
        (ImportError("libx.so: cannot open shared object file: Too many open files"), "worker 1 cannot open another"),
        (RuntimeError("can't start new thread"), "worker 1 cannot start another process or thread: "),
        (MemoryError(), "worker 1 ran out of memory"),
    ],
)
def test_what_the_system_refuses_is_the_users_to_mend(error: Exception, sentence: str) -> None:
    told = Failure.of_exception(1, error).to_exception()
    assert isinstance(told, PolylaneError) and str(told).startswith(sentence)


@pytest.mark.parametrize("error", [BlockingIOError(errno.EAGAIN, "full"), ValueError("Too many open files"), OSError()])
def test_what_is_no_refusal_stays_what_it_is(error: Exception) -> None:
    assert explain_refusal(error, 1) is None
