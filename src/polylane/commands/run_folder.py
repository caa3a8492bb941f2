"""The folder of a run: claimed by one process at a time, with its plan, its metrics as they come, and its results.

Nothing that an earlier run left is lost before this one has ended well: where there is something, a run writes into a
folder of its own below, and its files replace the earlier ones by rename when all of them are there.
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

# All that a run leaves; the weights first, for they are the most that could be lost between two of the renames.
NAMES = (MODEL, "plan.yaml", "metrics.jsonl", "timeline.json", "trace.json", "swimlane.html")

UNFINISHED = "unfinished"  # where a run writes while an earlier one's files are there


class RunFolder:
    """Where the files of one run go.

    Args:
        path: where the folder is or shall be.
        given: whether the user named it. Otherwise it is the first of ``path``, ``path-2``, ``path-3``, ... that does
            not exist, for no run replaces another unasked.

    Attributes:
        path: where the folder is, once it is claimed.

    Raises:
        PolylaneError: from every method, where the folder or a file cannot be written.
    """

    def __init__(self, path: Path, given: bool = True) -> None:
        self.path = path
        self._given = given
        self._metrics: TextIO | None = None
        self._claim: int | None = None  # a descriptor of the folder, locked
        self._made: list[Path] = []  # the folders that did not exist before, the innermost first
        self._at = path

    @property
    def model(self) -> Path:
        """Where the weights go while the run goes on."""
        return self._at / MODEL

    @property
    def metrics(self) -> Path:
        """Where the metrics are while the run goes on, and stay where it does not end well."""
        return self._at / "metrics.jsonl"

    def check(self) -> None:
        """Refuse a place where nothing can be written, without making anything yet."""
        existing = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise PolylaneError(f"--run {self.path}: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PolylaneError(f"--run {self.path}: {existing} cannot be written to")

    @contextmanager
    def claimed(self, writes: bool) -> Iterator[None]:
        """For the while the folder is this run's, see :meth:`claim`; one that does not write claims nothing."""
        if writes:
            self.claim()
        try:
            yield
        finally:
            self.leave()

    def claim(self) -> None:
        """Make the folder this run's: no other run that starts meanwhile gets it. The claim ends with the process.

        Raises:
            PolylaneError: another run is writing there.
        """
        self.check()
        with self._writing():
            self._make()
            self._lock()
        self._at = self.path / UNFINISHED if any((self.path / name).exists() for name in NAMES) else self.path

    def _make(self) -> None:
        missing = [place for place in (self.path, *self.path.parents) if not place.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._given:
            self.path.mkdir(exist_ok=True)
        else:
            self.path = _make_first_free(self.path)
        self._made = [self.path, *missing[1:]] if missing or not self._given else []

    def _lock(self) -> None:
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
        """The training begins: forget what a run that did not end well has left."""
        with self._writing():
            self._at.mkdir(exist_ok=True)
            if self._at != self.path:
                for name in NAMES:
                    (self._at / name).unlink(missing_ok=True)
            self._metrics = self.metrics.open("w", encoding="utf-8", buffering=1)

    def plan(self, text: str) -> None:
        """Write plan.yaml."""
        with self._writing():
            (self._at / "plan.yaml").write_text(text, encoding="utf-8")

    def metric(self, line: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, at once."""
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
        """The run has ended well, all its files are there: they replace an earlier run's."""
        if self._at == self.path:
            return
        with self._writing():
            for name in NAMES:
                file = self._at / name
                if file.exists():
                    os.replace(file, self.path / name)
                else:  # of the earlier run: a mixture of two runs is no run
                    (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):  # what somebody else put there stays
                self._at.rmdir()
        self._at = self.path

    def close(self) -> None:
        """No more metrics come."""
        if self._metrics is not None:
            with self._writing():
                self._metrics.close()

    def leave(self) -> None:
        """Give up the claim; a folder that was made for it and has nothing in it goes, too."""
        self._give_up()
        for folder in self._made:
            with suppress(OSError):  # there is something in it
                folder.rmdir()
        self._made.clear()

    def _give_up(self) -> None:
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def kept(self) -> Path | None:
        """Where something is left of a run that did not end well; None where nothing is."""
        return self._at if self.metrics.exists() else None

    def files(self) -> dict[str, str]:
        """What is there, by name without ending."""
        return {file.stem: str(file) for file in sorted(self.path.iterdir()) if file.is_file()}

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file = error.filename or self.path
            raise PolylaneError(f"--run {self.path}: {file} cannot be written: {error.strerror or error}") from error


def _make_first_free(path: Path) -> Path:
    """Make the path, or the first of ``path-2``, ``path-3``, ... that does not exist: of two runs each gets its own."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    for name in names:
        with suppress(FileExistsError):
            name.mkdir()
            return name
    raise AssertionError("the names do not end")
