"""Compile a training of parts that a test has in its hands, as one call; captures of one model are shared."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from polylane.compile import compiled_training
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Init, Objective, trainable_names
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.batch import batch_structure, flatten
from polylane.graph.graph import Graph
from polylane.plan.plan import AnyPlan
from polylane.runtime.parameters.broadcast import digest_tensor

# By model, loss and what is trained; each with the model, so that its identity stays its own.
_graphs: dict[Any, tuple[nn.Module, Graph]] = {}


# By what models, losses and batches are, so that equal ones have one; the latest ones.
_alike = OrderedDict[Any, Graph]()
KEPT = 64


def _has_hooks(module: nn.Module) -> bool:
    return any(own for name, own in vars(module).items() if name.endswith("_hooks")) or bool(
        any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())
    )


def describe(model: nn.Module, objectives: dict[str, Objective], example: Any) -> Any:
    """What equal models, losses and batches have in common; None where an object of a user's class could hide more.

    Only models of torch's own modules are taken for equal: their printed form and tensors say all of them.
    """
    modules = list(model.modules())
    leaves, _ = flatten(example)
    plain = all(type(m).__module__.startswith("torch.nn.modules") and not _has_hooks(m) for m in modules)
    free = all(isinstance(o.loss, FunctionType) and o.loss.__closure__ is None for o in objectives.values())
    if not (plain and free and all(isinstance(leaf, Tensor) for leaf in leaves)):
        return None
    order = {id(p): i for i, p in enumerate(model.parameters())}
    named = list(model.named_parameters(remove_duplicate=False))
    tensors = [*(p for _, p in named), *model.buffers(), *leaves]
    return (
        repr(model),
        tuple(m.training for m in modules),
        tuple((name, order[id(p)], p.requires_grad) for name, p in named),
        tuple(
            (t.dtype, t.device, tuple(t.shape), t.stride(), None if t.is_meta else digest_tensor(t)) for t in tensors
        ),
        batch_structure(example),
    )


@dataclass(frozen=True)
class CapturedAlike(TrainingProblem):
    """A problem whose graph is taken of an equal one, under whatever plan that was trained."""

    def capture(self, samples: int | None = None, objective: Objective | None = None) -> Graph:
        objective = objective or self.objective
        described = describe(self.model, {"": objective}, self.example)
        if described is None:
            return super().capture(samples, objective)
        trained = tuple(trainable_names(self.parameters, self.held[objective.name]))
        key = described, objective.loss, trained, self.in_float64, samples
        graph = _alike.pop(key, None) or super().capture(samples, objective)
        _alike[key] = graph
        if len(_alike) > KEPT:
            _alike.popitem(last=False)
        return graph


@dataclass(frozen=True)
class CapturedOnce(TrainingProblem):
    """A problem whose graph is captured once, with the whole example of the first plan: all plans divide that graph."""

    def capture(self, samples: int | None = None, objective: Objective | None = None) -> Graph:
        objective = objective or self.objective
        trained = tuple(trainable_names(self.parameters, self.held[objective.name]))
        key = id(self.model), self.model.training, objective.loss, trained, self.in_float64
        if key not in _graphs:
            _graphs[key] = self.model, super().capture(None, objective)
        return _graphs[key][1]


def by_work(graph: Graph, *_: Any) -> tuple[float, ...]:
    """In place of measured times, so that the cuts are the same in every run, however busy the machine is."""
    return tuple(1.0 + node.flops + node.bytes for node in graph.nodes)


def compile_training(
    model: nn.Module,
    objectives: dict[str, Objective],
    example: Any,
    plan: str | AnyPlan,
    *,
    batch_size: int | None = None,
    init: Init | None = None,
    in_float64: bool = False,
    shared: bool = False,
    **how: Any,
) -> CompiledTraining:
    """The training compiled for a plan; ``how`` as of :func:`polylane.compile.compiled_training.compile_training`.

    Stages are cut by work, unless ``seconds`` says otherwise.

    Args:
        shared: take the graph that was captured of this very model before; nobody may have changed the model since.
    """
    make = CapturedOnce if shared else CapturedAlike
    problem = make(model, objectives, example, batch_size, init, in_float64)
    return compiled_training.compile_training(problem, plan, **{"seconds": by_work, **how})
