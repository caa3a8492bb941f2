"""Run folder: claimed by one process at a time, with the run's plan, its metrics line by line, and its results.

An earlier run's results are not lost before this one has ended well. Where there are such files, a run writes into the
folder ``unfinished`` below, and renames its files over the earlier ones when all of them are there.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from polylane.commands.printing import dump_json
from polylane.errors import PolylaneError
from polylane.observe.swimlane import render as swimlane
from polylane.observe.timeline import Timeline

MODEL = "model.safetensors"

# All files of a run, in the order in which they are renamed: the weights first, since they are worth the most.
NAMES = (MODEL, "plan.yaml", "metrics.jsonl", "timeline.json", "trace.json", "swimlane.html")

UNFINISHED = "unfinished"  # name of the folder in which a run writes while an earlier run's files are there


class RunFolder:
    """The folder for the files of one run.

    Args:
        path: the folder, which need not exist yet.
        given: whether the user named it. Otherwise the run takes the first of ``path``, ``path-2``, ``path-3``, ...
            that does not exist, for no run replaces another unasked.

    Attributes:
        path: the folder; final once it is claimed.

    Raises:
        PolylaneError: from every method, where the folder or a file cannot be written.
    """

    def __init__(self, path: Path, given: bool = True) -> None:
        self.path = path
        self._given = given
        self._metrics: TextIO | None = None
        self._claim: int | None = None  # file descriptor of the folder, locked
        self._made: list[Path] = []  # folders that this run made, the innermost first
        self._at = path  # where files are written until finish(): the folder, or UNFINISHED below it

    @property
    def model(self) -> Path:
        """The path of the weights during the run."""
        return self._at / MODEL

    @property
    def metrics(self) -> Path:
        """The path of the metrics during the run; they stay there where it does not end well."""
        return self._at / "metrics.jsonl"

    def check(self) -> None:
        """Refuse a place where nothing can be written, without making anything yet.

        Raises:
            PolylaneError: the folder cannot be made, or cannot be written to.
        """
        existing = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise PolylaneError(f"--run {self.path}: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PolylaneError(f"--run {self.path}: {existing} cannot be written to")

    @contextmanager
    def claimed(self, writes: bool) -> Iterator[None]:
        """Context manager: claim the folder, see :meth:`claim`, and give up the claim at the end.

        Args:
            writes: whether this process writes files; one that does not claims nothing.
        """
        if writes:
            self.claim()
        try:
            yield
        finally:
            self.leave()

    def claim(self) -> None:
        """Claim the folder, so that no other run that starts meanwhile gets it. The claim ends with the process.

        Raises:
            PolylaneError: another run is writing there.
        """
        self.check()
        with self._writing():
            self._make()
            self._lock()
        self._at = self.path / UNFINISHED if any((self.path / name).exists() for name in NAMES) else self.path

    def _make(self) -> None:
        # Remembered for leave(), which removes folders that this run made and did not use.
        missing = [place for place in (self.path, *self.path.parents) if not place.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._given:
            self.path.mkdir(exist_ok=True)
        else:
            self.path = _make_first_free(self.path)
        self._made = [self.path, *missing[1:]] if missing or not self._given else []

    def _lock(self) -> None:
        # A lock of the operating system: it ends with the process even if that is killed, so that no stale claim
        # remains.
        self._claim = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._give_up()
            self._made.clear()
            raise PolylaneError(
                f"--run {self.path}: another run is writing there; wait for its end, or choose another folder"
            ) from None
        except OSError:  # a file system without locks
            pass

    def begin(self) -> None:
        """Begin the training: delete what a run that did not end well has left, and open the metrics."""
        with self._writing():
            self._at.mkdir(exist_ok=True)
            if self._at != self.path:
                for name in NAMES:
                    (self._at / name).unlink(missing_ok=True)
            # Line-buffered, so that metrics can be read during the run and survive its end.
            self._metrics = self.metrics.open("w", encoding="utf-8", buffering=1)

    def plan(self, text: str) -> None:
        """Write the plan into plan.yaml."""
        with self._writing():
            (self._at / "plan.yaml").write_text(text, encoding="utf-8")

    def metric(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, at once."""
        with self._writing():
            assert self._metrics is not None
            self._metrics.write(dump_json(line) + "\n")

    def timeline(self, timeline: Timeline) -> None:
        """Write the timeline of a step, as data and as pictures."""
        with self._writing():
            (self._at / "timeline.json").write_text(dump_json(timeline.to_dict()), encoding="utf-8")
            (self._at / "trace.json").write_text(dump_json(swimlane.perfetto(timeline)), encoding="utf-8")
            (self._at / "swimlane.html").write_text(swimlane.html(timeline), encoding="utf-8")

    def finish(self) -> None:
        """Replace an earlier run's files by this run's, which has ended well and written all of them."""
        if self._at == self.path:
            return
        with self._writing():
            for name in NAMES:
                file = self._at / name
                if file.exists():
                    os.replace(file, self.path / name)
                else:  # a file of the earlier run alone: the folder must not mix two runs
                    (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):  # not empty: somebody else's files stay
                self._at.rmdir()
        self._at = self.path

    def close(self) -> None:
        """Close the metrics; no more lines come."""
        if self._metrics is not None:
            with self._writing():
                self._metrics.close()

    def leave(self) -> None:
        """Give up the claim, and remove the folders that this run made if nothing is in them."""
        self._give_up()
        for folder in self._made:
            with suppress(OSError):  # not empty: it stays
                folder.rmdir()
        self._made.clear()

    def _give_up(self) -> None:
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def kept(self) -> Path | None:
        """Return where files are left of a run that did not end well; None where none are."""
        return self._at if self.metrics.exists() else None

    def files(self) -> dict[str, str]:
        """Return the files of the folder, by name without ending."""
        return {file.stem: str(file) for file in sorted(self.path.iterdir()) if file.is_file()}

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file = error.filename or self.path
            raise PolylaneError(f"--run {self.path}: {file} cannot be written: {error.strerror or error}") from error


def _make_first_free(path: Path) -> Path:
    """Make the path, or the first of ``path-2``, ``path-3``, ... that does not exist; two runs at once get one each."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    for name in names:
        # mkdir fails where the folder exists: unlike a look beforehand, this is safe against a run that starts at once.
        with suppress(FileExistsError):
            name.mkdir()
            return name
    raise AssertionError("the names do not end")
