"""Serving role of a job: a worker that a plan dedicates to parameter servers, and trains nothing.

Its servers run in threads of their own, whatever the script does meanwhile. A serving worker receives the result of
each collective call (evaluations, weights) from rank 0:

    script calls      training workers               serving worker
    step              compute, push, pull            nothing; the threads of its servers make the updates
    state_dict, ...   compute; rank 0 sends          receives (call, result); another call than its own is an error
                      (call, result)
    gathered          rank 0 sends (call, None)      receives that, then takes part in the all-gather
    close             rank 0 sends (close, None)     receives that, waits for its servers, leaves
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polylane.checkpoint.read_tensors import CheckpointReader
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.optimizer_sequence import as_given
from polylane.compile.sample_shares import Batch
from polylane.errors import PolylaneError
from polylane.graph.batch import flatten, sample_count
from polylane.graph.capture.output_request import OutputRequest
from polylane.runtime.connections.byte_counters import AGREEMENT, OPERATORS, STAGES, STATISTICS
from polylane.runtime.data import loader as data
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.pipeline.anomalies import AnomalyDetector
from polylane.runtime.span_clock import KnownSpan
from polylane.runtime.stale_weights import allow_own_calls, track_server_weights
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.step_result import Lane, StepResult, align_clocks
from polylane.runtime.sync.gradient_sync import CollectiveCall, LocalOptimizer
from polylane.runtime.sync.parameter_server.host import open_server_host
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate
from polylane.runtime.transport.protocol import TransportCounters
from polylane.runtime.workers.world import World

T = TypeVar("T")


class ServingRole:
    """Serves parameters; its methods are those of :class:`polylane.runtime.training_role.TrainingRole`.

    Batches have no samples in them and are not loaded, steps do nothing and their loss is nan. Once the training
    workers have closed the job, collective calls return at once, with empty results.

    Args:
        prepared: the compiled training, equal on every worker.
        world: all processes; the rank of this one is behind those that train.
        clip_norm: bound on the 2-norm of summed gradients, or None.
    """

    slack = 1
    staleness = 0

    def __init__(self, prepared: CompiledTraining, world: World, clip_norm: float | None) -> None:
        self.world, self._plan, self._step, self._closed = world, prepared.plan, 0, False
        world.progress.serve()
        # A collective over the whole world, in which the training role is too.
        world.first_workers(prepared.plan.workers)
        self._host = open_server_host(world, prepared, clip_norm)
        self._tensors = ModelTensors(prepared.model, prepared.losses, world.device)
        self._stale = track_server_weights(prepared, world.rank)
        self._server = self._host.servers[0]
        _ = self._server.weights  # waits for the initial weights: an error in the user's optimizer is raised here

    # ---- collective calls --------------------------------------------------------------------------------------------

    def _receive_result(self, call: CollectiveCall, otherwise: T) -> T:
        """Receive the result of a collective call; ``otherwise`` if the training workers have closed the job."""
        if self._closed:
            return otherwise
        # If the training workers are lost because a server here failed, its error is the one to raise.
        with self._host.watch():
            called, value = self._host.receive_result()
            if called is CollectiveCall.CLOSE:
                self._closed = True
                self._host.close()
        if called not in (call, CollectiveCall.CLOSE):
            raise PolylaneError(
                f"the workers that train call {called.value}, and rank {self.world.rank}, which serves parameters, "
                f"calls {call.value}: every worker must call the same methods"
            )
        result: T = otherwise if self._closed else value
        return result

    def evaluate_sums(self, batch: Any, name: str, metrics: None = None) -> tuple[float, float]:
        return self._receive_result(CollectiveCall.EVALUATE, (math.nan, math.nan))

    def begin_metrics(self) -> None:
        """Return nothing: metrics are those of the workers that train."""

    def complete_metrics(self, metrics: None) -> dict[str, float]:
        return self._receive_result(CollectiveCall.EVALUATE, {})

    def predict(self, batch: Any, name: str, request: OutputRequest) -> list[Any]:
        return []

    def whole_gradients(self, name: str) -> dict[str, Tensor | None]:
        return self._receive_result(CollectiveCall.WHOLE_GRADIENTS, {})

    def state_dict(self, losses: bool) -> dict[str, Tensor]:
        return self._receive_result(CollectiveCall.STATE_DICT, {})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        raise PolylaneError("weights cannot be loaded into servers in mid-training: use load_checkpoint")

    @contextmanager
    def whole_model(self, state: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        with allow_own_calls():
            if state:
                self._tensors.replace_values({name: value.to(self.world.device) for name, value in state.items()})
            yield self._tensors.model

    def save(self, path: Path) -> None:
        self._receive_result(CollectiveCall.SAVE, None)

    def updates(self) -> tuple[tuple[ServerUpdate, ...], ...]:
        self._receive_result(CollectiveCall.UPDATES, None)
        return () if self._closed else self._host.gather_updates()

    def gather(self, make: Callable[[], Any]) -> list[Any]:
        # The value is made only when all workers ask for it: until then the servers make updates, and count bytes.
        self._receive_result(CollectiveCall.GATHERED, None)
        if self._closed:
            return []
        value = make()
        with self._host.watch():
            return self._host.transport.all_gather_object(value)

    def exchange(self, value: Any) -> list[Any]:
        return self.gather(lambda: value)

    def close(self) -> None:
        self._receive_result(CollectiveCall.CLOSE, None)
        self.world.leave()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def collect_state(self) -> WorkerState:
        return self._host.collect_state()

    def complete_steps(self) -> None:
        """Do nothing: a server's steps are those of the workers that train."""

    def collect_step(self, name: str) -> WorkerState:
        return self.collect_state()

    def restore_state(self, step: int, reader: CheckpointReader, plain: Mapping[str, Any]) -> None:
        self._step = step
        self._host.restore_state(SavedState(reader, plain, 1))

    # ---- of this worker alone ----------------------------------------------------------------------------------------

    @allow_own_calls()  # what its model has is old from the first step on
    def step(self, batch: Any, name: str, anomalies: AnomalyDetector | None) -> StepResult:
        samples = batch.samples if isinstance(batch, Batch) else sample_count(flatten(batch)[0])
        self._step += 1
        self._stale.record_step()
        return StepResult(self._step - 1, samples, torch.full((2,), math.nan, dtype=torch.float64))

    def epoch(
        self, dataset: Any, batch_size: int, epoch: int, *, drop_last: bool, skip: int = 0, **options: Any
    ) -> Iterator[Batch]:
        """Yield as many batches as the training workers have, of the same sizes, with no samples in them."""
        sizes = data.count_batch_sizes(dataset, batch_size, drop_last, skip)
        return (Batch(samples, [], loaded_samples=samples) for samples in sizes)

    def optimizer_of(self, name: str) -> Any:
        return as_given(self._server.weights.objectives[name].optimizer)

    def gradients(self, name: str) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self._server.weights.objectives[name].parameters.items()}

    def held(self) -> dict[str, Tensor]:
        return dict(self._server.weights.parameters)

    def part_of(self, name: str) -> str:
        return ""

    def shard_of(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor

    def stepping(self) -> list[LocalOptimizer]:
        return self._host.stepping_optimizers()

    @property
    def counters(self) -> tuple[TransportCounters, ...]:
        return self._host.counters

    def sent_bytes(self) -> dict[str, float]:
        """Return the mean bytes sent in a step, the initial weights included; in theory its weights to each replica."""
        weights = sum(tensor.nbytes for tensor in self.held().values())
        sent = sum(counters.sent for counters in self.counters) / max(self._step, 1)
        none = dict.fromkeys((STAGES, OPERATORS, STATISTICS), 0.0)
        return {AGREEMENT: sent, **none, "theory": float(weights * self._plan.data)}

    def lane(self, steps: int) -> Lane:
        """Return the latest updates of its server, however many steps are requested, in seconds on rank 0's clock."""
        return align_clocks([[KnownSpan(span) for span in self._server.spans]], self._host.clock_offset), {}
