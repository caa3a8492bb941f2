"""Compile a training of parts that a test has in its hands, as one call; captures of one model are shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from polylane.compile import compiled_training
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Init, Objective, optimized_names
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.graph import Graph
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec

# By model, loss and what is trained; each with the model, so that its identity stays its own.
_graphs: dict[Any, tuple[nn.Module, Graph]] = {}


@dataclass(frozen=True)
class CapturedOnce(TrainingProblem):
    """A problem whose graph is captured once, with the whole example of the first plan: all plans divide that graph."""

    def capture(self, samples: int | None = None, objective: Objective | None = None) -> Graph:
        objective = objective or self.objective
        trained = tuple(optimized_names(self.parameters, objective.optimizer))
        key = id(self.model), self.model.training, objective.loss, trained, self.in_float64
        if key not in _graphs:
            _graphs[key] = self.model, super().capture(None, objective)
        return _graphs[key][1]


def compile_training(
    model: nn.Module,
    objectives: dict[str, Objective],
    example: Any,
    plan: str | Spec | Plan,
    *,
    batch_size: int | None = None,
    init: Init | None = None,
    in_float64: bool = False,
    shared: bool = False,
    **how: Any,
) -> CompiledTraining:
    """The training compiled for a plan; ``how`` as of :func:`polylane.compile.compiled_training.compile_training`.

    Args:
        shared: take the graph that was captured of this very model before; nobody may have changed the model since.
    """
    make = CapturedOnce if shared else TrainingProblem
    problem = make(model, objectives, example, batch_size, init, in_float64)
    return compiled_training.compile_training(problem, plan, **how)
