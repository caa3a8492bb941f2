"""Processes that start warm: what takes seconds to import (torch, its exporter, pytest), and is not under test, is
imported once; every run is a fork of this process, with another package first on its import path."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

POLLED = 0.05  # seconds


def warm() -> None:
    """Import what every run needs of others' packages, and nothing of polylane."""
    import hypothesis  # noqa: F401
    import networkx  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import rich.table  # noqa: F401
    import scipy.optimize  # noqa: F401
    import torch
    import typer  # noqa: F401

    torch.set_num_threads(1)  # a process whose pool of threads has started cannot be forked
    model = torch.nn.Linear(2, 2)
    dynamic = {"input": {0: torch.export.Dim.DYNAMIC}}
    torch.export.export(model, (torch.zeros(3, 2),), dynamic_shapes=dynamic, strict=False).run_decompositions({})
    if "polylane" in sys.modules:
        raise RuntimeError("polylane is imported already: every run would have this one, and no mutant")


def run(work: Callable[[], int], package: Path, limit: float) -> tuple[int | None, str]:
    """What work returns in a process of its own, with a package first on its path, and what it prints.

    Args:
        work: gives the exit code.
        package: the folder where polylane is.
        limit: seconds, after which it is ended with all that it has started, and its exit code is None.
    """
    with tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            os._exit(_child(work, package, output.fileno()))
        code = _waited(child, limit)
        output.seek(0)
        return code, output.read()


def _child(work: Callable[[], int], package: Path, output: int) -> int:
    code = 70
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, str(package))
        os.environ |= {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 70
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _waited(child: int, limit: float) -> int | None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLLED)
    os.killpg(child, signal.SIGKILL)  # with the workers that it has forked
    os.waitpid(child, 0)
    return None
