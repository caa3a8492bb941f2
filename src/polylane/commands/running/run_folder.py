"""Run folder: claimed by one process at a time, with the run's plan, its metrics line by line, and its results.

An earlier run's results are not lost before this one has ended well. Where there are such files, a run writes into the
folder ``unfinished`` below, and renames its files over the earlier ones when all of them are there.

Under torchrun a run may have several attempts, after a worker died. They share the folder: a later one finds what the
attempts before it wrote by a note of who started them, and appends its metrics.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from polylane.commands.logs import file_names
from polylane.commands.logs.lost_files import LostFiles
from polylane.commands.logs.metrics_file import (
    MetricsFile,
    belongs_to_checkpoint,
    find_last_step,
    lines_until,
    read_json,
)
from polylane.commands.printing import dump_json, replace_text
from polylane.diagnosis import report_file
from polylane.diagnosis.report import HangReport
from polylane.errors import PolylaneError, WorkerFailed, describe_error
from polylane.observe.swimlane import render as swimlane
from polylane.observe.timeline import Timeline
from polylane.output import say_at_once

ATTEMPT = ".attempt"  # name of the note in a folder of torchrun's workers: who started them, and where they write


class RunFolder:
    """The folder for the files of one run.

    Args:
        path: the folder, which need not exist yet.
        given: whether the user named it. Otherwise the run takes the first of ``path``, ``path-2``, ``path-3``, ...
            that does not exist, for no run replaces another unasked.
        launch: what all attempts of one start of torchrun have in common; empty for a run with one attempt.
        warn: called with a sentence when the folder cannot be written to any more, and the training goes on; None:
            that is an error.

    Attributes:
        path: the folder; final once it is claimed.
        continues: whether an earlier attempt of this launch has written here; known once it is claimed.
        page: the page of the run, once it is written.

    Raises:
        PolylaneError: from every method, where the folder or a file cannot be written.
    """

    def __init__(
        self, path: Path, given: bool = True, launch: str = "", warn: Callable[[str], None] | None = None
    ) -> None:
        self.path = path
        self._given = given
        self._launch, self._warn = launch, warn
        self.continues = False
        self._metrics: MetricsFile | None = None
        self._has_begun, self._has_ended = False, False
        self._lost = LostFiles(warn)
        self.page: Path | None = None
        self._claim: int | None = None  # file descriptor of the folder, locked
        self._made: list[Path] = []  # folders that this run made, the innermost first
        self._at = path  # where files are written until finish(): the folder, or UNFINISHED below it

    @property
    def model(self) -> Path:
        """The path of the weights during the run."""
        return self._at / file_names.MODEL

    @property
    def metrics(self) -> Path:
        """The path of the metrics during the run; they stay there where it does not end well."""
        return self._at / file_names.METRICS

    def check(self) -> None:
        """Refuse a place where nothing can be written, without making anything yet.

        Raises:
            PolylaneError: the folder cannot be made, or cannot be written to.
        """
        existing = next(path for path in (self.path, *self.path.absolute().parents) if os.path.exists(path))
        if not os.path.isdir(existing):
            raise PolylaneError(f"--run {self.path}: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PolylaneError(f"--run {self.path}: {existing} cannot be written to")
        # This run reads and replaces these, when it is too late to choose another folder. A pipe holds up who opens it.
        for path in (self.path, self.path / file_names.UNFINISHED):
            for name in (*file_names.ALL_NAMES, ATTEMPT):
                if kind := _describe_kind(path / name):
                    raise PolylaneError(f"--run {path}: {name} there is a {kind}, and a file of the run: move it away")

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
        except Exception as error:
            if writes:
                self.note_failure(error)
            raise
        finally:
            if writes and not self._has_ended and self.kept() is not None:
                self.report()  # of a run that did not end well: it shows where
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
            self._at = self._find_own_place()
            if self._launch:
                replace_text(self.path / ATTEMPT, f"{self._launch}\n{self._at.relative_to(self.path)}\n")

    def _find_own_place(self) -> Path:
        """Return the folder to write into, which an earlier attempt of this launch may have chosen."""
        note = self._read_note(self.path)
        self.continues = note is not None
        if note is not None:
            return self.path / note
        has_files = any((self.path / name).exists() for name in file_names.ALL_NAMES)
        return self.path / file_names.UNFINISHED if has_files else self.path

    def _read_note(self, folder: Path) -> str | None:
        """Return where below the folder an earlier attempt of this launch writes; None where none does."""
        try:
            launch, location = (folder / ATTEMPT).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return None
        return location if self._launch and launch == self._launch else None

    def _make(self) -> None:
        if not self._given:
            started = (path for path in _same_name(self.path) if self._read_note(path) is not None)
            if (earlier := next(started, None)) is not None:
                self.path = earlier
                return
        # Remembered for leave(), which removes folders that this run made and did not use.
        missing = [path for path in (self.path, *self.path.parents) if not os.path.exists(path)]
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

    def begin(
        self, resumed_at: int | None = None, loss: float = math.nan, is_own: bool = True
    ) -> dict[str, Any] | None:
        """Begin the training: delete what a run that did not end well has left, and open the metrics.

        A restart goes on where nothing can be written, as the attempt before it did: its metrics stay as they are.

        Args:
            resumed_at: step of the checkpoint that the run goes on from: metrics up to that step stay, unless they are
                another run's; None: a fresh start.
            loss: of that step in the checkpoint; not finite where it has none.
            is_own: whether the checkpoint is one of this folder's.

        Returns:
            Where the time of the run went before, see :mod:`.goodput`; None where this is its first attempt.
        """
        self.close()
        goodput: dict[str, Any] | None = None
        with self._starting(file_names.METRICS, "the metrics from here on are lost"):
            self._at.mkdir(exist_ok=True)
            earlier = self.metrics if self.metrics.exists() else self.path / file_names.METRICS
            kept_metrics = ""
            if resumed_at is not None and belongs_to_checkpoint(earlier, resumed_at, loss, is_own):
                kept_metrics = lines_until(earlier, resumed_at)
            if kept_metrics or self.continues:
                goodput = read_json(earlier.with_name(file_names.GOODPUT))
            if resumed_at is not None:  # before anything is deleted: whenever this process ends, these lines are there
                replace_text(self.metrics, kept_metrics)
            if self._at != self.path and not self.continues:
                for name in file_names.ALL_NAMES:
                    if resumed_at is None or name != file_names.METRICS:
                        (self._at / name).unlink(missing_ok=True)
            self._metrics = MetricsFile(self.metrics, append=self.continues or resumed_at is not None)
            self._has_begun = True
        return goodput

    def plan(self, text: str, options: Mapping[str, Any] | None = None) -> None:
        """Write the plan into plan.yaml, and the options of a recipe's run into run.json."""
        with self._starting(file_names.PLAN, "plan.yaml is that of an earlier attempt"):
            replace_text(self._at / file_names.PLAN, text)
            if options is not None:
                replace_text(self._at / file_names.RUN, dump_json(dict(options)))

    def metric(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, at once. Where that fails and the run goes on, later lines are lost, too."""
        if self._metrics is not None:
            with self._lost.pass_over(self.path, file_names.METRICS, "the metrics from here on are lost"):
                try:
                    self._metrics.append(dump_json(line))
                except OSError:
                    self.close()
                    raise

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a file of facts about the run, in place of what was written before.

        Where that fails, what was written before stays, and it is said once.
        """
        with self._lost.pass_over(self.path, name, "what it had before stays"):
            replace_text(self._at / name, dump_json(data))

    def timelines(self, timeline: Timeline, shown: Mapping[str, Timeline]) -> None:
        """Write the timeline of a typical step, as data and as pictures, and those of all steps that are kept."""
        with self._lost.pass_over(self.path, file_names.TIMELINE, "some timelines and pictures of steps are lost"):
            self._at.mkdir(parents=True, exist_ok=True)  # it may have been removed during the training
            replace_text(self._at / file_names.TIMELINE, dump_json(timeline.to_dict()))
            steps = {name: step.to_dict() for name, step in shown.items()}
            replace_text(self._at / file_names.TIMELINES, dump_json({"steps": steps}))
            replace_text(self._at / file_names.TRACE, dump_json(swimlane.perfetto(timeline)))
            replace_text(self._at / file_names.SWIMLANE, swimlane.html(timeline))

    def why(self, report: HangReport) -> None:
        """Write what every worker was doing when the run stood still or failed; ``polylane why`` reads it."""
        with self._writing():
            self._at.mkdir(exist_ok=True)
            (self._at / file_names.WHY).write_text(dump_json(report_file.to_dict(report)), encoding="utf-8")

    def note_failure(self, error: Exception) -> None:
        """Write what has ended the run, for ``polylane why`` and the page, where the watch over its workers has not."""
        is_reported = isinstance(error, WorkerFailed) and (self._at / file_names.WHY).exists()
        sentence = str(error) if isinstance(error, PolylaneError) else describe_error(error)
        sentence = error.sentence if isinstance(error, WorkerFailed) else sentence
        if not is_reported and self.kept() is not None:  # before its first step a run leaves nothing
            with suppress(PolylaneError):  # the exception matters more
                self.why(HangReport(sentence, (), (), Timeline((), 0)))

    def finish(self) -> None:
        """Replace an earlier run's files by this run's, which has ended well and written all of them."""
        with self._writing():
            (self.path / ATTEMPT).unlink(missing_ok=True)
            for folder in {self._at, self.path}:  # of an attempt that failed, or of an earlier run
                (folder / file_names.WHY).unlink(missing_ok=True)
            for name in file_names.NAMES if self._at != self.path else ():
                file = self._at / name
                if file.exists():
                    os.replace(file, self.path / name)
                else:  # a file of the earlier run alone: the folder must not mix two runs
                    (self.path / name).unlink(missing_ok=True)
            if self._at != self.path:
                with suppress(OSError):  # not empty: somebody else's files stay
                    self._at.rmdir()
        self._at, self._has_ended = self.path, True
        self.report()

    def report(self) -> None:
        """Write the page of the run; where that fails, the run has its other files, and a warning says so."""
        from polylane.commands.reporting.report_page import write_report

        self.page = None
        try:
            self.page = write_report(self._at, is_over=True)
        # A page is drawn from files that a user may have changed, at the end of hours of training.
        except Exception as error:
            path = str(self._at / file_names.REPORT)
            sentence = str(error) if str(error).startswith(path) else f"{path} was not written: {error}"
            (self._warn or say_at_once)(sentence)

    def add_weights(self, step: int, write: Callable[[Path], None]) -> Path | None:
        """Add the weights of a run that has made all of its steps, and died before they were written.

        Args:
            step: number of the run's last step.
            write: writes the weights to a path.

        Returns:
            The file; None where the weights of that step were there.
        """
        earlier_metrics = self.path / file_names.METRICS
        if self._at != self.path and (not self.metrics.exists() or find_last_step(earlier_metrics) >= step):
            self._remove_files()  # the earlier run's files are those of that step, or nothing else is there
            self._at = self.path
        is_missing = not self.model.exists()
        if is_missing:
            write(self.model)
        if is_missing or self._at != self.path:
            self.finish()
        return self.model if is_missing else None

    def _remove_files(self) -> None:
        """Remove what this run, or one that did not end well, has written into UNFINISHED."""
        with self._writing():
            for name in file_names.ALL_NAMES:
                (self._at / name).unlink(missing_ok=True)
            with suppress(OSError):  # not there, or somebody else's files are in it
                self._at.rmdir()

    def close(self) -> None:
        """Close the metrics; no more lines come."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def leave(self) -> None:
        """Give up the claim, and remove the folders that this run made if nothing is in them."""
        if self._claim is not None and not self.metrics.exists():  # nothing was written: the note is of no use
            with suppress(OSError):
                (self.path / ATTEMPT).unlink(missing_ok=True)
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
        return self._at if self._has_begun and self.metrics.exists() else None

    def files(self) -> dict[str, str]:
        """Return the files of the folder, by name without ending."""
        files = sorted(file for file in self.path.iterdir() if not file.name.startswith("."))
        return {file.stem: str(file) for file in files if file.is_file()}

    def _writing(self) -> AbstractContextManager[None]:
        """Return a context manager in which what cannot be written is an error."""
        return self._lost.refuse(self.path)

    def _starting(self, name: str, loss: str) -> AbstractContextManager[None]:
        """Return a context manager for the files of a start: what fails is an error, but where the run goes on."""
        return self._lost.pass_over(self.path, name, loss) if self._has_begun or self.continues else self._writing()


def _describe_kind(path: Path) -> str:
    """Return what is at a path that is no file; empty for a file, and where there is nothing."""
    if not os.path.exists(path) or os.path.isfile(path):
        return ""
    return "folder" if os.path.isdir(path) else "named pipe" if path.is_fifo() else "device or socket"


def _same_name(path: Path) -> Iterator[Path]:
    """Yield those of ``path``, ``path-2``, ``path-3``, ... that exist, up to the first that does not."""
    return itertools.takewhile(Path.exists, _numbered(path))


def _numbered(path: Path) -> Iterator[Path]:
    return itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))


def _make_first_free(path: Path) -> Path:
    """Make the path, or the first of ``path-2``, ``path-3``, ... that does not exist; two runs at once get one each."""
    for name in _numbered(path):
        # mkdir fails where the folder exists: unlike a look beforehand, this is safe against a run that starts at once.
        with suppress(FileExistsError):
            name.mkdir()
            return name
    raise AssertionError("the names do not end")
