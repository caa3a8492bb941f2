"""Forked child: a process that the user's code forks inside of a worker, and that comes back out of it by an exception.

It is a copy of the worker, with its pipes, connections and handlers: what it raises is not the worker's failure.

    in the child                          it ends with
    sys.exit(3)                           exit code 3, and what it has printed
    another exception                     a traceback, exit code 1
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


@contextmanager
def end_forked_children() -> Iterator[None]:
    """Context manager around code of the user's: a child that it has forked ends here, and does not go on as a worker.

    An exception of this process itself passes.
    """
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != process:
            _end(error)
        raise


def _end(error: BaseException) -> NoReturn:
    code = 1
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    else:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)
