"""Training role: computes one worker's part of a training. A job forwards its methods to it.

Its parts: :mod:`.program_binder`, :mod:`.parameters.local_model` and :mod:`.sync.objective_update`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polylane.checkpoint.read_tensors import CheckpointReader
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.optimizer_sequence import as_given
from polylane.compile.sample_shares import PADDING, Batch, SampleShare, compute_shares
from polylane.diagnosis.page_layout import Phase
from polylane.errors import ActionFailed
from polylane.graph.capture.output_request import OutputRequest
from polylane.graph.python_state.gradient_hooks import GradientHooks
from polylane.graph.readings.asked_draws import StepDraws
from polylane.graph.sparse_gradients import densify
from polylane.program.program import Program
from polylane.runtime.checkpoint.training_state import WorkerTrainingState
from polylane.runtime.compile_cache import CompileCache
from polylane.runtime.connections.connections import Connect, open_connections, replica_ranks
from polylane.runtime.data import loader as data
from polylane.runtime.data.batch_checks import BatchChecks
from polylane.runtime.data.read_trial import ReadTrials
from polylane.runtime.evaluation.evaluator import Evaluator
from polylane.runtime.evaluation.metric_states import MetricStates
from polylane.runtime.parameters.full_tensors import FullTensors
from polylane.runtime.parameters.local_model import LocalModel, plan_shard_units
from polylane.runtime.pipeline.anomalies import AnomalyDetector
from polylane.runtime.pipeline.bind_program import lower_ahead
from polylane.runtime.pipeline.refused_values import blame_on_values
from polylane.runtime.program_binder import BoundProgram, ProgramBinder
from polylane.runtime.stale_weights import allow_own_calls, track_stale_weights
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.model_state import optimized_parts
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.step_result import Lane, StepResult, StepState, align_clocks, gather_result
from polylane.runtime.sync.choose_sync import build_sync
from polylane.runtime.sync.gradient_sync import CollectiveCall, LocalOptimizer
from polylane.runtime.sync.objective_update import build_updates
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate
from polylane.runtime.sync.required_gradients import RequiredGradients
from polylane.runtime.telemetry.telemetry import StepsInFlight, Telemetry
from polylane.runtime.traffic_report import count_traffic
from polylane.runtime.transport import clock
from polylane.runtime.transport.protocol import TransportCounters
from polylane.runtime.workers import allocator
from polylane.runtime.workers.world import World

FinishStep = Callable[[str, BoundProgram, StepState], None]
RunStep = tuple[StepResult, StepState, BoundProgram]


class TrainingRole:
    """One worker's part in a training; its methods implement those of :class:`polylane.runtime.job.Job`.

    Attributes:
        world: this worker's rank among those that train, with device and backend.
        telemetry: observes some of its steps.
    """

    def __init__(
        self,
        prepared: CompiledTraining,
        world: World,
        example: Any,
        clip_norm: float | None = None,
        seed: int = 0,
        same_weights: bool = True,
        connect: Connect | None = None,
    ) -> None:
        """Bind a compiled training to this worker; see :class:`polylane.runtime.job.Job`; collective, servers too."""
        if world.device.type == "cpu":
            allocator.retain_freed_memory()
        all_processes, world = world, world.first_workers(prepared.plan.workers)
        self.plan, self.world = prepared.plan, world
        self._prepared, self._seed, self._step, self._is_last_step_local = prepared, seed, 0, False
        # Programs first: their channels and groups are what connections are opened for.
        lowered = lower_ahead(prepared)
        units = plan_shard_units(prepared, lowered)
        self._programs = {name: units.regroup_buckets(programs) for name, programs in lowered.items()}
        unsynced = lower_ahead(prepared, replica_local=True) if self.plan.sync.is_replica_local else {}
        programs = [*self._programs.values(), *unsynced.values()]
        self._connections = open_connections(prepared, world, programs, connect)
        self._transport = self._connections.transport
        self._checks = BatchChecks(prepared, self._transport, next(iter(self._programs.values())), world.device)
        self._clock_offset = clock.measure_clock_offset(self._transport) if world.size > 1 else 0.0
        self._local_model = LocalModel(prepared, world, self._connections, units, seed, same_weights)
        self._full_tensors = FullTensors(self._local_model)
        shapes = {n: i.shape for p in prepared.partitions.values() for n, i in p.graph.parameters.items()}
        self._hooks = GradientHooks(self._local_model.tensors.parameters(), shapes)
        self._updates = build_updates(self._local_model, clip_norm)
        self._required_gradients = RequiredGradients(self._local_model, self._updates)
        self._binder = ProgramBinder(self._local_model, self._connections, self._programs, unsynced, self._updates)
        self._cache = CompileCache(prepared, self._binder, example, self._checks.agree_on_settings, world.progress)
        # Now, not at the first step: an error in binding is then raised on all workers at once, outside of a step.
        self._cache.bind_ahead([False, True] if unsynced else [False])
        self._sync = build_sync(all_processes, self._local_model, self._connections, self._updates, clip_norm)
        if self._binder.pipeline is not None:  # a batch's loss is known when the last stage has seen it
            self._sync.max_steps_in_flight = 2 + self._binder.pipeline.delay
        parts = self._local_model, self._cache, self._checks, self._binder, self._sync, self._transport
        self._evaluator = Evaluator(prepared, world, *parts, self._pause_training, self._run)
        self._stale_weights = track_stale_weights(self._local_model)
        self._state = WorkerTrainingState(self._local_model, self._updates, self._sync, self._required_gradients)
        self.telemetry = Telemetry(world, self._local_model, has_norms=not self.plan.is_asynchronous)
        self._in_flight = StepsInFlight(self.telemetry)
        self._trials = ReadTrials(world.rank == 0)
        self._traffic = count_traffic(self._connections, self._sync, self._local_model, self._programs)

    @property
    def slack(self) -> int:
        return self._sync.max_steps_in_flight

    def bind_programs(self, programs: Sequence[Program], samples: int) -> BoundProgram:
        """Bind programs of the first objective's graph, of all workers by rank, for batches of that many samples."""
        return self._binder.fit_to_samples(self._binder.bind_graph(self._prepared.main, programs), samples)

    def empty_pipeline(self) -> None:
        """Finish the batches that are under way in an asynchronous pipeline; collective, and nothing elsewhere."""
        if self._binder.pipeline is not None:
            with allow_own_calls(), self._hooks.taken_off():
                self._binder.pipeline.empty()

    # ---- training ----------------------------------------------------------------------------------------------------

    @torch.enable_grad()
    def step(self, batch: Any, name: str, anomalies: AnomalyDetector | None) -> StepResult:
        return self._run_step(batch, name, anomalies, self._apply_update)[0]

    def _run_step(self, batch: Any, name: str, anomalies: AnomalyDetector | None, finish: FinishStep) -> RunStep:
        """Run the program of a step; ``finish`` is called once its gradients are complete."""
        update, label = self._updates[name], f"step {self._step + 1}"
        local_batch, digests, was_read = self._checks.take(batch, label, self._cache.sampled)
        if local_batch.shortest < self._prepared.min_samples.samples:
            self._checks.refuse_short(local_batch)
        if local_batch.is_collated:
            self._checks.refuse_unequal_sizes(local_batch)
        progress, blame = self.world.progress, self._sync.blame_local_server()
        with progress.during(Phase.TRAINING), allow_own_calls(), blame, self._hooks.taken_off():
            self._required_gradients.agree()
            is_local = self._is_last_step_local = self._sync.is_replica_local(name)
            bound = self._cache.compiled_for(name, local_batch, True, is_local, StepDraws(self._seed, self._step))
            self._in_flight.limit(self._sync.max_steps_in_flight)
            self._checks.add_script(digests, update, self._cache.settings_version)
            self.telemetry.begin_step(self._step)
            for objective_update in self._updates.values():
                objective_update.set_mode(training=True)
            update.zero_grad()
            if bound.buffers:
                self._local_model.buffers.receive_updates(bound.buffers)
            bound.executor.anomalies = anomalies
            bound.executor.loss_scale = None if update.loss_scale is None else update.loss_scale.scale
            noise = self.telemetry.noise
            with self._traffic.count_step(name, bound.passes), noise.measuring(bound.executor, update, self._step):
                state = self._run(label, bound, local_batch, self._step, partial(finish, name, bound))
            if bound.buffers:
                self._local_model.buffers.mark_updated(bound.buffers)
            state.changes = self._required_gradients.follow_update()
            compare = partial(self._checks.compare, what=label, was_read=was_read)
            context = self._clock_offset, self._transport, self.world.device, self._sync.loss_ranks
            facts = self.telemetry.collect(state, self._in_flight.spans), noise.collect(bound.executor, state)
            result = gather_result(self._step, bound.programs, state, *context, digests, compare, *facts)
            self._stale_weights.record_step(self._sync.weights_differ)
        self._required_gradients.record_result(result)
        self._in_flight.add(result, state.spans)
        self._checks.keep(result)
        self._step += 1
        update.follow_loss(lambda: result.loss)
        return result, state, bound

    def _pause_training(self) -> None:
        """Finish the batches that are under way, and let optimizers exchange the weights that they train."""
        self.empty_pipeline()
        for update in self._updates.values():
            update.set_mode(training=False)

    def _run(
        self, label: str, bound: BoundProgram, local_batch: Batch, step: int, update: Callable[[StepState], None]
    ) -> StepState:
        """Run a batch's program, which ``label`` names in errors."""
        try:
            return bound.executor.run(local_batch, step, self._seed, update)
        except ActionFailed as failed:
            raise blame_on_values(label, failed) from failed.cause

    def complete_steps(self) -> None:
        """Complete the steps under way, and refuse them if not all workers have read the same; collective."""
        self._pause_training()
        self._in_flight.limit(1)
        self._checks.check_kept()

    def _complete_gradients(self, name: str, bound: BoundProgram, state: StepState) -> None:
        """Make the gradients those of the loss's mean over what it counts, as the user's hooks change them."""
        update = self._updates[name]
        self.telemetry.noise.note_sums(update, state)
        update.unscale_gradients()
        if not bound.executor.program.partition.graph.loss_is_mean:
            # Gradients were taken of total / samples; the mean is total / count, and the count is known only now.
            is_local = bound.executor.is_replica_local
            ranks = replica_ranks(self.plan, self.world.rank) if is_local else range(self.world.size)
            count = self._transport.all_reduce(state.sums(self.world.device), ranks).wait()[1]
            # On an accelerator nobody waits for the count: where it is 0, the gradients are left as they are.
            if self.world.device.type != "cpu":
                update.scale_gradients(torch.where(count == 0, 1.0, state.samples_in_mean / count))
            elif count:
                update.scale_gradients(state.samples_in_mean / float(count))
        self._required_gradients.refuse_changes()
        self._hooks.run(update.local_parameters, self._seed, self._step)
        self.telemetry.note_gradients(update)

    def _apply_update(self, name: str, bound: BoundProgram, state: StepState) -> None:
        self._complete_gradients(name, bound, state)
        has_samples = bool(state.tables.shares) or not bound.executor.is_replica_local
        self._updates[name].step_key = self._seed, self._step
        self._sync.update_weights(name, self._updates[name], has_samples)
        self._sync.after_step(name, bound.counted)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    @allow_own_calls()
    def evaluate_sums(self, batch: Any, name: str, metrics: MetricStates | None = None) -> tuple[float, float]:
        return self._evaluator.evaluate(batch, name, metrics)

    def begin_metrics(self) -> MetricStates:
        return MetricStates(self._transport, self.world.device, self._prepared.in_float64)

    @allow_own_calls()
    def complete_metrics(self, metrics: MetricStates) -> dict[str, float]:
        return self._evaluator.complete(metrics)

    @allow_own_calls()
    def predict(self, batch: Any, name: str, request: OutputRequest) -> list[Any]:
        return self._evaluator.predict(batch, name, request)

    # ---- data and weights --------------------------------------------------------------------------------------------

    def epoch(self, dataset: Any, batch_size: int, epoch: int, *, drop_last: bool, **options: Any) -> Iterator[Batch]:
        """Yield the batches of one epoch, with this worker's samples; see :meth:`polylane.runtime.job.Job.batches`."""
        # A tensor of the whole batch may index its samples by position: it takes all of them to collate one.
        is_whole = self._prepared.reads_whole_batches or self._cache.has_common_tensors
        options |= {"shares": self.shares, "whole": is_whole, "trials": self._trials, "compared": self.world.size > 1}
        return data.load_batches(dataset, batch_size, epoch=epoch, seed=self._seed, drop_last=drop_last, **options)

    def shares(self, samples: int, rank: int | None = None) -> tuple[SampleShare, ...]:
        """Return the shares of this worker, or of that with a rank, of a batch of ``samples`` samples."""
        program = next(iter(self._programs.values()))[self.world.rank if rank is None else rank]
        parts, replicas = self._prepared.microbatches_of(samples), self._prepared.plan.shares or len(program.replicas)
        return compute_shares(samples, parts, replicas, program.replica, program.takes_turns) or (PADDING,)

    def scale_rates(self, factor: float) -> None:
        """Multiply all learning rates of this worker's optimizers; all workers call it between the same two steps."""
        for update in self._updates.values():
            update.scale_rates(factor)

    def optimizer_of(self, name: str) -> Any:
        return as_given(self._updates[name].optimizer)

    @allow_own_calls()
    def gradients(self, objective: str) -> dict[str, Tensor | None]:
        self._sync.load_summed_gradients(objective)
        return {name: parameter.grad for name, parameter in self._updates[objective].local_parameters.items()}

    @allow_own_calls()
    def whole_gradients(self, name: str) -> dict[str, Tensor | None]:
        self.empty_pipeline()
        self._sync.load_summed_gradients(name)
        gradients = self._full_tensors.gradients(self._updates[name].parameter_order)
        self._sync.broadcast_result(CollectiveCall.WHOLE_GRADIENTS, gradients)
        return gradients

    @allow_own_calls()
    def held(self) -> dict[str, Tensor]:
        # Aliases: the model's own tensors are guarded while the script runs.
        return {name: tensor.detach() for name, tensor in self._local_model.local_tensors().items()}

    def part_of(self, name: str) -> str:
        return self._local_model.shard_label(name)

    @allow_own_calls()
    def shard_of(self, name: str, tensor: Tensor) -> Tensor | None:
        return self._local_model.shards.local_part(name, tensor)

    @allow_own_calls()
    def state_dict(self, losses: bool) -> dict[str, Tensor]:
        self.complete_steps()
        with self._sync.averaged_weights():
            state = self._full_tensors.state_dict(losses)
            self._sync.broadcast_result(CollectiveCall.STATE_DICT, state)
        return state

    @allow_own_calls()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.empty_pipeline()
        self._full_tensors.load_state_dict(state)
        self._stale_weights.record_whole()

    @contextmanager
    def whole_model(self, state: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        with allow_own_calls(), self._full_tensors.whole_in_model(state) as written:
            yield self._prepared.model
        if written:
            self.load_state_dict({**state, **written})

    @allow_own_calls()
    def save(self, path: Path) -> None:
        self.complete_steps()
        try:
            with self.world.progress.during(Phase.SAVING), self._sync.averaged_weights():
                self._full_tensors.save(path)
        finally:
            # Also where the file could not be written: the servers wait for the end of the call, not for the file.
            self._sync.broadcast_result(CollectiveCall.SAVE, None)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @allow_own_calls()
    def collect_state(self) -> WorkerState:
        self.complete_steps()
        self._required_gradients.agree()
        with self.world.progress.during(Phase.SAVING):
            return self._state.collect()

    @allow_own_calls()
    def collect_step(self, name: str) -> WorkerState:
        """Return the state after a step of an objective, with the gradients that its optimizer used."""
        # Replicas that take steps of their own have gradients of their own.
        variant = f"@{self._state.replica}" if self._is_last_step_local else ""
        self._sync.load_summed_gradients(name)
        state = self.collect_state()
        for parameter, part in optimized_parts(self._local_model, self._updates[name].local_parameters).items():
            gradient = part.parameter.grad
            if gradient is not None:
                state.add(f"gradient/{parameter}{variant}", part.region, densify(gradient))
        return state

    @allow_own_calls()
    def restore_state(self, step: int, reader: CheckpointReader, plain: Mapping[str, Any]) -> None:
        self.empty_pipeline()
        self._step = step
        self._state.restore(SavedState(reader, plain, self._state.replicas))

    # ---- telemetry ---------------------------------------------------------------------------------------------------

    def gather(self, make: Callable[[], Any]) -> list[Any]:
        """Gather every worker's plain value by rank, dedicated servers last; ``make`` returns this worker's."""
        self.empty_pipeline()
        return self.exchange(make())

    def exchange(self, value: Any) -> list[Any]:
        """Gather every worker's plain value by rank, while batches may be under way in an asynchronous pipeline."""
        return self._sync.all_gather_object(value)

    def sent_bytes(self) -> dict[str, float]:
        """Return the mean bytes that this worker sent in a step, see :meth:`polylane.runtime.job.Job.traffic`."""
        return self._traffic.mean_bytes()

    def lane(self, steps: int) -> Lane:
        """Return this worker's part in the timeline of the last ``steps`` steps."""
        return align_clocks([*self._in_flight.spans][-steps:], self._clock_offset), self._in_flight.groups

    def stepping(self) -> list[LocalOptimizer]:
        if (server_optimizers := self._sync.stepping_optimizers()) is not None:
            return server_optimizers
        update = next(iter(self._updates.values()))
        return [LocalOptimizer(update.optimizer, update.local_parameters, lambda: self._step)]

    @property
    def staleness(self) -> int:
        return self._sync.staleness

    @property
    def counters(self) -> tuple[TransportCounters, ...]:
        transports = (self._connections.transport, *self._connections.extra_groups.values())
        return (*(transport.counters for transport in transports), *self._sync.server_counters())

    def updates(self) -> tuple[tuple[ServerUpdate, ...], ...]:
        return self._sync.server_updates()

    @allow_own_calls()
    def close(self) -> None:
        """Wait for all messages of this worker, end its connections, and leave the other workers."""
        # First: servers stop waiting for this worker. Another may still have steps to make when reads are compared.
        self._sync.leave()
        self.complete_steps()
        self._stale_weights.close()
        self._sync.close()
        self._connections.close()
        self.world.leave()
