"""Updates: a call of a model is of the weights that it was made with, and cannot be run behind a step or a write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import torch
from torch import nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.runtime.step_result import StepResult
from polylane.script.recorded_calls import RecordedCall, Result
from polylane.script.role import ScriptJob


class ScriptUpdates(torch.optim.SGD):
    """Stands for a script's own updates of the weights in the training that a plan is compiled for; never steps.

    Args:
        parameters: what the script updates.
        is_for_closure: whether an optimizer that steps by itself makes them, which says where its step ends.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], is_for_closure: bool = False) -> None:
        super().__init__(parameters)
        self.is_for_closure = is_for_closure


class StepRecorder(Protocol):
    """What keeps the losses and times of a script's steps."""

    def predict(self, problem: TrainingProblem, compiled: CompiledTraining) -> None:
        """Predict a training whose steps are of one loss and one optimizer, before it begins."""

    def begin(self, job: ScriptJob, steps: int) -> None:
        """Take a training that has begun under its plan, after so many steps on whole models."""

    def add_step(self, results: Sequence[StepResult], optimizer: torch.optim.Optimizer) -> None:
        """Take a step of an optimizer: the results of the ``backward()`` calls whose gradients it used."""


class Updates:
    """The updates of the models' weights so far.

    Args:
        numbers: numbers of the models, by the names with which those of their tensors begin.

    Attributes:
        count: number of optimizer steps and writes.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.count = 0
        # By model, the numbers of its last update, and of its last step of an optimizer.
        self._numbers, self._latest, self._steps = dict(numbers), dict[int, int](), dict[int, int]()

    def record(self, models: Iterable[int]) -> None:
        """Record a change of the weights of models."""
        self.count += 1
        self._latest |= dict.fromkeys(models, self.count)

    def record_step(self, models: Iterable[int]) -> None:
        """Record an optimizer step on the weights of models."""
        self.record(models := list(models))
        self._steps |= dict.fromkeys(models, self.count)

    def record_write(self, name: str) -> None:
        """Record that the script has written a parameter, by its name among those of all models."""
        self.record([self._numbers[name.split(".")[0]]])

    def refuse_late(self, calls: Iterable[RecordedCall]) -> None:
        """Refuse to run a model's call with other weights, or another state, than it was made with.

        Raises:
            PolylaneError: one of the calls was made before an update of its model.
        """
        for call in calls:
            if call.target is None:
                continue
            if self._latest.get(call.model, 0) > call.updates:
                _refuse(call, "its optimizer's step(), or a write of its weights, which are others by now")
            if call.is_outdated:
                _refuse(call, "a write of its buffers or attributes, which are others by now")

    def refuse_stepped(self, loss: Result, line: str) -> None:
        """Refuse to differentiate a loss after a step that has changed what autograd has saved for that.

        Args:
            loss: whose passes were run before the step.
            line: of the script, where it differentiates.

        Raises:
            PolylaneError: autograd has saved weights of a model that was stepped since its call.
        """
        stack, numbers = [loss.call], set[int]()
        while stack:
            call = stack.pop()
            if call.number in numbers:
                continue
            numbers.add(call.number)
            stack += [result.call for result in call.arguments]
            if call.target is None or self._steps.get(call.model, 0) <= call.updates:
                continue
            if call.is_parameter or call.touched.saves_weights:
                raise PolylaneError(
                    f"{line}: the loss of the model's call in {call.line} is differentiated after the optimizer's "
                    "step(), by which a variable needed for gradient computation has been modified: call backward() "
                    "before step()"
                )


def _refuse(call: RecordedCall, event: str) -> NoReturn:
    raise PolylaneError(
        f"what the model returned ({call.line}) is asked for after {event}: call backward() before that, or call the "
        "model again"
    )
