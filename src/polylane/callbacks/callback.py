"""Callback: methods that a training calls on every worker, with plain values; each may ask the training to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainingStatus:
    """Where a training is, and the way to ask that it ends.

    Attributes:
        plan: the plan that is trained, in one line.
        workers: number of workers that train.
        rank: rank of this worker, from 0.
        step: number of optimizer steps that were made.
        epoch: number of the epoch, from 1; 0 before the first step.

    Examples:
        >>> from polylane.callbacks.callback import TrainingStatus
        >>> status = TrainingStatus(plan="data=2", workers=2, rank=0, step=10, epoch=1)
    """

    plan: str
    workers: int
    rank: int
    step: int = 0
    epoch: int = 0
    _reason: str = field(default="", repr=False)

    def stop(self, reason: str) -> None:
        """Ask that the training ends, as if it had made its last step; all workers end at the same step.

        It is enough if one worker asks. Called in ``on_step_end``, workers agree about it every half second.

        Args:
            reason: why, as the training's last line says it.

        Examples:
            >>> status.stop("the loss is 0")
        """
        self._reason = self._reason or reason or "a callback asked for it"

    @property
    def stop_reason(self) -> str:
        """Why this worker asks that the training ends; empty where it does not.

        Examples:
            >>> status.stop_reason
            'the loss is 0'
        """
        return self._reason


class Callback:
    """Base of callbacks: a subclass overrides the methods that it needs.

    All workers that train call them in the same order, with the same values but for times, and for what rank 0 alone
    is told of steps. Exceptions end the training.

    Examples:
        A callback that ends the training when the loss of the tests is small. A recipe's ``callbacks()`` returns it in
        a list:

        >>> import polylane
        >>> class StopWhenGood(polylane.Callback):
        ...     def __init__(self, bound):
        ...         self.bound, self.results = bound, []
        ...
        ...     def on_evaluate_end(self, status, results):
        ...         self.results.append(results["test_loss"])
        ...         if results["test_loss"] < self.bound:
        ...             status.stop(f"test loss below {self.bound}")
        ...
        ...     def state_dict(self):
        ...         return {"results": self.results}
        ...
        ...     def load_state_dict(self, state):
        ...         self.results = state["results"]
        >>> def callbacks():
        ...     return [StopWhenGood(0.1)]

        The examples of the methods call it as a training does:

        >>> from polylane.callbacks.callback import TrainingStatus
        >>> (callback,), status = callbacks(), TrainingStatus(plan="data=2", workers=2, rank=0)
    """

    def on_train_start(self, status: TrainingStatus) -> None:
        """Called before the first step, also of a run that was resumed, after ``load_state_dict``.

        Args:
            status: the training; its step is that of the checkpoint of a run that was resumed.

        Examples:
            >>> callback.on_train_start(status)
        """

    def on_step_end(self, status: TrainingStatus, step: Mapping[str, Any]) -> None:
        """Called for every step, some steps later, when its loss is known.

        Args:
            status: the training, some steps further.
            step: what ``metrics.jsonl`` has of the step: its number, loss, samples, seconds, learning rate, ...; the
                columns of observed steps on rank 0 alone.

        Examples:
            >>> callback.on_step_end(status, {"step": 1, "loss": 0.7, "samples": 64})
        """

    def on_evaluate_end(self, status: TrainingStatus, results: Mapping[str, float]) -> None:
        """Called after each epoch's test; without test data after each epoch.

        Args:
            status: the training, after the epoch's last step.
            results: ``train_loss`` of the epoch, ``test_loss``, and the recipe's metrics by name.

        Examples:
            >>> callback.on_evaluate_end(status, {"train_loss": 0.2, "test_loss": 0.05})
            >>> status.stop_reason
            'test loss below 0.1'
        """

    def on_train_end(self, status: TrainingStatus) -> None:
        """Called after the last step and its test, before the weights are saved.

        Args:
            status: the training, after its last step.

        Examples:
            >>> callback.on_train_end(status)
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of this callback, as plain values that JSON has: checkpoints keep it.

        Returns:
            Numbers, texts, lists and dicts, by name.

        Examples:
            >>> callback.state_dict()
            {'results': [0.05]}
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` has returned, in the run that the checkpoint is of.

        Args:
            state: that of the checkpoint.

        Examples:
            >>> callback.load_state_dict({"results": [0.3, 0.2]})
        """
