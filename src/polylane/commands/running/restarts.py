"""Restarts: workers are started again from the newest checkpoint when one has died; fewer of them, where that may be.

--max-restarts 3                       a worker dies, or hangs (--on-hang restart)     all are started again
--workers 2:4 (--max-restarts 2)       a worker is lost                                one fewer is started
                                       a worker raises, or hangs                       all are started again
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from polylane.errors import WorkerFailed, WorkerHung

if TYPE_CHECKING:
    from polylane.commands.requests import TrainRequest
    from polylane.commands.running.step_log import TrainingOutcome
    from polylane.runtime.workers.stop_request import StopRequest

# Exceptions of an accelerator that has failed: the process lives, but the machine has lost a worker.
DEVICE_ERRORS = ("AcceleratorError",)


class Starter(Protocol):
    """What starts all workers of a training."""

    def run(self, request: TrainRequest) -> TrainingOutcome:
        """Start all workers by the current plan, and return their outcome."""

    def take_fewer(self) -> str:
        """Take the next plan that has fewer workers; return what is said of it, empty where there is none."""


def train_with_restarts(
    request: TrainRequest, starter: Starter, stop: StopRequest, pause: Callable[[], None], warn: Callable[[str], None]
) -> TrainingOutcome:
    """Train, and start the workers again from the newest checkpoint when one has died, as often as was asked for.

    Args:
        request: the options of the command line, with the checkpoint to go on from.
        starter: has the current plan, and those for fewer workers.
        stop: a run that was asked to end is not started again.
        pause: called before workers are started again.
        warn: called with a sentence about each restart.

    Raises:
        WorkerFailed: a worker died once more than workers are started again.
    """
    from polylane.checkpoint.store import CheckpointStore
    from polylane.commands.running.resume import find_whole

    for restart in itertools.count(1):
        try:
            return starter.run(request)
        except WorkerFailed as error:
            may = not isinstance(error, WorkerHung) or request.trouble.on_hang == "restart"
            if restart > request.saving.max_restarts or stop.is_set() or not may:
                raise
            assert request.checkpoints is not None
            pause()
            store = CheckpointStore(request.checkpoints)
            store.remove_leftovers()  # of the one that was being written
            newest = find_whole(store, warn)
            request = replace(request, resume_from=newest or request.resume_from)
            origin = "from the beginning" if request.resume_from is None else f"from {request.resume_from}"
            fewer = starter.take_fewer() if is_lost(error) else ""
            words = f"restart {restart} of {request.saving.max_restarts}, {origin}{fewer and f', {fewer}'}"
            warn(f"{str(error).splitlines()[0]}; {words}")
    raise AssertionError("the restarts do not end")


def is_lost(error: WorkerFailed) -> bool:
    """Return whether a worker is lost, as with its machine: it was killed, or its accelerator failed.

    One that raised, or that hung and was ended for it, can be started again.
    """
    return not isinstance(error, WorkerHung) and (not error.traceback or error.error_type in DEVICE_ERRORS)
