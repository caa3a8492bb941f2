"""Script log: the steps of a prepared script in the log of its run, as those of a recipe's training."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polylane.commands.logs.goodput import PhaseClock
from polylane.commands.logs.step_columns import StepColumns, find_product_dtype
from polylane.commands.logs.step_log import StepLog, Tell, TrainingOutcome
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.graph import Graph
from polylane.inspection.predicted_run import predict_run
from polylane.observe.timeline import Timeline
from polylane.plan.plan_file import dump
from polylane.runtime.step_result import StepResult
from polylane.runtime.telemetry.matmul_rate import measure_matmul_rate
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.worker_facts import WorkerFacts
from polylane.script.model_state.updates import ScriptUpdates
from polylane.script.role import ScriptJob


@dataclass(frozen=True)
class AccumulatedStep:
    """A step of an optimizer, whose gradients are those of several ``backward()`` calls; its loss is their sum.

    Attributes:
        results: of the runs of the tapes, in order.
    """

    results: Sequence[StepResult]

    @property
    def step(self) -> int:
        """Number of the last run, from 0."""
        return self.results[-1].step

    @property
    def samples(self) -> int:
        """The samples of all runs."""
        return sum(result.samples for result in self.results)

    @property
    def loss(self) -> float:
        """The sum of the losses that were differentiated."""
        return sum(result.loss for result in self.results)

    @property
    def sums(self) -> tuple[float, float]:
        """The loss as (total, count), of which epochs make up a mean."""
        return self.loss * self.samples, self.samples

    @property
    def facts(self) -> tuple[WorkerFacts, ...]:
        """What workers say of the step; nothing where it has several runs, none of which has all of its gradients."""
        return self.results[0].facts if len(self.results) == 1 else ()

    @property
    def timeline(self) -> Timeline:
        """The spans of the last run."""
        return self.results[-1].timeline

    @property
    def noise(self) -> NoiseReading | None:
        """The norms of the gradients of a single run's parts; None of several, whose sum nobody has measured."""
        return self.results[0].noise if len(self.results) == 1 else None


class ScriptLog:
    """Log of the steps of a script under its plan, on rank 0.

    Args:
        tell: called with each message, as plain data.
        is_resumed: whether the run goes on from a checkpoint of its own folder.
    """

    def __init__(self, tell: Tell, is_resumed: bool) -> None:
        self._tell, self._is_resumed = tell, is_resumed
        self._log: StepLog | None = None
        self._job: ScriptJob | None = None

    def predict(self, problem: TrainingProblem, compiled: CompiledTraining) -> None:
        """Predict the run, and tell it: before the training begins.

        Args:
            problem: the script's step as the user wrote it.
            compiled: the same, compiled for the plan.
        """
        self._tell({"kind": "predicted", "run": predict_run(problem, compiled, ["polylane", "run", *sys.argv])})

    def begin(self, job: ScriptJob, steps: int) -> None:
        """Begin the log, and tell of the plan.

        Args:
            job: the training that has begun.
            steps: number of steps before it, on whole models or of the run that is gone on with.
        """
        role, progress = job.role, job.world.progress

        def find_graph() -> Graph | None:
            graphs = [partition.graph for partition in role.partitions.values()]
            return graphs[0] if len(graphs) == 1 else None

        rate = measure_matmul_rate(job.world.device, find_product_dtype(job.plan, job.model))
        columns = StepColumns(job.plan, find_graph, rate, role.telemetry.timing, job.world.host_names)
        self._job, self._log = job, StepLog(self._tell, lambda: 1, columns)
        self._phases, self._steps = PhaseClock(progress, self._tell, columns.means), steps
        self._log.resume({"steps": steps, "samples": 0, "seconds": 0.0, "loss": math.nan, "epoch": (0.0, 0.0, 0.0)})
        self._log.begin_epoch()
        message = {"kind": "begin", "plan": dump(job.plan), "spec": job.plan.spec, "workers": job.plan.processes}
        resumed_at = steps if self._is_resumed else None
        self._tell({**message, "resumed_at": resumed_at, "resumed_loss": math.nan, "resumed_own": self._is_resumed})

    def add_step(self, results: Sequence[StepResult], optimizer: torch.optim.Optimizer) -> None:
        """Add a step, and send the message about an earlier one.

        Args:
            results: of the ``backward()`` calls whose gradients it used.
            optimizer: the optimizer that has stepped.
        """
        assert self._log is not None
        rate = None if isinstance(optimizer, ScriptUpdates) else optimizer.param_groups[0].get("lr")
        self._log.add(AccumulatedStep(tuple(results)), None, [] if rate is None else [float(rate)])
        self._phases.note_step(self._log.launched)

    def outcome(self) -> TrainingOutcome | None:
        """Return what the training has come to; None where it has made no step under the plan."""
        if self._log is None or self._job is None or not self._log.has_made_steps:
            return None
        self._log.complete()
        self._phases.tell(self._log.launched)
        return self._log.outcome(self._job.plan.spec, None, stopped=False)
