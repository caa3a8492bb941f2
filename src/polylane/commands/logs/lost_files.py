"""Lost files: what cannot be written of a run's files is an error, or is said once while the training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polylane.errors import PolylaneError, describe_disk_error


class LostFiles:
    """The files of a run that could not be written.

    Args:
        warn: called with a sentence about each, once, where the training goes on without it; None: that is an error.
    """

    def __init__(self, warn: Callable[[str], None] | None) -> None:
        self._warn, self._names = warn, set[str]()

    @contextmanager
    def refuse(self, folder: Path) -> Iterator[None]:
        """Context manager: what cannot be written is an error.

        Args:
            folder: folder of the run, as the user knows it.

        Raises:
            PolylaneError: which file, and why.
        """
        try:
            yield
        except OSError as error:
            file = error.filename2 or error.filename or folder  # of a rename, what it was to replace
            raise PolylaneError(f"--run {folder}: {file} cannot be written: {describe_disk_error(error)}") from error

    @contextmanager
    def pass_over(self, folder: Path, name: str, loss: str) -> Iterator[None]:
        """Context manager: what cannot be written is told of once, where the training may go on without it.

        Args:
            folder: folder of the run, as the user knows it.
            name: name of the file that is written, or of the first of several.
            loss: what is lost, for the sentence.

        Raises:
            PolylaneError: it is to be an error.
        """
        if self._warn is None:
            with self.refuse(folder):
                yield
            return
        try:
            yield
        except OSError as error:
            if name not in self._names:
                self._names.add(name)
                reason = f"{error.filename or folder} cannot be written: {describe_disk_error(error)}"
                self._warn(f"--run {folder}: {reason}; training continues, and {loss}")
