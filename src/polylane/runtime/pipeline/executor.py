"""Executor: runs one worker's actions of one step, in order, with receives posted ahead of time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from polylane.compile.reshard import Resharder, extract_box, write_box
from polylane.compile.sample_shares import PADDING, Batch, SampleShare, compute_shares
from polylane.errors import INTERRUPTIONS, OTHERS_FAILED, ActionFailed
from polylane.graph.batch import split_bounds
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.program.program import Program
from polylane.program.waits import SEND_DEPTH, list_postings, waiting_microbatches
from polylane.runtime.pipeline.anomalies import AnomalyDetector
from polylane.runtime.pipeline.batch_tables import BatchTables, build_tables, runs
from polylane.runtime.pipeline.running_statistics import Kept, RunningStatistics
from polylane.runtime.pipeline.sample_witness import WitnessedCall, check_calls, gather_flat, is_witnessed
from polylane.runtime.pipeline.stage_runner import StageRunner, find_failing_node
from polylane.runtime.step_result import PendingSend, SendKey, StepState
from polylane.runtime.sync.all_reduce import AllReducer, launch_zeros
from polylane.runtime.tensor_parallel import WorkerMesh
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.out_of_memory import out_of_memory
from polylane.samples.batch_statistics import BatchStatistics, CountingReplicas
from polylane.schedule.action import PASSES, Action, ActionKind


@dataclass
class Executor:
    """Runs one program, step after step; it is first fitted to the size of a batch, see :meth:`fit_to_samples`.

    Attributes:
        program: actions of this worker in a step.
        runners: by stage of this worker, its code on this worker's tensors.
        resharder: knows the crossing values, and computes the boxes of messages.
        transport: carries values and gradients; opened with the program's channels and groups.
        sum_statistics: sums statistics and counts of the batch over the replicas, on a transport of its own.
        reducers: sum gradients over the ranks of each bucket, by the stage whose last backward pass completes them.
        mesh: axes along which operators are sharded; the loss of its first worker counts, the others compute the same.
        is_replica_local: whether the replica takes steps of its own: gradients are those of its own samples' mean.
        batch_statistics: statistics of the whole batch that this stage's operators need; None: there are none.
        per_sample: modules that treat each sample by itself, as the plan says; their calls are checked.
        running_statistics: moved at the end of a step, where replicas take turns; None: in the passes.
        anomalies: checks forward passes in training; None: they are not checked.
        loss_scale: factor of the loss whose gradients passes compute, a scalar on the device; None: 1.
        measure_pass: context manager around every backward pass, in a step whose gradients are measured; None: none.
    """

    program: Program
    runners: Mapping[int, StageRunner]
    resharder: Resharder
    transport: Transport
    sum_statistics: Callable[[Tensor], Tensor] | None
    reducers: Mapping[int, AllReducer]
    mesh: WorkerMesh
    is_replica_local: bool
    batch_statistics: BatchStatistics | None
    per_sample: Sequence[str]
    running_statistics: RunningStatistics | None = None
    anomalies: AnomalyDetector | None = None
    loss_scale: Tensor | None = None
    measure_pass: Callable[[Action], AbstractContextManager[None]] | None = None

    def __post_init__(self) -> None:
        self.microbatches = self.program.microbatches
        self._postings = list_postings(self.program, self.transport.is_ordered)
        self._until = waiting_microbatches(self.program)
        self._reducer_of = {bucket: reducer for reducer in self.reducers.values() for bucket in reducer.bucket_names}
        self._inputs = {stage: self.program.inputs(stage) for stage in self.program.stages}
        self._outputs = {stage: self.program.outputs(stage) for stage in self.program.stages}
        # By stage, what it hands to other stages of this worker: (value, stage that reads it).
        self._handed: dict[int, list[tuple[str, int]]] = {stage: [] for stage in self.program.stages}
        for (value, reader), source in self.program.local_sources.items():
            self._handed[source].append((value, reader))
        # By stage and microbatch; an order may have whole passes beside those in two halves.
        self._halved = {(a.stage, a.microbatch) for a in self.program.actions if a.kind is ActionKind.BACKWARD_INPUT}
        self._tables: BatchTables | None = None
        self._number, self._is_new = self.mesh.waits.progress.describe_program(self.program), True

    def fit_to_samples(self, samples: int, open_sizes: tuple[int, ...] = ()) -> Executor:
        """Return this executor fitted to batches of one size (and open sizes): its tables, the code for its shares."""
        fitted, program = copy.copy(self), self.program
        replicas = self.resharder.plan.shares or len(program.replicas)
        shares = compute_shares(samples, self.microbatches, replicas, program.replica, program.takes_turns)
        share_of = {share.microbatch: share for share in shares if share.weight or not self.is_replica_local}
        fitted.resharder = self.resharder.at_sizes(open_sizes)
        tables = build_tables(program, fitted.resharder, samples, share_of, self.is_batch_sharded, open_sizes)
        fitted._tables, sizes = tables, set(tables.held.values())
        fitted.runners = {stage: runner.fit_to_sizes(sizes, open_sizes) for stage, runner in self.runners.items()}
        self.mesh.waits.progress.describe_code(c for r in fitted.runners.values() for c in (r.code, *r.codes.values()))
        return fitted

    @property
    def any_runner(self) -> StageRunner:
        """The runner of the first stage; all of them have the worker's tensors."""
        return self.runners[self.program.stage]

    def run(self, batch: Batch, step: int, seed: int, finish: Callable[[StepState], None]) -> StepState:
        """Run one step; ``finish`` is called for the STEP action.

        Raises:
            ActionFailed: an action raised; it says which one, with the original error as cause.
        """
        (progress := self.mesh.waits.progress).begin_round(self._number, step, self._is_new)
        self.mesh.waits.clock.begin_step()
        state = self._begin(batch, step, seed)
        if not state.tables.shares and not self.is_replica_local:
            launch_zeros(self.program, self.reducers)
        for index, action in enumerate(self.program.actions):
            for posting in self._postings[index]:
                self._post_receive(posting.receive, state)
            if not runs(action, state.tables, sums=not self.is_replica_local):
                continue
            is_last = index == state.tables.last_backwards.get(action.stage)
            progress.begin_action(index)
            self._run_action(action, batch, state, finish, self.reducers.get(action.stage) if is_last else None)
            progress.end_action()
        for key in list(state.pending_sends):
            state.wait_sent(key)
        self._is_new = False
        return state

    def _begin(self, batch: Batch, step: int, seed: int) -> StepState:
        """Return the state of a step before its first action; collective where operators need counts of the batch."""
        tables = self._tables
        assert tables is not None and tables.samples == batch.samples, "a worker runs batches of the size it is fit for"
        shares = tables.shares
        averaged = sum(share.samples for share in shares.values()) if self.is_replica_local else batch.samples
        counted = shares if shares or self.is_replica_local else {0: PADDING}
        slices = {i: self._sample_slice(share, tables, step, seed, averaged) for i, share in counted.items()}
        # A replica in turn without a microbatch of this batch counts with the others all the same.
        parts = {i: part for i, part in self._add_batch_counts(batch, counted, slices).items() if i in shares}
        witnessed = bool(self.per_sample) and not self.is_batch_sharded
        witnessed = witnessed and is_witnessed(self.program, step, len(shares), batch.samples, self.is_replica_local)
        calls: list[list[WitnessedCall]] = [[] for _ in self.runners] if witnessed else []
        for runner, records in zip_longest(self.runners.values(), calls):
            runner.code.watch.records = records
        statistics = {i: Kept() for i in shares}
        if self.running_statistics is not None:
            parts = {i: replace(part, keep_statistics=statistics[i].keep) for i, part in parts.items()}
        return StepState(parts, tables, averaged, kept_statistics=statistics, witnessed_calls=calls)

    def _add_batch_counts(
        self, batch: Batch, shares: Mapping[int, SampleShare], parts: dict[int, SampleSlice]
    ) -> dict[int, SampleSlice]:
        """Add to the slices the statistics that must be summed over the whole batch before any pass."""
        replicas = self.program.replicas
        is_alone = self.is_replica_local or self.is_batch_sharded or len(replicas) == 1
        if self.batch_statistics is None or (is_alone and len(parts) < 2):  # the part is the whole
            return parts
        ordered = [parts[i] for i in sorted(parts)]
        leaves = [batch.leaves_of(shares[i]) for i in sorted(parts)]
        other_replicas = None if is_alone else CountingReplicas(self._add_replicas, self.program.replica, len(replicas))
        try:
            counts = self.batch_statistics.compute_statistics(ordered, leaves, self.any_runner.tensors, other_replicas)
        except OTHERS_FAILED:
            raise
        except Exception as error:
            module = "what is counted of the whole batch"
            raise ActionFailed(self.program.rank, self.program.stage, None, module, None) from error
        return {i: replace(part, whole=lambda key, _: counts[key]) for i, part in parts.items()}

    def _check_witnessed_calls(self, state: StepState) -> None:
        for records in state.witnessed_calls:
            graph = self.program.partition.graph
            mean, named = graph.loss_is_mean or not graph.is_opaque, "+".join(self.per_sample)
            check_calls(graph.code.fx, records, self._gather_replicas, mean, named)

    def _gather_replicas(self, tensor: Tensor) -> list[Tensor]:
        """Gather a tensor of one dimension from every replica."""
        alone = self.is_replica_local or len(self.program.replicas) == 1
        return [tensor] if alone else gather_flat(self.transport, tensor, self.program.replicas)

    def _add_replicas(self, tensor: Tensor) -> Tensor:
        if self.sum_statistics is not None:
            return self.sum_statistics(tensor)
        return self.transport.all_reduce(tensor, self.program.replicas).wait()

    def _sample_slice(
        self, share: SampleShare, tables: BatchTables, step: int, seed: int, averaged: int
    ) -> SampleSlice:
        """Describe the local samples of one microbatch, for operators that depend on more than their inputs.

        Args:
            share: this worker's samples of the microbatch.
            tables: tables for batches of this size.
            step, seed: number of the step, from 0, and the seed of all random numbers.
            averaged: number of samples over which the loss is a mean.
        """
        start, stop, weight = share.start, share.stop, share.weight
        sums = None if self.sum_statistics is None or self.program.takes_turns else self._sum_replicas
        if self.is_batch_sharded:  # operators see the whole microbatch, of which each replica holds its rows
            start, stop = split_bounds(tables.samples, self.microbatches)[share.microbatch]
            weight, sums = 1, None
        return SampleSlice(
            samples=stop - start,
            first=start,
            batch=tables.samples,
            microbatch=share.microbatch,
            step=step,
            seed=seed,
            weight=weight,
            sum_replicas=sums,
            loss_samples=averaged,
            open_sizes=tables.open_sizes,
        )

    @property
    def is_batch_sharded(self) -> bool:
        """Whether replicas shard operators along the batch, because the loss couples samples."""
        return "data" in self.mesh.axes

    def _post_receive(self, action: Action, state: StepState) -> None:
        if action.kind is ActionKind.RECEIVE and (route := state.tables.routes.get(action)) is not None:
            assert action.value is not None and action.peer is not None
            dtype = self.resharder.value_specs[action.value].dtype
            state.pending_receives[action] = self.transport.receive(route.shape, dtype, action.peer)

    def _sum_replicas(self, tensor: Tensor) -> Tensor:
        sums = self.sum_statistics
        assert sums is not None
        with self.mesh.waits.timing():
            result = sums(tensor)
        self.mesh.waits.bytes += tensor.nbytes if len(self.program.replicas) > 1 else 0
        return result

    def _run_action(
        self,
        action: Action,
        batch: Batch,
        state: StepState,
        finish: Callable[[StepState], None],
        reducer: AllReducer | None = None,
    ) -> None:
        """Run one action, with the reductions of the gradients that it completes, if ``reducer`` is given.

        Raises:
            ActionFailed: the action raised; it says which one, with the original error as cause.
        """
        try:
            if reducer is not None:
                reducer.begin_last_backward()
            self._run(action, batch, state, finish)
            if reducer is not None:
                reducer.launch_remaining()
        except (ActionFailed, SystemExit, *INTERRUPTIONS, *OTHERS_FAILED):
            raise
        except BaseException as error:
            node = find_failing_node(self.runners[action.stage], error)
            module = None if node is None else (node.module or "the model's own forward")
            location = self.program.rank, action.stage, action.microbatch, module, node.source if node else None
            raise out_of_memory(error, *location) or ActionFailed(*location) from error

    def _run(self, action: Action, batch: Batch, state: StepState, finish: Callable[[StepState], None]) -> None:
        waits = self.mesh.waits
        start = waits.begin_action()
        if action.kind is ActionKind.FORWARD:
            self._forward(action, batch, state)
        elif action.kind in PASSES:
            with nullcontext() if self.measure_pass is None else self.measure_pass(action):
                self._backward(action, state)
        elif action.kind is ActionKind.SEND:
            self._send(action, state)
        elif action.kind is ActionKind.RECEIVE:
            self._receive(action, state)
        elif action.kind is ActionKind.REDUCE:
            assert action.value is not None
            reducer = self._reducer_of[action.value]
            start = reducer.wait_bucket(action.value)
            waits.bytes = reducer.bucket_bytes[action.value]
        else:
            self._check_witnessed_calls(state)
            start_bytes = self.transport.counters.given
            if self.running_statistics is not None:
                microbatches, tensors = min(state.tables.samples, self.microbatches), self.any_runner.tensors
                self.running_statistics.move(tensors, state.kept_statistics, microbatches, self._sum_replicas)
            finish(state)
            waits.bytes += self.transport.counters.given - start_bytes
        state.spans.append(waits.make_span(self.program.rank, action, start))

    def _forward(self, action: Action, batch: Batch, state: StepState) -> None:
        i = action.microbatch
        assert i is not None
        share, part, pass_key = state.tables.shares[i], state.sample_slices[i], (action.stage, i)
        runner = self.runners[action.stage]
        leaves = batch.leaves_of(share, rows=share.weight * share.samples if self.is_batch_sharded else None)
        values = state.values.pop(pass_key, {})
        for crossing in self._inputs[action.stage]:
            if crossing.value not in values:  # this worker's shard is empty, so no message came
                values[crossing.value] = self._zero_value(crossing.value, part.samples, state)
        live = runner.forward(state.first_pass + i, values, leaves, part, pass_key in self._halved)
        if self.anomalies is not None and share.weight and torch.is_grad_enabled():
            self.anomalies.check_forward(runner, self.program, values, leaves, part, live)
        state.output_values[pass_key] = live.outputs
        # Other stages of this worker get an alias, as if it had come in a message: autograd does not see through it.
        for name, reader in self._handed[action.stage]:
            value = values[name] if name in values else live.outputs[name]
            state.values.setdefault((reader, i), {})[name] = value.detach()
        # Padding samples are excluded from the loss, even if it is NaN.
        if live.loss and share.weight and self.mesh.is_first:
            parts = self.program.partition.graph.loss_parts
            state.outputs[i] = tuple(output.detach() for output in live.loss[parts:])
            total = live.loss[0].detach().double()  # so that a printed loss is the one device's to the last digit
            # A scalar mean counts for as many samples as it was taken over; a Mean brings its own count.
            mean = parts == 1
            state.loss_totals.append(total * part.samples if mean else total)
            state.loss_counts.append(part.samples if mean else live.loss[1].detach())

    def _backward(self, action: Action, state: StepState) -> None:
        i = action.microbatch
        assert i is not None
        pass_key, runner, seed = (action.stage, i), self.runners[action.stage], None
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            runner.backward_weight(state.first_pass + i)
            return
        if runner.code.has_loss:
            part = state.sample_slices[i]
            mean = self.program.partition.graph.loss_is_mean
            # Filled on the device: a copy from the host would wait for all kernels before it.
            share = part.weight * (part.samples if mean else 1) / state.samples_in_mean
            seed = torch.full((), share, device=runner.device, dtype=torch.float64)
            seed = seed if self.loss_scale is None else seed * self.loss_scale
        # Waiting for messages of earlier microbatches releases their buffers; program/check.py has shown that it ends.
        for key in [key for key, sent in state.pending_sends.items() if key.stage == action.stage and sent.until <= i]:
            state.wait_sent(key)
        for old in [key for key in state.input_gradients if key[0] == action.stage and key[1] <= i - SEND_DEPTH]:
            del state.input_gradients[old]
        state.output_values.pop(pass_key, None)  # with the autograd graph that hangs on it
        gradients, outgoing = state.gradients.pop(pass_key, {}), dict[str, Tensor]()
        for crossing in self._outputs[action.stage]:
            if crossing.requires_grad:
                outgoing[crossing.value] = (
                    gradients.pop(crossing.value)
                    if crossing.value in gradients
                    else self._zero_value(crossing.value, state.sample_slices[i].samples, state)  # none came back
                )
        backward = runner.backward if action.kind is ActionKind.BACKWARD else runner.backward_input
        input_gradients = backward(state.first_pass + i, outgoing, seed)
        # What is left came from further stages of this worker that read the same incoming values.
        for name, gradient in gradients.items():
            input_gradients[name] = input_gradients[name] + gradient
        for name in [name for name in input_gradients if (name, action.stage) in self.program.local_sources]:
            into = state.gradients.setdefault((self.program.local_sources[name, action.stage], i), {})
            gradient = input_gradients.pop(name)
            into[name] = into[name] + gradient if name in into else gradient
        state.input_gradients[pass_key] = input_gradients

    def _send(self, action: Action, state: StepState) -> None:
        i, name = action.microbatch, action.value
        assert i is not None and name is not None and action.peer is not None
        pass_key = (action.stage, i)
        value = (state.input_gradients if action.gradient else state.output_values)[pass_key][name]
        dtype, shape = self.resharder.value_specs[name].dtype, state.tables.shapes[name, state.sample_slices[i].samples]
        if tuple(value.shape) != shape or value.dtype != dtype:
            # Checked here because gloo ends the process when sizes disagree.
            raise RuntimeError(
                f"the value {name} is {value.dtype} {tuple(value.shape)} where capture saw {dtype} {shape}"
            )
        route = state.tables.routes[action]
        value = extract_box(value.detach(), route.box)
        value = value if route.share is None else route.share.take_from(value)
        key, pending = SendKey(*pass_key, name, action.peer, action.gradient), self.transport.send(value, action.peer)
        state.pending_sends[key] = PendingSend(pending, self._until[action])
        self.mesh.waits.bytes += value.nbytes

    def _receive(self, action: Action, state: StepState) -> None:
        i, name = action.microbatch, action.value
        assert i is not None and name is not None and action.peer is not None
        value = state.pending_receives.pop(action).wait()
        self.mesh.waits.bytes += value.nbytes
        if action.gradient:  # the peer has computed with the value that was sent to it, so it has received it
            state.wait_sent(SendKey(action.stage, i, name, action.peer, is_gradient=False))
        values = (state.gradients if action.gradient else state.values).setdefault((action.stage, i), {})
        samples = state.sample_slices[i].samples
        if value.shape != state.tables.shapes[name, samples]:
            into = values.pop(name, None)
            into = self._zero_value(name, samples, state) if into is None else into
            write_box(
                into, state.tables.routes[action].box, value, add=action.gradient or self.resharder.is_summed(name)
            )
            value = into
        values[name] = value if name not in values else values[name] + value

    def _zero_value(self, name: str, samples: int, state: StepState) -> Tensor:
        shape = state.tables.shapes[name, samples]
        return torch.zeros(shape, dtype=self.resharder.value_specs[name].dtype, device=self.any_runner.device)
