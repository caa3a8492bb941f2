"""Compile a training of parts that a test has in its hands, as one call."""

from __future__ import annotations

from typing import Any

from torch import nn

from polylane.compile import compiled_training
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Init, Objective
from polylane.compile.training_problem import TrainingProblem
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec


def compile_training(
    model: nn.Module,
    objectives: dict[str, Objective],
    example: Any,
    plan: str | Spec | Plan,
    *,
    batch_size: int | None = None,
    init: Init | None = None,
    in_float64: bool = False,
    **how: Any,
) -> CompiledTraining:
    """The training compiled for a plan; ``how`` as of :func:`polylane.compile.compiled_training.compile_training`."""
    problem = TrainingProblem(model, objectives, example, batch_size, init, in_float64)
    return compiled_training.compile_training(problem, plan, **how)
