"""Best checkpoints: the steps whose tests had the best results, each a whole checkpoint in a folder of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylane.callbacks.metric_rules import BestSteps
from polylane.checkpoint.commit import remove_steps
from polylane.diagnosis.page_layout import Phase
from polylane.runtime.checkpoint.save_attempts import SaveAttempts

if TYPE_CHECKING:
    from polylane.runtime.checkpoint.save import CheckpointSaver
    from polylane.runtime.job import Job


class BestCheckpoints:
    """Saves a training's best steps while it goes on; all workers make the same calls.

    Args:
        job: this worker's part in the training.
        folder: folder of the best checkpoints, in which there are no others.
        steps: the best steps so far.
        warn: called with a sentence when one could not be saved, and the training goes on; None: that is an error.
        describe: returns facts about the run that a resumed one needs; None where nobody should go on from this step.

    Attributes:
        steps: the best steps so far.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        steps: BestSteps,
        warn: Callable[[str], None] | None,
        describe: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        self._job, self._folder, self.steps = job, folder, steps
        self._describe = describe
        self._saver: CheckpointSaver = job.open_saver(folder, None)
        self._attempts = SaveAttempts(folder, self._saver, warn)

    def add(self, step: int, results: Mapping[str, float]) -> bool:
        """Take the results of a step's test; return whether it is to be saved."""
        return self.steps.add(step, results)

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a checkpoint of this step while the training goes on, and remove those that are no longer the best.

        Args:
            state: of the callbacks, which the checkpoint keeps.

        Raises:
            PolylaneError: on all workers, if it could not be written and that is to be an error.
        """

        def write() -> None:
            facts = self._describe()
            # With servers a worker knows the losses of its own replica alone: all save, or none does.
            if all(self._saver.advance(facts is not None)) and facts is not None:
                self._job.begin_checkpoint(self._saver, {**facts, "callbacks": state})

        with self._job.world.progress.during(Phase.SAVING):
            self.finish()
            self._attempts.attempt(write)

    def finish(self) -> None:
        """Wait until the latest one is complete, and remove those that are no longer the best; collective.

        Raises:
            PolylaneError: on all workers, if it could not be written and that is to be an error.
        """
        self._attempts.attempt(self._saver.finish)
        if self._job.world.rank == 0 and self.steps.steps:
            with contextlib.suppress(OSError):  # they cost space on the disk, and no training ends for that
                remove_steps(str(self._folder), self.steps.steps)

    def end(self) -> None:
        """Wait for the last one, and say how many could not be written; collective.

        Raises:
            PolylaneError: on all workers, if it could not be written and that is to be an error.
        """
        self.finish()
        self._attempts.tell_failed()
