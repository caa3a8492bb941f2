"""The training that is compared, and records of it: its results, and the states of each step of the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import named_parameters
from polylane.graph.batch import CarriedLeaves, batch_structure, flatten
from polylane.graph.capture.export import snapshot_model
from polylane.graph.partition import Partition
from polylane.graph.readings.asked_draws import StepDraws
from polylane.graph.readings.batch_readings import are_answered
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.verify.rounding_floor import RoundingFloors
from polylane.verify.training_state import TrainingState

# Largest relative error that counts as rounding, in float64.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class ComparedTraining:
    """A training that is run on both sides of a comparison: by the reference, and by the plan.

    Attributes:
        prepared: the training, compiled for the plan, of which the first objective counts; in float64 for a proof.
        batches: whole batches, one for each step; in float64 for a proof.
        clip_norm: bound on the 2-norm of all gradients; None: gradients are not clipped.
        seed: of dropout and of all other random numbers.
        tolerance: largest relative error that counts as rounding.
        first_step: number of the training's step, from 0, that the first batch is of: random numbers depend on it.
        loss_scale: factor of the loss in passes in float16, by which their gradients are divided.
    """

    prepared: CompiledTraining
    batches: Sequence[Any]
    clip_norm: float | None = None
    seed: int = 0
    tolerance: float = TOLERANCE
    first_step: int = 0
    loss_scale: float = 1.0
    _by_form: dict[Any, list[CompiledTraining]] = field(default_factory=dict, repr=False, compare=False)

    def compiled_for(self, step: int) -> CompiledTraining:
        """Return the training with graphs for the form of a step's batch, captured for its sizes alone.

        The graph of the example serves no text of another length. The plan's workers may have one for all lengths; what
        they are compared with does not.
        """
        example, batch = (self.batch_form(i) for i in (0, step))
        leaves, _ = flatten(self.batches[step])
        candidates = [*([self.prepared] if batch == example else []), *self._by_form.get(batch, [])]
        draws = StepDraws(self.seed, self.first_step + step)
        compiled = next(
            (
                candidate
                for candidate in candidates
                if are_answered(candidate.main_partition.graph.code.readings, leaves, draws)
            ),
            None,
        )
        if compiled is None:
            prepared, (name, *_) = self.prepared, self.prepared.objectives
            partition = prepared.recapture(
                name,
                self.batches[step],
                training=True,
                which=f"the batch of step {self.first_step + step + 1}",
                draws=draws,
            )
            graphs = {**prepared.graphs, name: prepared.compile_further(partition)}
            compiled = replace(prepared, graphs=MappingProxyType(graphs))
            self._record_carried(step, partition)
            self._by_form.setdefault(self.batch_form(step), []).append(compiled)
        return compiled

    def batch_form(self, step: int, split: Sequence[bool] | None = None) -> tuple[Any, ...]:
        """Return what a graph depends on of a step's batch: nesting, dtypes, sizes but the samples', and values read.

        Args:
            step: number of the step, from 0.
            split: for each leaf whether it is divided with the samples; default: those with a row for each sample.
        """
        structure = batch_structure(self.batches[step])
        return structure, self._carried.sign("", structure, flatten(self.batches[step])[0], split)

    @cached_property
    def _carried(self) -> CarriedLeaves:
        """The leaves of batches that no graph so far reads."""
        carried_leaves, (leaves, _) = CarriedLeaves(), flatten(self.batches[0])
        carried = self.prepared.main_partition.graph.code.carried
        carried_leaves.record("", batch_structure(self.batches[0]), leaves, carried)
        return carried_leaves

    def _record_carried(self, step: int, partition: Partition) -> None:
        structure, (leaves, _) = batch_structure(self.batches[step]), flatten(self.batches[step])
        self._carried.record("", structure, leaves, partition.graph.code.carried)

    @cached_property
    def parameters(self) -> set[str]:
        """Names of all parameters of the model and of its losses; other tensors are buffers."""
        return {name for name, _ in named_parameters(self.prepared.model, self.prepared.losses)}

    @property
    def tensors(self) -> ModelTensors:
        """Parameters and buffers of the model and of its losses, on this process's CPU."""
        return ModelTensors(self.prepared.model, self.prepared.losses, torch.device("cpu"))

    def snapshot(self, with_factories: bool = False) -> Callable[[], None]:
        """Return a function that puts the model and its losses back into the state in which they are now.

        Args:
            with_factories: also what the functions that build optimizers and schedulers keep in Python.
        """
        model, losses = self.prepared.model, self.prepared.losses
        modules = [model, *(loss for loss in losses if isinstance(loss, nn.Module))]
        factories = [factory for objective in self.prepared.objectives.values() for factory in objective.factories]
        return snapshot_model(nn.ModuleList(modules), *losses, *(factories if with_factories else ()))


@dataclass(frozen=True)
class TrainingRecord:
    """The results of a training.

    Attributes:
        losses: mean loss of each step.
        gradients: of the first step, by parameter, as the optimizer gets them; None for a parameter without one.
        state: weights and buffers after the last step, by name.
    """

    losses: list[float]
    gradients: Mapping[str, Tensor | None]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class ReferenceStep:
    """One step of one device, or of one replica that has weights of its own.

    Attributes:
        loss: mean over the samples of this device or replica.
        before: weights, buffers and optimizer state with which the step began.
        after: the same after the step, and after an average that ended it.
        gradients: by parameter, as the optimizer gets them.
        floors: how far the step is from itself when its sums are rounded otherwise.
        updated: weights after the update and before replicas averaged them; empty where they never do.
    """

    loss: float
    before: TrainingState
    after: TrainingState
    gradients: Mapping[str, Tensor]
    floors: RoundingFloors
    updated: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ReferenceRun(TrainingRecord):
    """The results of the reference, with all its steps.

    Attributes:
        steps: for each step the record of each replica, or a single one for all replicas; empty for a replay of
            asynchronous servers, which has no order of steps.
        eager: whether the model itself was run, and not its captured graph. The graph is run for models that draw
            random numbers, which only the graph draws by key, and for those with a kernel that has no float64.
        floors: of the whole run, where it was repeated from perturbed weights.
        whole_loss: loss of the first batch as a whole, where the microbatches decide what is computed; else None.
    """

    steps: list[tuple[ReferenceStep, ...]]
    eager: bool
    floors: RoundingFloors = field(default_factory=RoundingFloors)
    whole_loss: float | None = None

    def step_of(self, step: int, replica: int) -> ReferenceStep:
        """Return the record of a replica's step; where all replicas share one record, that one."""
        records = self.steps[step]
        return records[replica % len(records)]
