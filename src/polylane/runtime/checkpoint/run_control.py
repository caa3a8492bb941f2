"""Run control: between steps all workers agree on what comes next: to go on, to save a checkpoint, or to end.

Agreeing takes a message of each worker. It is not done after every step, but every half second, at a step that all
know from the last time:

    step       1    2    3    4    5    6    7    8    9    10
    agree           x                   x              x
                    next: at 6          next: at 9: a checkpoint is due by then
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polylane.diagnosis.page_layout import Phase
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.save_attempts import SaveAttempts

if TYPE_CHECKING:
    from polylane.runtime.checkpoint.save import CheckpointSaver
    from polylane.runtime.job import Job
    from polylane.runtime.workers.stop_request import StopRequest

T = TypeVar("T")

AGREE_SECONDS = 0.5  # between two times that workers agree
AGREE_APART_SECONDS = 5.0  # of asynchronous replicas, for which the faster ones wait
LOOKS_WHILE_WRITING = 10  # times that workers agree in that time while a checkpoint is being written

# Automatic intervals (Young, CACM 1974; Daly, FGCS 2006): sqrt(2 x cost of a checkpoint x mean time between failures).
DEVICE_FAILS_SECONDS = 50_000 * 3600.0  # of one device: 419 interruptions of 16,384 GPUs in 54 days (Llama 3, 2024)
MOST_STALL = 0.035  # part of the time that checkpoints may cost
FIRST_SECONDS = 10.0  # until the first one, which shows the cost
LONGEST_SECONDS = 1800.0

_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class SaveInterval:
    """When checkpoints are saved.

    Attributes:
        steps: every so many steps; None: by time.
        seconds: every so many seconds; None with ``steps``, and where the interval is chosen by cost.
    """

    steps: int | None = None
    seconds: float | None = None

    def due_seconds(self, saves: int, stall_seconds: float, workers: int) -> float:
        """Return the seconds between the last checkpoint, or the beginning, and the next one.

        Args:
            saves: number of checkpoints so far.
            stall_seconds: what all of them have cost the training.
            workers: number of workers of the training.
        """
        if self.seconds is not None:
            return self.seconds
        if not saves:
            return FIRST_SECONDS
        cost = stall_seconds / saves
        daly = math.sqrt(2 * cost * DEVICE_FAILS_SECONDS / workers)
        return max(cost / MOST_STALL, min(daly, LONGEST_SECONDS))


def parse_interval(text: str) -> SaveInterval:
    """Parse the text of --save-every.

    Raises:
        PolylaneError: it is no number of steps, no time, and not "auto".
    """
    if text == "auto":
        return SaveInterval()
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", text)
    if match is None or not float(match[1]) or ("." in match[1] and not match[2]):
        raise PolylaneError(
            f"--save-every {text[:40]}: give a number of steps (500), a time with its unit (30s, 10m, 2h), or auto"
        )
    if not match[2]:
        return SaveInterval(steps=int(match[1]))
    return SaveInterval(seconds=float(match[1]) * _UNITS[match[2]])


class RunControl:
    """One worker's part in agreeing on saves and on the end; all workers make the same calls.

    Args:
        job: this worker's part in the training.
        folder: folder of the run's checkpoints.
        interval: when checkpoints are saved.
        keep: number of newest checkpoints that are kept.
        stop: this worker's stop request; one that another worker has, it has from then on as well.
        warn: called with a sentence when a checkpoint could not be saved, and the training goes on; None: that is an
            error.
        run: returns facts about the run that a resumed one needs; None where nobody should go on from this step.

    Attributes:
        is_over: whether all have agreed to end.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        interval: SaveInterval,
        keep: int,
        stop: StopRequest,
        warn: Callable[[str], None] | None,
        run: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        self._job, self._interval, self._stop = job, interval, stop
        self._run = run
        self._saver: CheckpointSaver = job.open_saver(folder, keep)
        self._attempts = SaveAttempts(folder, self._saver, warn)
        self._pause = AGREE_APART_SECONDS if job.apart else AGREE_SECONDS
        self._workers = job.plan.processes
        self._saves, self._saved_step = 0, job.position.step
        self._saved_at = time.monotonic()
        self._agreed_at = -math.inf  # how long a step takes is known at the second time: a script's first one is over
        self._agreed_step = job.position.step
        self._next = self._agreed_step + 1
        self.is_over = False

    @property
    def stall_seconds(self) -> float:
        """Time that checkpoints have cost the training on this worker."""
        return self._saver.stall_seconds

    @property
    def newest(self) -> Path | None:
        """Folder of the newest checkpoint that this run has written; None for none."""
        return self._saver.newest

    def agree(self) -> bool:
        """Agree with the others, if this is a step to do so; save, if that is due; return whether the run is over.

        Raises:
            PolylaneError: on all workers, if a checkpoint could not be written and that is to be an error.
        """
        step = self._job.position.step
        if step < self._next:
            return False
        now = time.monotonic()
        seconds = (now - self._agreed_at) / max(step - self._agreed_step, 1)
        # All take rank 0's times. The slowest worker's steps would be as good: they are the same steps.
        answer = (self._stop.number, self._is_due(step, now), max(1, round(self._pause / max(seconds, 1e-6))))
        answers = self._advance(answer)
        self.is_over = self._agree_on_end(number for number, _, _ in answers)
        _, is_due, steps = answers[0]
        if is_due or self.is_over:
            self.save(wait=self.is_over)
        self._agreed_at, self._agreed_step, self._next = time.monotonic(), step, step + steps
        if self._interval.steps is not None:
            to_next = self._interval.steps - step % self._interval.steps
            self._next = min(self._next, step + to_next)
        if self._saver.is_writing:  # it counts once all have said that it is written
            self._next = min(self._next, step + max(1, steps // LOOKS_WHILE_WRITING))
        return self.is_over

    def test_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches of test data, until all have agreed to end; between two of them, all workers alike.

        The state that a test leaves is the one that it found: a checkpoint of the last step can be saved after any.

        Args:
            batches: as many on every worker.

        Raises:
            PolylaneError: on all workers, if a checkpoint could not be written and that is to be an error.
        """
        agreed_at, agreed, due = time.monotonic(), 0, 1
        for number, batch in enumerate(batches, 1):
            yield batch
            if number < due:
                continue
            seconds = (time.monotonic() - agreed_at) / (number - agreed)
            answers = self._advance((self._stop.number, max(1, round(self._pause / max(seconds, 1e-6)))))
            self.is_over = self._agree_on_end(number for number, _ in answers)
            if self.is_over:
                return
            agreed_at, agreed, due = time.monotonic(), number, number + answers[0][1]

    def _agree_on_end(self, numbers: Iterable[int]) -> bool:
        """Return whether a signal has asked any worker to end; launchers of other hosts may not have asked this one.

        Args:
            numbers: number of every worker's signal, 0 for none.
        """
        if number := max(numbers):
            self._stop.number = self._stop.number or number
        return number != 0

    def _advance(self, answer: Any) -> list[Any]:
        """Return what every worker says, by rank, while the checkpoint that is being written goes on."""
        answers = self._attempt(lambda: self._saver.advance(answer))
        if answers is None:  # the others have heard of a failed checkpoint: now of the rest
            answers = self._saver.advance(answer)
        return list(answers)

    def _is_due(self, step: int, now: float) -> bool:
        if self._interval.steps is not None:
            # Of a script, whose loop asks for batches, some steps in between may not be asked about.
            return step // self._interval.steps > self._agreed_step // self._interval.steps
        due = self._interval.due_seconds(self._saves, self._saver.stall_seconds, self._workers)
        return now - self._saved_at >= due

    def save(self, wait: bool) -> None:
        """Save a checkpoint of this step, unless there is one; collective.

        Args:
            wait: whether to return when it is complete.

        Raises:
            PolylaneError: on all workers, if it could not be written and that is to be an error.
        """

        def write() -> None:
            facts = None if self._saved_step == self._job.position.step else self._run()
            # Not every worker knows all losses.
            if all(self._saver.advance(facts is not None)) and facts is not None:
                self._saved_step = self._job.position.step
                self._saved_at = time.monotonic()
                self._saves += 1
                self._job.begin_checkpoint(self._saver, facts)
            if wait:
                self._saver.finish()

        with self._job.world.progress.during(Phase.SAVING):
            # The one before first: if its disk was full, this one is begun all the same. It may find room, and a
            # pipeline without a flush is emptied at every step that checkpoints are due at, whatever the disk does.
            self._attempt(self._saver.finish)
            self._attempt(write)

    def tell_failed(self) -> None:
        """Say at the end of the training how many checkpoints could not be written."""
        self._attempts.tell_failed()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete; collective.

        Raises:
            PolylaneError: on all workers, if it could not be written and that is to be an error.
        """
        with self._job.world.progress.during(Phase.SAVING):
            self._attempt(self._saver.finish)

    def _attempt(self, act: Callable[[], T]) -> T | None:
        """Return what an action of all workers returns; None where it failed, and the training goes on."""

        def note_failure() -> T:
            try:
                return act()
            except PolylaneError:  # a checkpoint of this step is none, and may be saved again
                self._saved_step = -1
                raise

        return self._attempts.attempt(note_failure)
