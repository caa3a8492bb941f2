"""Step replay: one step of a training, made again by the user's own model, loss and optimizer, and compared.

    the plan's state before the step --> model, optimizer --> plain loop on the whole batch --> loss, gradients, buffers
    the plan's gradients             --> optimizer.step() --> weights, optimizer state
    the plan's state after the step  <-- compared

As in a proof (:mod:`polylane.verify.stepwise`) the update is compared given the plan's own gradient, so that no
optimizer amplifies a rounding. Differences are judged by :mod:`polylane.verify.judgement`; rounding floors are measured
only where a difference is larger than rounding usually is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.graph import Graph
from polylane.graph.precision import autocast_dtype
from polylane.graph.python_state.random_generators import restore_generators
from polylane.graph.rounding_noise import COARSE_MARGIN, MARGIN, TRIES
from polylane.graph.sparse_gradients import densify
from polylane.runtime.checkpoint.state_board import BoardReader
from polylane.runtime.parameters.optimizer import set_optimizer_mode
from polylane.runtime.plain_data.serialization import serializable
from polylane.runtime.state.held_tensors import whole_region
from polylane.runtime.state.model_state import PREFIX
from polylane.runtime.state.optimizer_attributes import restore_attributes
from polylane.runtime.state.optimizer_state import OptimizedPart, restore_optimizer, restore_options
from polylane.runtime.state.plain_values import numpy_state
from polylane.runtime.state.python_state import restore_python_state
from polylane.verify.audit.device_rounding import TF32_MARGIN, DeviceRounding, TensorFloat32
from polylane.verify.first_difference import describe_later_difference
from polylane.verify.judgement import Judgement, judge_differences
from polylane.verify.local_sgd_reference import ReferenceReplica, ReplicaAverage
from polylane.verify.record import TOLERANCE, ComparedTraining, ReferenceRun, ReferenceStep
from polylane.verify.reference import ReferenceModel, remeasure_floors
from polylane.verify.rounding_floor import RoundingFloors
from polylane.verify.stepwise import ComparedKind, Distances, gradient_distances
from polylane.verify.training_state import TrainingState, memory_differences

# Largest relative difference that counts as rounding without a measurement, by the type of least precision among the
# training's numbers. Differences beyond these are held against measured rounding floors.
TOLERANCES = {
    torch.float64: TOLERANCE,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
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
        is_compared: whether it was compared; not where neither side has finite numbers.
        seconds: CPU time that the replay has taken.
    """

    step: int
    worst: float = 0.0
    difference: str = ""
    of_own_code: bool = True
    refusal: str = ""
    is_compared: bool = True
    seconds: float = 0.0


def read_rounding(prepared: CompiledTraining, device: torch.device) -> DeviceRounding:
    """Return how the device of this worker rounds the numbers of a training, as torch's settings say."""
    dtypes = {parameter.dtype for parameter in prepared.model.parameters()}
    dtypes = dtypes.union(*(list_cast_dtypes(graph.partition.graph) for graph in prepared.graphs.values()))
    if (cast_dtype := autocast_dtype(prepared.plan.precision)) is not None:
        dtypes.add(cast_dtype)
    convolutions = products = False
    if device.type == "cuda" and torch.float32 in dtypes:
        backends: Any = torch.backends  # its stubs lack fp32_precision
        recurrent = any(isinstance(module, nn.RNNBase) for module in prepared.model.modules())
        recurrent = recurrent and backends.cudnn.rnn.fp32_precision == "tf32"
        convolutions = recurrent or backends.cudnn.conv.fp32_precision == "tf32"
        # The host computes a GRU as single matrix products, in which nothing tells it from others.
        products = recurrent or backends.cuda.matmul.fp32_precision == "tf32"
        dtypes |= {torch.float16} if convolutions or products else set()  # it has as many digits as TensorFloat32
    tolerance = max((TOLERANCES[dtype] for dtype in dtypes if dtype in TOLERANCES), default=TOLERANCE)
    return DeviceRounding(tolerance, convolutions, products)


def list_cast_dtypes(graph: Graph) -> set[torch.dtype]:
    """Return the types to which a graph rounds numbers of more precise ones, as ``torch.autocast`` has it do."""
    casts = set[torch.dtype]()
    for node in graph.code.fx.nodes:
        sources = {dtype for source in node.all_input_nodes for dtype in _list_floats(source)}
        casts |= {d for d in _list_floats(node) if any(TOLERANCES[source] < TOLERANCES[d] for source in sources)}
    return casts


def _list_floats(node: fx.Node) -> set[torch.dtype]:
    values = tree_leaves(node.meta.get("val"))
    return {value.dtype for value in values if isinstance(value, Tensor) and value.dtype in TOLERANCES}


@dataclass(frozen=True)
class _Pass:
    """The passes of one replica that were made again.

    Attributes:
        total, count: sum of the loss, and what it is a mean over.
        first: the state with which the step began.
        gradients, planned: of these passes, and the plan's, by parameter.
        floors: rounding floors, which are not measured yet.
    """

    total: float
    count: float
    first: TrainingState
    gradients: Mapping[str, Tensor]
    floors: RoundingFloors
    planned: Mapping[str, Tensor]


class StepReplay:
    """Replays steps of one objective in a process that has the user's own model, loss and optimizer.

    Args:
        prepared: the training, compiled for its plan; its model is changed here.
        objective: name of the loss whose steps are replayed.
        clip_norm: bound on the 2-norm of all gradients, or None.
        seed: of the training's random numbers.
        rounding: how the training's device rounds.
        example: a batch, for its form.
        required: for each parameter, whether it required a gradient before any step.
    """

    def __init__(
        self,
        prepared: CompiledTraining,
        objective: str,
        clip_norm: float | None,
        seed: int,
        rounding: DeviceRounding,
        example: Any,
        required: Mapping[str, bool],
    ) -> None:
        chosen = {objective: prepared.objectives[objective]}
        graphs = {objective: prepared.graphs[objective]}
        prepared = replace(prepared, objectives=chosen, graphs=graphs)
        self._training = ComparedTraining(prepared, [example], clip_norm, seed, rounding.tolerance)
        self._required, self._rounding = required, rounding
        self._objective, self._sync = objective, prepared.plan.sync
        self._average: ReplicaAverage | None = None
        self._replicas: list[ReferenceModel]
        if self._sync.is_replica_local:
            replicas = [ReferenceReplica(self._training, r, prepared.plan.data) for r in range(prepared.plan.data)]
            self._replicas, self._average = [*replicas], ReplicaAverage(self._sync, replicas)
        else:
            self._replicas = [ReferenceModel(self._training)]

    def find_other_start(self, old_state: BoardReader) -> str | None:
        """Return the first weight or buffer that is another before the first step than the model was built with."""
        built, model = self._replicas[0].copy_state().tensors, self._replicas[0]
        self._load(model, old_state, self._variant(0))
        return next((n for n, tensor in model.named_tensors().items() if not _are_same(tensor, built[n])), None)

    def replay(self, step: int, batch: Any, loss: float, old_state: BoardReader, new_state: BoardReader) -> StepVerdict:
        """Make a step again, and compare it.

        Args:
            step: number of the step, from 0.
            batch: the whole batch of the step, as the user's data set gives it.
            loss: of the step, as the plan computed it.
            old_state: the plan's state with which the step began.
            new_state: the plan's state after it, with its gradients.

        Raises:
            PolylaneError: the state before the step cannot be loaded into the user's model and optimizer.
        """
        scale, _ = old_state.plain.get(f"loss_scale/{self._objective}", (1.0, 0))
        training = replace(self._training, batches=[batch], first_step=step, loss_scale=scale)
        # In the warm-up of local SGD replicas share gradients, and are equal.
        is_warmup = self._average is not None and step < self._sync.warmup
        models = self._replicas[:1] if is_warmup else self._replicas
        passes = list[_Pass]()
        for number, model in enumerate(models):
            model.follow(training)
            self._load(model, old_state, self._variant(number))
            set_optimizer_mode(model.optimizer, True)  # a state is what an optimizer has in evaluation
            first_state = model.copy_state()
            (total, count), gradients, floors = model.run_passes(0, tries=(), together=is_warmup)
            planned = self._take_gradients(model, new_state, "" if is_warmup else self._variant(number))
            model.update_weights(bool((model.whole_loop if is_warmup else model.loop).count_samples(0)), loss=loss)
            passes.append(_Pass(total, count, first_state, gradients, floors, planned))
        if self._average is not None and not is_warmup:
            self._load_average(old_state)
            self._average.record_step(0, step)
        count = sum(replica_pass.count for replica_pass in passes)
        own_loss = sum(replica_pass.total for replica_pass in passes) / count if count else float("nan")
        # NaN differs from itself: where one device has no numbers either, there is nothing to compare. Nor is there
        # where scaled gradients overflow on one side alone, as the sum of a batch may do, and not those of its parts.
        are_finite = (
            _are_finite(own_loss, [g for replica_pass in passes for g in replica_pass.gradients.values()]),
            _are_finite(loss, [g for replica_pass in passes for g in replica_pass.planned.values()]),
        )
        if not any(are_finite) or (scale != 1 and not all(are_finite)):
            return StepVerdict(step + 1, is_compared=False)
        records, distances = list[ReferenceStep](), list[Distances]()
        for number, (model, replica_pass) in enumerate(zip(models, passes, strict=True)):
            set_optimizer_mode(model.optimizer, False)
            last_state = model.copy_state()
            records.append(
                ReferenceStep(own_loss, replica_pass.first, last_state, replica_pass.gradients, replica_pass.floors)
            )
            self._load(model, new_state, self._variant(number))
            distances.append(_measure(model, number, last_state, replica_pass))
        reference = ReferenceRun([own_loss], records[0].gradients, {}, [tuple(records)], models[0].loop.is_eager)
        judgement = self._judge(training, reference, loss, distances)
        difference = ""
        if judgement.first_wrong_step() is not None:
            wrong = judgement.wrong_of_replica(0) if len(records) > 1 else judgement.wrong_in_step(0)
            difference = describe_later_difference(training.prepared, replace(wrong, step=step), traced=False)
        return StepVerdict(step + 1, judgement.worst, difference, reference.eager)

    def _variant(self, replica: int) -> str:
        """Return the ending of names of a replica's own state."""
        return f"@{replica}" if self._average is not None else ""

    def _take_gradients(self, model: ReferenceModel, state: BoardReader, variant: str) -> dict[str, Tensor]:
        """Give the plan's gradients to a model's optimizer, and return them by parameter."""
        names = {name: f"gradient/{name}{variant}" for name in model.trained_parameters}
        planned = {name: state.read_whole(key) for name, key in names.items() if state.has(key)}
        for name, parameter in model.trained_parameters.items():
            parameter.grad = planned.get(name)
        return planned

    def _judge(
        self, training: ComparedTraining, reference: ReferenceRun, loss: float, distances: Sequence[Distances]
    ) -> Judgement:
        """Judge the differences; rounding floors are measured where some are too large to be rounding at a glance."""
        judgement = judge_differences(training, reference, [loss], distances)
        if judgement.first_wrong_step() is None:
            return judgement
        steps = {(0, replica) for replica in range(len(reference.steps[0]))}
        restore = training.snapshot(with_factories=True)  # the passes must not advance the user's Python once more
        new_floors = remeasure_floors(training, reference, steps)
        if self._rounding.rounds_factors:
            device_floors = remeasure_floors(training, reference, steps, TRIES, TensorFloat32(self._rounding))
            new_floors = {
                step: floors.elementwise_max(device_floors[step].multiply(TF32_MARGIN / MARGIN))
                for step, floors in new_floors.items()
            }
        if (cast_dtype := autocast_dtype(training.prepared.plan.precision)) is not None:
            cast_floors = remeasure_floors(training, reference, steps, TRIES, dtype=cast_dtype)
            new_floors = {
                step: floors.elementwise_max(cast_floors[step].multiply(COARSE_MARGIN / MARGIN))
                for step, floors in new_floors.items()
            }
        restore()
        return judge_differences(training, reference, [loss], distances, new_floors)

    def _load(self, model: ReferenceModel, state: BoardReader, variant: str) -> None:
        """Make a model, its optimizer, its scheduler and the user's Python state those of the plan."""
        plain, prepared = state.plain, self._training.prepared
        with torch.no_grad():
            for name, tensor in model.named_tensors().items():
                key = next((n for n in (PREFIX + name + variant, PREFIX + name) if state.has(n)), None)
                if key is not None:
                    state.fill(key, whole_region(tensor.shape), tensor)
        model.require_gradients({**self._required, **plain.get("requires_grad", {})})
        parts = {n: OptimizedPart(p, whole_region(p.shape)) for n, p in model.trained_parameters.items()}
        restore_optimizer(self._objective, model.optimizer, parts, plain, state.fill, variant)
        restore_options(self._objective, model.optimizer, model.scheduler, plain)
        restore_attributes(self._objective, model.optimizer, model.names, parts, plain, state.fill, variant)
        restore_python_state(prepared, prepared.model, 0, plain)
        if state.has("random/torch/0"):
            numpy = plain.get("random/numpy/0")
            arrays = () if numpy is None else (numpy_state(numpy),)
            restore_generators((state.read_whole("random/torch/0"), plain["random/python/0"], *arrays))

    def _load_average(self, state: BoardReader) -> None:
        """Make what replicas remember of their last average that of the plan."""
        assert self._average is not None
        samples = state.plain[f"local_sgd/{self._objective}"]["samples"]
        anchors, velocities = dict[str, Tensor](), dict[str, Tensor]()
        for name in self._replicas[0].trained_parameters:
            if state.has(key := f"anchor/{self._objective}/{name}"):
                anchors[name] = state.read_whole(key)
            if state.has(key := f"optimizer/{self._objective}.outer/{name}/momentum_buffer"):
                velocities[name] = state.read_whole(key)
        self._average.restore(samples, anchors, velocities)


def _measure(model: ReferenceModel, replica: int, last_state: TrainingState, replica_pass: _Pass) -> Distances:
    """Return how far the plan's step is from the one that was made again.

    Args:
        model: has the plan's state after the step.
        replica: number of the replica that both are of.
        last_state: the state after the step that was made again.
        replica_pass: the gradients of that step, and the plan's.
    """
    distances = Distances(replica, steps=[{}])
    for name, distance in gradient_distances(replica_pass.gradients, replica_pass.planned):
        distances.record_distance(0, (ComparedKind.GRADIENT, name, ""), distance)
    distances.record_tensors(0, ComparedKind.VALUE, last_state.tensors, model.named_tensors(), _keep_whole)
    for name, key, distance in memory_differences(last_state, model.optimizer, model.trained_parameters, _keep_whole):
        distances.record_distance(0, (ComparedKind.MEMORY, name, key), distance)
    return distances


def _are_finite(loss: float, gradients: Sequence[Tensor]) -> bool:
    return math.isfinite(loss) and all(bool(torch.isfinite(densify(gradient)).all()) for gradient in gradients)


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same values; NaN is the same as NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _keep_whole(name: str, tensor: Tensor) -> Tensor:
    return tensor
