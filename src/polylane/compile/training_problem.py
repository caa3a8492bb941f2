"""Training problem: a model, the losses to minimize, and a batch of data; nothing of how the work is divided."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn

from polylane.compile.loss_parameters import adopt_loss_parameters
from polylane.compile.objectives import Init, Objective, Parameters, find_held_names, named_parameters, trainable_names
from polylane.compile.optimizer_probe import find_whole_parameters
from polylane.compile.optimizer_sequence import join_optimizers
from polylane.compile.plan_checks import check_plan, explain_coupled_updates, refuse_coupled_search
from polylane.compile.unusable_modules import refuse_uninitialised, refuse_unusable_modules
from polylane.compile.user_objects import OptimizerObject, take_loss
from polylane.errors import PolylaneError
from polylane.graph.batch import Rebuild, clone_leaves, flatten, sample_count
from polylane.graph.batch_checks import refuse_undividable
from polylane.graph.capture.export import Loss, python_kept
from polylane.graph.capture.python.log_statements import split_log_statements
from polylane.graph.capture.self_check import take_what_runs
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.graph.python_state.compiler import describe_left_out, without_compiler
from polylane.graph.readings.batch_readings import are_answered
from polylane.graph.sparse_gradients import find_sparse_gradients
from polylane.plan.plan import Plan
from polylane.planner.problem import CapturedProblem
from polylane.samples.counts import capture_with_counts
from polylane.samples.split_dependence import describe_split_dependence


@dataclass(frozen=True)
class TrainingProblem:
    """What is to be trained.

    Attributes:
        model: the user's module, without torch.compile's; on the meta device where only predictions are wanted.
        objectives: the losses with their optimizers, by name: one in most trainings, two for a GAN.
        example: a batch as the user's data gives it, for its form and its size.
        batch_size: samples of a step, over all workers; None: as many as the example has.
        init: fills the tensors that a module itself owns, for a model on the meta device; None: the module's own
            ``reset_parameters()``.
        in_float64: whether casts to lower types inside keep float64 (for proofs); model and example are float64 then.
        device: accelerator of the worker that trains, on which captured code is checked and its nodes are timed; None:
            the device of the model.
        keeps_whole_numbers: whether a default number of microbatches is 1 where more would not have the numbers of
            whole batches (batch normalization), as for a script that had these before.
        must_divide: whether a batch whose samples are coupled is refused by every plan.
    """

    model: nn.Module
    objectives: dict[str, Objective]
    example: Any
    batch_size: int | None = None
    init: Init | None = None
    in_float64: bool = False
    device: torch.device | None = None
    keeps_whole_numbers: bool = False
    must_divide: bool = False

    def __post_init__(self) -> None:
        refuse_uninitialised(self.model)
        object.__setattr__(self, "model", without_compiler(self.model))
        refuse_unusable_modules(self.model)
        refuse_undividable(self.example)
        objectives = {
            n: replace(o, loss=take_loss(o.loss, self.model, self.example)) for n, o in self.objectives.items()
        }
        objectives = {n: self._without_log(objective, objectives) for n, objective in objectives.items()}
        with self.python_kept():
            objectives = {n: adopt_loss_parameters(self.model, objective) for n, objective in objectives.items()}
        object.__setattr__(self, "objectives", objectives)
        for name, objective in objectives.items():
            optimizer = join_optimizers(objective.optimizer)
            if isinstance(optimizer, torch.optim.Optimizer):
                objectives[name] = replace(objective, optimizer=OptimizerObject(optimizer, self.parameters))

    def _without_log(self, objective: Objective, objectives: Mapping[str, Objective]) -> Objective:
        """Return an objective whose loss is without the lines that only note something, and that has these apart."""
        if objective.log is not None:
            return objective
        functions: list[Any] = [sibling.loss for sibling in objectives.values() if sibling is not objective]
        functions += [factory for sibling in objectives.values() for factory in sibling.factories]
        loss, log = split_log_statements(objective.loss, self.model, functions)
        return replace(objective, loss=loss, log=log)

    def must_keep_whole(self, graphs: Collection[Graph]) -> bool:
        """Return whether a batch is one microbatch unless the plan says otherwise, for its numbers' sake."""
        return self.keeps_whole_numbers and bool(describe_split_dependence(graphs))

    @property
    def objective(self) -> Objective:
        """The first of the losses, which plans are made for."""
        return next(iter(self.objectives.values()))

    @cached_property
    def flat_example(self) -> tuple[list[Any], Rebuild]:
        """The example's leaves, and what makes a batch of leaves again."""
        return flatten(self.example)

    @property
    def samples(self) -> int:
        """Samples of a step, over all workers."""
        return self.batch_size or sample_count(self.flat_example[0])

    @property
    def losses(self) -> list[Loss]:
        """The loss of every objective."""
        return [objective.loss for objective in self.objectives.values()]

    def python_kept(self) -> AbstractContextManager[None]:
        """Context manager: what the user's code keeps in Python is put back; optimizers are tried, with their hooks."""
        return python_kept(
            self.model, *self.losses, *(f for objective in self.objectives.values() for f in objective.factories)
        )

    @cached_property
    def _is_indivisible(self) -> list[bool]:
        """Not empty once some of the example's rows by themselves were found to be no batch."""
        return []

    @cached_property
    def parameters(self) -> Parameters:
        """All parameters of the model and of its losses, by name, each once."""
        return named_parameters(self.model, self.losses)

    @cached_property
    def held(self) -> dict[str, tuple[str, ...]]:
        """By objective, the parameters that its optimizer holds, trained or not, in the model's order."""
        return {
            name: find_held_names(self.parameters, objective.optimizer) for name, objective in self.objectives.items()
        }

    def take_batch(self, samples: int) -> Any:
        """Return a copy of the example's first samples, or of all of it where there are fewer or a part is no batch."""
        leaves, rebuild = self.flat_example
        if self._is_indivisible:
            return rebuild(clone_leaves(leaves))
        return rebuild(clone_leaves(take_what_runs(self.model, self.objective.loss, rebuild, leaves, samples)))

    def capture(self, samples: int | None = None, objective: Objective | None = None) -> Graph:
        """The graph of one loss.

        Args:
            samples: how many of the example's samples it is captured with, if there are as many; None: all of them.
            objective: the loss with its optimizer; None: the first of them.

        Raises:
            PolylaneError: the optimizer is wrong, or the model cannot be captured.
        """
        objective = objective or self.objective
        batch = self.example if samples is None else self.take_batch(samples)
        trainable = trainable_names(self.parameters, self.held[objective.name])
        options: Any = {"trainable": trainable, "in_float64": self.in_float64, "check_device": self.device}
        try:
            graph = capture_with_counts(self.model, objective.loss, batch, **options)
        except PolylaneError:
            # Some of its rows may be no batch by themselves (nodes of a graph): only a failure on all is an error.
            if samples is None or sample_count(flatten(batch)[0]) == sample_count(self.flat_example[0]):
                raise
            graph = capture_with_counts(self.model, objective.loss, self.example, **options)
            self._is_indivisible.append(True)
        # A few samples may answer otherwise than the batch what the loss asks of it.
        if samples is not None and not are_answered(graph.code.readings, self.flat_example[0]):
            graph = capture_with_counts(self.model, objective.loss, self.example, **options)
        effects = graph.code.effects
        left_out = describe_left_out(self.model, objective.loss, effects.functions_run if effects else ())
        notes = (*graph.notes, *left_out, *([] if objective.log is None else [objective.log.describe()]))
        return replace(graph, notes=notes)

    def captured(self, graph: Graph, **options: Any) -> CapturedProblem:
        """What costs depend on, of one of its graphs.

        Args:
            graph: one that :meth:`capture` returned, of any number of samples.
            options: ``pins`` and ``profile`` of :class:`polylane.planner.problem.CapturedProblem`.
        """
        sparse, objectives = tuple(find_sparse_gradients(graph)), {self.objective.name: self.objective}
        with self.python_kept():
            whole_parameters = find_whole_parameters(self.parameters, [self.objective.optimizer], sparse)
        coupled = cache(partial(explain_coupled_updates, self.parameters, self.objective, sparse))

        def check(plan: Plan, partition: Partition) -> None:
            check_plan(self.parameters, objectives, {self.objective.name: partition}, plan)
            if plan.workers > 1 and (reason := coupled()):
                refuse_coupled_search(self.parameters, self.objective, plan, reason)

        return CapturedProblem(
            graph,
            self.objective.optimizer,
            {n: str(why) for n, why in whole_parameters.items()},
            has_coupled_updates=lambda: bool(coupled()),
            check=check,
            **options,
        )
