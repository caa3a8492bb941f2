"""Option ``--noise``: whether a training measures its gradient noise, refused where the plan does not allow it."""

from __future__ import annotations

from polylane.commands.learning_rates import NoiseMode
from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.telemetry.part_layout import couples_replicas, why_not_measured
from polylane.runtime.training_role import TrainingRole


def check_noise(mode: NoiseMode, prepared: CompiledTraining) -> None:
    """Refuse to measure the gradient noise where the plan does not allow it, before any worker starts.

    Args:
        mode: the option of the command line; "auto" measures nothing there.
        prepared: the training, compiled for its plan.

    Raises:
        PolylaneError: "on", and it cannot be measured.
    """
    if mode == "on" and (reason := _why_not(prepared)) is not None:
        raise PolylaneError(f"--noise on: {reason}")


def measure_noise(mode: NoiseMode, job: Job) -> None:
    """Begin to measure the gradient noise of a training, where that is asked for and the plan allows it.

    Args:
        mode: the option of the command line.
        job: this worker's part in the training, before its first step.
    """
    if isinstance(worker := job.worker, TrainingRole):
        worker.telemetry.noise.set_mode(mode)


def _why_not(prepared: CompiledTraining) -> str | None:
    plan, graph = prepared.plan, prepared.main_partition.graph
    return why_not_measured(plan, couples_replicas(plan, graph, prepared.batch_is_sharded))
