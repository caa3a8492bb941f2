"""Evaluator: one worker's forward passes in evaluation mode, and what all workers make of their results.

Losses are summed over all workers batch by batch, together with the digests of what each has read. Metrics are added up
on the workers that compute the loss, and meet once, at the end of a dataset (:mod:`.metric_states`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.sample_shares import Batch
from polylane.diagnosis.page_layout import Phase
from polylane.graph.capture.output_request import OutputRequest
from polylane.graph.graph import Graph
from polylane.runtime.compile_cache import CompileCache
from polylane.runtime.data.batch_checks import BatchChecks
from polylane.runtime.evaluation.metric_states import MetricStates
from polylane.runtime.evaluation.predictions import gather_predictions
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.pipeline.step_outputs import StepOutputs
from polylane.runtime.program_binder import BoundProgram, ProgramBinder
from polylane.runtime.step_result import Digests, StepState
from polylane.runtime.sync.gradient_sync import CollectiveCall, GradientSync
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.world import World
from polylane.samples.derivation import Derivation, derive_composition


@dataclass(frozen=True)
class ReadDigests:
    """Digests of what all workers have read for a batch, each with its own alone until they are summed.

    Attributes:
        numbers: the digests, by rank.
        was_read: whether the batch was read from a dataset here.
    """

    numbers: Digests
    was_read: bool


@dataclass
class Evaluator:
    """Runs forward passes of this worker; its methods are collective.

    Attributes:
        prepared: the training that is evaluated, compiled.
        world: this worker among those that train.
        local_model: this worker's part of the model.
        cache: compiled programs by the form of the batch.
        checks: compares what workers have read.
        binder: the user's own Python under evaluation.
        sync: weights of all replicas, and the results for dedicated servers.
        transport: connects all workers that train.
        pause: finishes what is under way of the training.
        run: runs a batch's program: (label, program, batch, step, update).
    """

    prepared: CompiledTraining
    world: World
    local_model: LocalModel
    cache: CompileCache
    checks: BatchChecks
    binder: ProgramBinder
    sync: GradientSync
    transport: Transport
    pause: Callable[[], None]
    run: Callable[[str, BoundProgram, Batch, int, Callable[[StepState], None]], StepState]
    _derivations: dict[int, Derivation] = field(default_factory=dict)  # by the id of a graph, which the cache keeps
    _graphs: list[Graph] = field(default_factory=list)  # these graphs, whose ids no others get

    def evaluate(self, batch: Any, name: str, metrics: MetricStates | None = None) -> tuple[float, float]:
        """Return the loss of a batch as (total, count) over all workers, and add the batch to the metrics.

        Args:
            batch: a whole batch, or this worker's samples of it.
            name: name of the objective.
            metrics: what is counted of the dataset so far; None: metrics are left out.
        """
        state, bound, digests = self.compute(batch, name)
        outputs = None if metrics is None else self.outputs_of(bound, state)
        flags = [] if metrics is None or outputs is None else metrics.update(outputs)
        vector = state.to_vector([*digests.numbers, *flags], self.world.device)
        numbers = self.transport.all_reduce(vector, range(self.world.size)).wait().tolist()
        total, count, *numbers = numbers
        self.checks.compare(numbers[: len(digests.numbers)], "evaluation", digests.was_read)
        # Dedicated servers take part in no pass: they receive the result of every collective call from rank 0.
        self.sync.broadcast_result(CollectiveCall.EVALUATE, (float(total), float(count)))
        if metrics is not None and outputs is not None:
            metrics.settle(outputs, numbers[len(digests.numbers) :])
        return float(total), float(count)

    def predict(self, batch: Any, name: str, request: OutputRequest) -> list[Any]:
        """Return what a function of (model, batch) returns for every sample of a batch, in order, on every worker.

        Args:
            batch: a whole batch, or this worker's samples of it.
            name: name of an objective, on whose stages the model is.
            request: the function of (model, batch).
        """
        state, bound, digests = self.compute(batch, name, request)
        vector = torch.tensor(digests.numbers, dtype=torch.float64, device=self.world.device)
        numbers = self.transport.all_reduce(vector, range(self.world.size)).wait().tolist()
        self.checks.compare(numbers, "prediction", digests.was_read)
        return gather_predictions(self.outputs_of(bound, state))

    def complete(self, metrics: MetricStates) -> dict[str, float]:
        """Return the metrics of a dataset, the same on every worker, dedicated servers too."""
        values = metrics.compute()
        self.sync.broadcast_result(CollectiveCall.EVALUATE, values)
        return values

    def compute(
        self, batch: Any, name: str, request: OutputRequest | None = None
    ) -> tuple[StepState, BoundProgram, ReadDigests]:
        """Run a forward pass; return also digests of what this worker has read, to be compared."""
        self.pause()
        local_batch, numbers, was_read = self.checks.take(batch, "evaluation", self.cache.sampled)
        if local_batch.is_collated:
            self.checks.refuse_unequal_sizes(local_batch)
        with self.world.progress.during(Phase.EVALUATING):
            bound = self.cache.compiled_for(name, local_batch, training=False, request=request)
        self.local_model.buffers.receive_updates(bound.buffers)
        with (
            self.world.progress.during(Phase.EVALUATING),
            torch.no_grad(),
            self.sync.averaged_weights(),
            self.binder.restoring_python_state(bound.partition),
        ):
            state = self.run("evaluation", bound, local_batch, 0, lambda state: None)
        return state, bound, ReadDigests(numbers, was_read)

    def outputs_of(self, bound: BoundProgram, state: StepState) -> StepOutputs:
        """Return what a pass has computed beside its loss."""
        partition, plan = bound.partition, self.prepared.plan
        is_whole = bound.passes == 1 and plan.degree("data", partition.loss_stage) == 1
        # Replicas that split operators have whole outputs, and the first of them counts.
        is_whole = is_whole or self.prepared.batch_is_sharded
        derive = partial(self._derive, partition.graph)
        return StepOutputs(partition.graph, state, derive, is_whole, self.transport, self.world.device)

    def _derive(self, graph: Graph) -> Derivation:
        """Return how parts of a batch make up the values of a graph; derived once for each."""
        if id(graph) not in self._derivations:
            self._graphs.append(graph)
            self._derivations[id(graph)] = derive_composition(graph, self.prepared.plan.per_sample)
        return self._derivations[id(graph)]
