"""A training with a fault in it, as a command line of its own: ``python -m tests.chaos.faulty_train``.

It is the command line of polylane, whose workers train through :mod:`.injection`. The fault and its log are read from
the environment.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.chaos.faults import VARIABLE, Fault, FaultLog

LOG_VARIABLE = "POLYLANE_FAULT_LOG"


def main(arguments: Sequence[str]) -> None:
    """Run a command line of polylane with the fault in its workers, and exit.

    Args:
        arguments: the command line without the program's name.
    """
    inject()
    sys.argv = ["polylane", *arguments]
    runpy.run_module("polylane", run_name="__main__")


def inject() -> None:
    """Let workers of this process train with the fault in it."""
    from polylane.commands.running import worker
    from tests.chaos.injection import FaultyLoop

    path = os.environ.get(VARIABLE)
    fault = Fault.read(Path(path)) if path else None
    log = FaultLog(Path(os.environ[LOG_VARIABLE]))
    worker.RecipeLoop = partial(FaultyLoop, fault, log)  # type: ignore[assignment, misc]


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # a worker that is a new process: multiprocessing imports the launcher's main module
    inject()
