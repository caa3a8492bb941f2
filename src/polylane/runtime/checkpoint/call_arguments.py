"""Call arguments: the arguments that a script passes to a job's methods for checkpoints, checked before any work."""

from __future__ import annotations

import os
from pathlib import Path

from polylane.errors import PolylaneError, format_value


def parse_folder(call: str, folder: object) -> Path:
    """Return the folder that a method of a job was given for checkpoints.

    Args:
        call: name of the method.
        folder: what it was given: a text or a path.

    Raises:
        PolylaneError: it is no path.
    """
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise PolylaneError(f"job.{call}({format_value(folder)}): give the path of a folder, as a text or a Path")
    return Path(folder)


def check_keep(keep: object) -> int | None:
    """Return the number of checkpoints that a method of a job is to keep; None: all.

    Raises:
        PolylaneError: it is no whole number of at least 1.
    """
    # True is an int in Python, and keeps 1 by mistake.
    if keep is None or (isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1):
        return keep
    raise PolylaneError(
        f"job.save_checkpoint(keep={format_value(keep)}): give a whole number from 1 on, or None for all"
    )
