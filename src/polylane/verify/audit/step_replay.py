"""Step replay: one step of a training, made again by the user's own model, loss and optimizer, and compared.

    the plan's state before the step --> model, optimizer --> plain loop on the whole batch --> loss, gradients, buffers
    the plan's gradients             --> optimizer.step() --> weights, optimizer state
    the plan's state after the step  <-- compared

As in a proof (:mod:`polylane.verify.stepwise`) the update is compared given the plan's own gradient, so that no
optimizer amplifies a rounding. Differences are judged by :mod:`polylane.verify.judgement`; rounding floors are measured
only where a difference is larger than rounding usually is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.python_state.random_generators import restore_generators
from polylane.runtime.checkpoint.held_tensors import whole_region
from polylane.runtime.checkpoint.model_state import PREFIX
from polylane.runtime.checkpoint.optimizer_state import OptimizedPart, restore_optimizer, restore_options
from polylane.runtime.checkpoint.plain_values import numpy_state
from polylane.runtime.checkpoint.python_state import restore_python_state
from polylane.runtime.checkpoint.state_board import BoardReader
from polylane.runtime.transport.serialization import serializable
from polylane.verify.first_difference import describe_later_difference
from polylane.verify.judgement import Judgement, judge_differences
from polylane.verify.record import TOLERANCE, ComparedTraining, ReferenceRun, ReferenceStep
from polylane.verify.reference import ReferenceModel, remeasure_floors
from polylane.verify.rounding_floor import RoundingFloors
from polylane.verify.stepwise import ComparedKind, Distances, gradient_distances
from polylane.verify.training_state import memory_differences

# Largest relative difference that counts as rounding without a measurement, by the type of least precision among the
# training's numbers. Differences beyond these are held against measured rounding floors.
_TOLERANCES = {
    torch.float64: TOLERANCE,
    torch.float32: 1e-4,
    torch.float16: 1e-2,  # TF32 has as many digits
    torch.bfloat16: 5e-2,
}


@serializable
@dataclass(frozen=True)
class StepVerdict:
    """What the replay of a step has found.

    Attributes:
        step: number of the step, from 1.
        worst: the largest relative difference of all.
        difference: where the plan and the user's own loop first differ; "" where they agree.
        of_own_code: whether the user's own code was run, and not its captured graph.
        refusal: why the step could not be replayed; "" where it was.
        seconds: CPU time that the replay has taken.
    """

    step: int
    worst: float = 0.0
    difference: str = ""
    of_own_code: bool = True
    refusal: str = ""
    seconds: float = 0.0


def choose_tolerance(prepared: CompiledTraining, device: torch.device) -> float:
    """Return the largest relative difference that counts as rounding without a measurement."""
    dtypes = {parameter.dtype for parameter in prepared.model.parameters()}
    if prepared.plan.precision == "bfloat16":
        dtypes.add(torch.bfloat16)
    if device.type == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        dtypes.add(torch.float16)
    return max((_TOLERANCES[dtype] for dtype in dtypes if dtype in _TOLERANCES), default=TOLERANCE)


class StepReplay:
    """Replays steps of one objective in a process that has the user's own model, loss and optimizer.

    Args:
        prepared: the training, compiled for its plan; its model is changed here.
        objective: name of the loss whose steps are replayed.
        clip_norm: bound on the 2-norm of all gradients, or None.
        seed: of the training's random numbers.
        tolerance: see :func:`choose_tolerance`.
        example: a batch, for its form.
    """

    def __init__(
        self,
        prepared: CompiledTraining,
        objective: str,
        clip_norm: float | None,
        seed: int,
        tolerance: float,
        example: Any,
    ) -> None:
        chosen = {objective: prepared.objectives[objective]}
        graphs = {objective: prepared.graphs[objective]}
        prepared = replace(prepared, objectives=chosen, graphs=graphs)
        self._training = ComparedTraining(prepared, [example], clip_norm, seed, tolerance)
        self._objective, self._model = objective, ReferenceModel(self._training)

    def replay(self, step: int, batch: Any, loss: float, before: BoardReader, after: BoardReader) -> StepVerdict:
        """Make a step again, and compare it.

        Args:
            step: number of the step, from 0.
            batch: the whole batch.
            loss: of the step, as the plan computed it.
            before: the plan's state with which the step began.
            after: the plan's state after it, with its gradients.

        Raises:
            PolylaneError: the state before the step cannot be loaded into the user's model and optimizer.
        """
        started, model = time.process_time(), self._model
        training = replace(self._training, batches=[batch], first_step=step)
        model.follow(training)
        self._load(before)
        first = model.copy_state()
        (total, count), gradients, floors = model.run_passes(0, tries=())
        planned = {n: after.read_whole(f"gradient/{n}") for n in model.trained_parameters if after.has(f"gradient/{n}")}
        for name, parameter in model.trained_parameters.items():
            parameter.grad = planned.get(name)
        model.update_weights(loss=loss)
        last = model.copy_state()
        own_loss = total / count if count else float("nan")
        reference = _build_run(own_loss, ReferenceStep(own_loss, first, last, gradients, floors), model)
        distances = Distances(0, steps=[{}])
        for name, distance in gradient_distances(gradients, planned):
            distances.record_distance(0, (ComparedKind.GRADIENT, name, ""), distance)
        self._load(after)
        distances.record_tensors(0, ComparedKind.VALUE, last.tensors, model.named_tensors(), _keep_whole)
        optimized = model.trained_parameters
        for name, key, distance in memory_differences(last, model.optimizer, optimized, _keep_whole):
            distances.record_distance(0, (ComparedKind.MEMORY, name, key), distance)
        judgement = self._judge(training, reference, loss, distances)
        difference = ""
        if judgement.first_wrong_step() is not None:
            wrong = replace(judgement.wrong_in_step(0), step=step)
            difference = describe_later_difference(training.prepared, wrong, traced=False)
        return StepVerdict(
            step + 1, judgement.worst, difference, model.loop.is_eager, seconds=time.process_time() - started
        )

    def _judge(
        self, training: ComparedTraining, reference: ReferenceRun, loss: float, distances: Distances
    ) -> Judgement:
        """Judge the differences; rounding floors are measured where some are too large to be rounding at a glance."""
        judgement = judge_differences(training, reference, [loss], [distances])
        if judgement.first_wrong_step() is None:
            return judgement
        more: Mapping[tuple[int, int], RoundingFloors] = remeasure_floors(training, reference, {(0, 0)})
        return judge_differences(training, reference, [loss], [distances], more)

    def _load(self, state: BoardReader) -> None:
        """Make the model, the optimizer, its scheduler and the user's Python state those of the plan."""
        model, plain, prepared = self._model, state.plain, self._training.prepared
        with torch.no_grad():
            for name, tensor in model.named_tensors().items():
                if state.has(PREFIX + name):
                    state.fill(PREFIX + name, whole_region(tensor.shape), tensor)
        parts = {n: OptimizedPart(p, whole_region(p.shape)) for n, p in model.trained_parameters.items()}
        restore_optimizer(self._objective, model.optimizer, parts, plain, state.fill)
        restore_options(self._objective, model.optimizer, model.scheduler, plain)
        restore_python_state(prepared, prepared.model, 0, plain)
        if state.has("random/torch/0"):
            numpy = plain.get("random/numpy/0")
            arrays = () if numpy is None else (numpy_state(numpy),)
            restore_generators((state.read_whole("random/torch/0"), plain["random/python/0"], *arrays))


def _build_run(loss: float, step: ReferenceStep, model: ReferenceModel) -> ReferenceRun:
    return ReferenceRun([loss], step.gradients, {}, [(step,)], model.loop.is_eager)


def _keep_whole(name: str, whole: Tensor) -> Tensor:
    return whole
