"""Serial thread: collectives of several steps run in it, whatever the thread that has started them waits for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class SerialThread:
    """Runs calls one after another in the order of submission; the thread starts with the first call.

    It is a daemon, which does not keep its process alive. The interpreter joins the threads of
    :mod:`concurrent.futures` at its end: one that waits for a peer would keep this process's connections open until its
    timeout, and no other worker would see that this one has failed.

    Args:
        name: name of the thread, for debuggers and profilers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, self._tasks.put, None)  # also ends the thread if close is never called
        # At the end of the interpreter nothing is to be done, and waiting could block.
        self._end.atexit = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a call after all earlier ones, and return a future of its result.

        Raises:
            RuntimeError: the executor was closed before.
        """
        if not self._end.alive:
            raise RuntimeError("it was closed")
        if self._thread is None:
            self._thread = threading.Thread(target=_run_tasks, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._tasks.put((future, call, arguments))
        return future

    def close(self, wait: bool = True) -> None:
        """End the thread after all calls; idempotent.

        Args:
            wait: whether to return only then.
        """
        self._end()
        if wait and self._thread is not None:
            self._thread.join()


def _run_tasks(tasks: SimpleQueue[_Task | None]) -> None:
    """Run tasks until None arrives; the thread refers to the queue only, so that the executor can be freed."""
    while (task := tasks.get()) is not None:
        future, call, arguments = task
        try:
            result = call(*arguments)
        except BaseException as error:  # raised where the result is waited for; the thread serves the next task
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del task, future, call, arguments  # while the thread waits it must not keep tensors alive
