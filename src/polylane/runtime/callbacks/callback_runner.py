"""Callback runner: calls a training's callbacks, and lets all workers agree on what these ask for.

Results of tests are the same on all workers, so that most callbacks decide alike. One that asks on a single worker is
heard by all: after each test in any case, and between steps every half second, at a step that all know from the last
time (as :mod:`polylane.runtime.checkpoint.run_control` does).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polylane.callbacks.callback import Callback, TrainingStatus
from polylane.errors import PolylaneError, describe_error
from polylane.graph.python_state.own_objects import is_users

if TYPE_CHECKING:
    from polylane.runtime.callbacks.best_checkpoints import BestCheckpoints
    from polylane.runtime.job import Job

AGREE_SECONDS = 0.5  # between two times that workers agree between steps
AGREE_APART_SECONDS = 5.0  # of asynchronous replicas, for which the faster ones wait

Tell = Callable[[dict[str, Any]], None]


class CallbackRunner:
    """One worker's callbacks; all workers make the same calls, dedicated servers too.

    Args:
        job: this worker's part in the training.
        callbacks: the callbacks, the same on every worker.
        best: saves the best steps; None: nobody asks for that.

    Attributes:
        reason: why the training ends, as all workers know it; empty while it goes on.
    """

    def __init__(self, job: Job, callbacks: Sequence[Callback], best: BestCheckpoints | None = None) -> None:
        self._job, self._callbacks, self._best = job, callbacks, best
        self._status = TrainingStatus(job.plan.spec, job.plan.workers, job.world.rank, job.position.step)
        # A dedicated server has no results; it takes part in what the others agree on.
        self._serves = job.world.rank >= job.plan.workers
        self._asks_in_steps = any(type(callback).on_step_end is not Callback.on_step_end for callback in callbacks)
        self._pause = AGREE_APART_SECONDS if job.apart else AGREE_SECONDS
        self._agreed_at, self._agreed_step = time.monotonic(), job.position.step
        self._next = self._agreed_step + 1
        self._error, self._is_best = "", False  # of this worker's callbacks, which all raise together; as all agree
        self.reason = ""

    def listen(self, tell: Tell) -> Tell:
        """Return a function that tells what ``tell`` does, and calls ``on_step_end`` for the messages of steps."""

        def tell_and_call(message: dict[str, Any]) -> None:
            tell(message)
            if message["kind"] == "step" and self._asks_in_steps:
                step = {key: value for key, value in message.items() if key != "kind"}
                self._update_status(message.get("epoch"))
                self._call("on_step_end", step)

        return tell_and_call

    def start(self) -> None:
        """Call ``on_train_start``; collective.

        Raises:
            PolylaneError: on all workers, if a callback raises.
        """
        self._call("on_train_start")
        self._agree()

    def agree(self) -> bool:
        """Agree on the end, if this is a step to do so; return whether the training ends. Collective.

        Raises:
            PolylaneError: on all workers, if a callback has raised.
        """
        step = self._job.position.step
        if not self._asks_in_steps or step < self._next:
            return bool(self.reason)
        seconds = (time.monotonic() - self._agreed_at) / max(step - self._agreed_step, 1)
        steps = self._agree(max(1, round(self._pause / max(seconds, 1e-6))))
        self._agreed_at, self._agreed_step, self._next = time.monotonic(), step, step + steps
        return bool(self.reason)

    def evaluate(self, epoch: int, results: Mapping[str, float]) -> bool:
        """Call ``on_evaluate_end``, and save a step that is among the best; return whether the training ends.

        Args:
            epoch: number of the epoch, from 1.
            results: losses and metrics by name.

        Raises:
            PolylaneError: on all workers, if a callback raises, or a checkpoint could not be written and that is to be
                an error.
        """
        if not self._callbacks and self._best is None:
            return False
        self._update_status(epoch)
        self._call("on_evaluate_end", dict(results))
        is_best = False
        if self._best is not None and not self._serves:
            try:
                is_best = self._best.add(self._job.position.step, results)
            except PolylaneError as error:
                self._error = str(error)
        # All follow rank 0, whose results are those that the run's files have.
        self._agree(is_best=is_best)
        if self._best is not None and self._is_best:
            self._best.save(self.state_dict())
        return bool(self.reason)

    def end(self) -> None:
        """Call ``on_train_end``, and wait for checkpoints; collective.

        Raises:
            PolylaneError: on all workers, if a callback raises.
        """
        self._update_status(None)
        self._call("on_train_end")
        if self._callbacks:
            self._agree()
        if self._best is not None:
            self._best.end()

    # ---- what checkpoints keep ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all callbacks, in order, as plain values."""
        best = {} if self._best is None else {"best": self._best.steps.state_dict()}
        return {"callbacks": [[type(c).__qualname__, c.state_dict()] for c in self._callbacks], **best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the states of a checkpoint, each by the class of its callback and its place among these."""
        states = [(str(name), values) for name, values in state.get("callbacks", ())]
        for callback in self._callbacks:
            index = next((i for i, (name, _) in enumerate(states) if name == type(callback).__qualname__), None)
            if index is not None:
                callback.load_state_dict(states.pop(index)[1])
        if self._best is not None and "best" in state:
            self._best.steps.load_state_dict(state["best"])

    # ---- agreeing ----------------------------------------------------------------------------------------------------

    def _update_status(self, epoch: int | None) -> None:
        self._status.step = self._job.position.step
        self._status.epoch = self._status.epoch if epoch is None else epoch

    def _call(self, method: str, *values: Any) -> None:
        """Call a method of all callbacks; an exception is kept until workers agree, since the others wait there."""
        if self._serves:
            return
        for callback in self._callbacks:
            try:
                getattr(callback, method)(self._status, *values)
            except PolylaneError as error:
                self._error = self._error or str(error)
            except Exception as error:  # of the user's own code
                lines = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
                location = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
                name = f"{type(callback).__name__}.{method}"
                self._error = self._error or f"{name} raised {describe_error(error)}{location}"

    def _agree(self, steps: int = 1, is_best: bool = False) -> int:
        """Hear what all workers ask for; return rank 0's number of steps until the next time.

        Raises:
            PolylaneError: on all workers, if a callback has raised.
        """
        answers = self._job.worker.exchange((self._error, self._status.stop_reason, steps, is_best))
        if not answers:  # the training workers have closed the job, and this server hears of it
            return steps
        if ranks := [rank for rank, answer in enumerate(answers) if answer[0]]:
            origin = "" if len(ranks) == len(answers) else f", on rank {', '.join(map(str, ranks))} alone"
            raise PolylaneError(f"{answers[ranks[0]][0]}{origin}")
        self.reason = next((answer[1] for answer in answers if answer[1]), "")
        self._is_best = bool(answers[0][3])
        return int(answers[0][2])
