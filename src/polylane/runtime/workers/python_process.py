"""Python process: a module of polylane that runs beside this process, by the same interpreter and the same sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_SOURCES = str(Path(__file__).resolve().parents[2])  # the folder that has the package


def start_module(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m MODULE ARGUMENTS``.

    Args:
        module: dotted name of the module.
        arguments: command line of the module, without its name.
        options: what the process shares with this one, as keyword arguments of :class:`subprocess.Popen`.

    Raises:
        OSError: no process can be started.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: a json.py in the user's folder is not the library's
        env={**os.environ, "PYTHONPATH": os.pathsep.join([_SOURCES, os.environ.get("PYTHONPATH", "")])},
        start_new_session=True,  # Ctrl-C is for the workers, with which it ends
        **options,
    )
