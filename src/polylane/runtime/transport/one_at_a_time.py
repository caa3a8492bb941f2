"""Single-thread executor whose thread does not keep its process from ending.

The interpreter joins the threads of :mod:`concurrent.futures` when it ends. One that waits for a peer would hold this
process's connections open until it gives up, and no other worker would see that this one has failed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Task = tuple[Future[None], Callable[..., None], tuple[Any, ...]]


class SerialThread:
    """Runs calls in the order in which they were given; it starts with the first one.

    Args:
        name: what the thread is called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, self._tasks.put, None)  # also where nobody closes it
        self._end.atexit = False

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run a call after those before it.

        Raises:
            RuntimeError: it was closed.
        """
        if not self._end.alive:
            raise RuntimeError("it was closed")
        if self._thread is None:
            self._thread = threading.Thread(target=_run_tasks, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._tasks.put((future, call, arguments))
        return future

    def close(self) -> None:
        """Wait for all calls, and end the thread. Does nothing the second time."""
        self._end()
        if self._thread is not None:
            self._thread.join()


def _run_tasks(tasks: SimpleQueue[_Task | None]) -> None:
    """The thread: it knows the queue only, so that the owner of the executor can be freed between calls."""
    while (task := tasks.get()) is not None:
        future, call, arguments = task
        try:
            call(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del task, future, call, arguments
