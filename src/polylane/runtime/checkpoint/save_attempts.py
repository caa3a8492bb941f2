"""Save attempts: checkpoints that could not be written, while the training goes on, and what is said of them.

A disk that is full stays so for hours, and each checkpoint fails: the first one is said, and at the end how many were.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from polylane.errors import AuditFailed, PolylaneError, format_plural

if TYPE_CHECKING:
    from polylane.runtime.checkpoint.save import CheckpointSaver

T = TypeVar("T")


class SaveAttempts:
    """The attempts to save into one folder of checkpoints; all workers make the same calls.

    Args:
        folder: folder of the checkpoints, for the sentences.
        saver: writes them; its newest one tells whether the disk has taken one since.
        warn: called with a sentence when one could not be saved, and the training goes on; None: that is an error.
    """

    def __init__(self, folder: Path, saver: CheckpointSaver, warn: Callable[[str], None] | None) -> None:
        self._folder, self._saver, self._warn = folder, saver, warn
        self._failed = 0
        self._newest_at_failure: Path | None = None
        self._has_said = False  # of those that have failed since the newest complete one

    def attempt(self, act: Callable[[], T]) -> T | None:
        """Return what an action of all workers returns; None where it failed, and the training goes on.

        Raises:
            PolylaneError: on all workers, if a checkpoint could not be written and that is to be an error.
        """
        try:
            return act()
        except PolylaneError as error:
            if self._warn is None or isinstance(error, AuditFailed):
                raise
            self._failed += 1
            if not self._has_said or self._saver.newest != self._newest_at_failure:
                self._has_said, self._newest_at_failure = True, self._saver.newest
                self._warn(f"{self._folder}: {error}; training continues, and tries again when the next one is due")
            return None

    def tell_failed(self) -> None:
        """Say at the end how many could not be written, where there were more than the one that was said."""
        if self._failed > 1 and self._warn is not None:
            newest = f"the newest is {self._saver.newest}" if self._saver.newest else "there is none of this run"
            self._warn(f"{self._folder}: {format_plural(self._failed, 'checkpoint')} could not be written; {newest}")
