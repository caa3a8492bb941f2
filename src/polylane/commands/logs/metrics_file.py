"""Metrics file: a run's losses and times as a line of JSON for each step and epoch, whole lines at any time."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# What a line raises that no run has written.
_NOT_OURS = (ValueError, KeyError, TypeError, OverflowError, RecursionError)

# Steps at the end of a run of which one has a full batch at least.
LATEST_STEPS = 20


class MetricsFile:
    """File of metrics: each line is written whole, at once, so that it can be read during the run and survives its end.

    Args:
        path: path of the file.
        append: whether to keep the lines that are there, but for a last one that is torn.
    """

    def __init__(self, path: Path, append: bool = False) -> None:
        self._path = path
        content = path.read_bytes() if append and path.exists() else b""
        self._file = path.open("ab" if append else "wb", buffering=0)
        self._size = content.rfind(b"\n") + 1
        self._file.truncate(self._size)

    def append(self, line: str) -> None:
        """Append a line.

        Raises:
            OSError: it could not be written; the file ends with the line before it.
        """
        content = line.encode() + b"\n"
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise OSError(errno.ENOENT, "it was removed", str(self._path))
            while content:
                content = content[self._file.write(content) :]
            self._size = self._file.tell()
        except OSError as error:
            with suppress(OSError):  # a full disk still lets files become shorter
                self._file.truncate(self._size)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()


def lines_until(metrics: Path, step: int) -> str:
    """Return the metrics of the steps up to one, and of the epochs that ended before it."""
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    kept_lines = []
    for line in lines:
        try:
            content = json.loads(line)
            content = next((content[name] for name in ("audit", "batch") if name in content), content)
            # The test after an epoch's last step is made again: the checkpoint is from before it.
            if content["step"] <= step - ("train_loss" in content):
                kept_lines.append(line + "\n")
        except _NOT_OURS:
            continue  # torn, or not ours
    return "".join(kept_lines)


def belongs_to_checkpoint(metrics: Path, step: int, loss: float, otherwise: bool) -> bool:
    """Return whether a file of metrics is of the run that saved a checkpoint: both have the loss of its step.

    Args:
        metrics: path of the file.
        step: step of the checkpoint.
        loss: of that step, as the checkpoint has it; not finite where it has none.
        otherwise: returned where one of them does not have it.
    """
    if math.isfinite(loss):
        with suppress(OSError, UnicodeDecodeError):
            for line in reversed(metrics.read_text(encoding="utf-8").splitlines()):
                with suppress(ValueError, KeyError, TypeError):
                    content = json.loads(line)
                    if content["step"] == step and "loss" in content:
                        return bool(content["loss"] == loss)
    return otherwise


def find_last_step(metrics: Path) -> int:
    """Return the number of the last step in a file of metrics; 0 where it says none."""
    with suppress(OSError, UnicodeDecodeError):
        for line in reversed(metrics.read_text(encoding="utf-8").splitlines()):
            with suppress(*_NOT_OURS):
                return int(json.loads(line)["step"])
    return 0


def find_batch(steps: Sequence[tuple[float, float]], changes: Sequence[tuple[float, float]]) -> int:
    """Return the number of samples of a run's latest full steps; 0 where there are none.

    The last batch of an epoch may be a short one, and a batch that grows has its latest size.

    Args:
        steps: (number, samples) of its steps, in order.
        changes: (number of the step before it, samples) of each change of its batch, in order.
    """
    since = changes[-1][0] if changes else 0
    latest = [samples for step, samples in steps[-LATEST_STEPS:] if step > since]
    return int(max(latest, default=changes[-1][1] if changes else 0))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what a file of this package's has; None where there is none, or it is another's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
