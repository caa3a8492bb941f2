"""Binding: lowers one objective's graph and binds its program to the tensors of one worker, ready to run steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.dropped_tensors import find_dropped_tensors
from polylane.compile.reshard import Resharder, value_specs
from polylane.errors import PolylaneError
from polylane.graph.capture.repeatable import DroppedTensors
from polylane.graph.operators.autocast_reads import dtypes_under_autocast, find_weight_reads
from polylane.graph.precision import autocast_dtype
from polylane.plan.plan import Plan
from polylane.program.check import check
from polylane.program.lower import lower, lower_evaluation, without_replica_sync
from polylane.program.meeting_order import order_meetings, order_steady_meetings
from polylane.program.program import GradientBucket, Program
from polylane.program.unroll import unroll
from polylane.runtime.compiled_regions import refuse_without_compiler
from polylane.runtime.connections.connections import Connections
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.parameters.zero_shards import Shards
from polylane.runtime.pipeline.asynchronous import AsynchronousExecutor, AsynchronousPipeline
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.pipeline.running_statistics import RunningStatistics
from polylane.runtime.pipeline.stage_code import LocalStageCode, extract_stage
from polylane.runtime.pipeline.stage_runner import StageRunner
from polylane.runtime.stage_hooks import StageHooks
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.zero.sharded_hooks import build_sharded_program
from polylane.runtime.tensor_parallel import WorkerMesh
from polylane.samples.batch_statistics import BatchStatistics
from polylane.schedule.action import WEIGHT_PASSES, ActionKind


def lower_programs(
    prepared: CompiledTraining, graph: CompiledGraph, training: bool, replica_local: bool = False
) -> tuple[Program, ...]:
    """Lower a graph to every worker's program for training or evaluation, and check them for deadlocks.

    Args:
        prepared: the compiled training, with the plan and the stages that keep each parameter up to date.
        graph: the graph, with its cuts into stages and the layouts of its operators.
        training: forward and backward, or forward only.
        replica_local: whether replicas do not sum gradients with each other.
    """
    plan = prepared.plan
    programs = (
        lower(graph.partition, plan, prepared.owning_stages, graph.layouts.partial_gradient_axes)
        if training
        else lower_evaluation(graph.partition, plan)
    )
    if replica_local or (training and plan.sync.has_servers):  # parameter servers sum the replicas' gradients
        programs = tuple(without_replica_sync(program, plan) for program in programs)
    is_asynchronous = training and plan.is_asynchronous
    check(unroll(programs, plan) if is_asynchronous else programs)
    return order_steady_meetings(programs, plan) if is_asynchronous else order_meetings(programs)


def lower_ahead(prepared: CompiledTraining, replica_local: bool = False) -> dict[str, tuple[Program, ...]]:
    """Lower each objective's graph that was compiled ahead to every worker's program for training.

    Args:
        prepared: the compiled training that is to be run.
        replica_local: whether replicas do not sum gradients with each other.
    """
    return {name: lower_programs(prepared, graph, True, replica_local) for name, graph in prepared.graphs.items()}


def bind_program(
    program: Program,
    compiled: CompiledGraph,
    local_model: LocalModel,
    connections: Connections,
    replica_local: bool = False,
    codec: GradientCompressor | None = None,
    pipeline: AsynchronousPipeline | None = None,
) -> Executor:
    """Bind one worker's program to its tensors, which are moved to its device.

    Args:
        program: this worker's program of the graph.
        compiled: the compiled graph of the program.
        local_model: this worker's part of the model.
        connections: transports and mesh of this worker.
        replica_local: whether the replica takes steps of its own, without the others' statistics.
        codec: gradient compressor of the objective; its error feedback is shared by all bound programs. Default:
            gradients are summed uncompressed.
        pipeline: batches under way, for a program of an asynchronous schedule; None for any other.
    """
    plan, tensors, shards = local_model.prepared.plan, local_model.tensors, local_model.shards
    transport, mesh = connections.transport, connections.mesh
    partition, graph = program.partition, program.partition.graph
    counts = BatchStatistics(graph.code.fx, {node.name for s in program.stages for node in partition.nodes(s)})
    tensors.move_to_device({*_used_names(program), *counts.buffers})
    arguments = _bind_tensors(program, tensors, mesh, shards, counts)
    binder = StageBinder(program, compiled, local_model, connections, codec, arguments)
    bound = {stage: binder.bind_stage(stage, group) for stage, group in _buckets_by_stage(program, plan, codec).items()}
    travelling = value_specs(partition, binder.dtypes, compiled.layouts[program.stage], mesh.coordinates)
    trains = any(action.kind is ActionKind.STEP for action in program.actions)
    make = Executor if pipeline is None else partial(AsynchronousExecutor, pipeline=pipeline)
    return make(
        program=program,
        runners={stage: runner for stage, (runner, _) in bound.items()},
        resharder=Resharder(program.rank, plan, partition, compiled.layouts, travelling, compiled.orders),
        transport=transport,
        sum_statistics=None if replica_local else connections.sum_replicas,
        reducers={stage: reducer for stage, (_, reducer) in bound.items() if reducer is not None},
        mesh=mesh,
        is_replica_local=replica_local,
        batch_statistics=counts or None,
        per_sample=plan.per_sample,
        running_statistics=RunningStatistics.of_program(program) if trains else None,
    )


@dataclass
class StageBinder:
    """Binds the stages of one worker, one by one, to its tensors.

    Attributes:
        program, compiled, local_model, connections, codec: arguments of :func:`bind_program`.
        arguments: what the placeholders of the stages' code stand for, by role.
    """

    program: Program
    compiled: CompiledGraph
    local_model: LocalModel
    connections: Connections
    codec: GradientCompressor | None
    arguments: dict[tuple[str, Any], Any]

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of results that autocast changes, by name."""
        autocast, device = self._autocast, self.local_model.tensors.device.type
        return {} if autocast is None else dtypes_under_autocast(self.program.partition.graph, device, autocast)

    @cached_property
    def dropped(self) -> tuple[DroppedTensors, ...]:
        """What every stage drops, to recompute it in the backward passes of the program, if it has any."""
        prepared, trains = self.local_model.prepared, any(a.kind in WEIGHT_PASSES for a in self.program.actions)
        layouts, partition = self.compiled.layouts, self.program.partition
        return find_dropped_tensors(
            partition,
            prepared.plan,
            layouts,
            prepared.samples,
            device=self.local_model.tensors.device.type,
            in_float64=prepared.in_float64,
            trains=trains,
        )

    @property
    def _autocast(self) -> torch.dtype | None:
        return autocast_dtype(self.local_model.prepared.plan.precision)

    @cached_property
    def _read_otherwise(self) -> frozenset[str]:
        """Names of parameters that the graph reads in their own dtype, where others are gathered in autocast's."""
        if self._autocast is None or not any(flat.unit.cast for flat in self.local_model.shards.flat_buffers):
            return frozenset()
        return find_weight_reads(self.program.partition.graph, self._autocast).otherwise

    def bind_stage(self, stage: int, buckets: tuple[GradientBucket, ...]) -> tuple[StageRunner, AllReducer | None]:
        """Return a stage's runner, and what reduces the gradients of ``buckets``; None: there are none to reduce."""
        hooks, reducer = self._bind_reduction(buckets)
        partition, layout, local_code = self.program.partition, self.compiled.layouts[stage], None
        in_halves, device = self.local_model.prepared.plan.splits_backward, self.local_model.tensors.device
        dropped, compiles = self.dropped[stage], self._compiles()
        code = extract_stage(partition, stage, device, hooks, in_halves, dropped, compiles, layout is not None)
        if layout is not None:
            at = self.connections.mesh.coordinates
            compiled_for = device if compiles else None
            local_code = LocalStageCode(
                code, partition, layout, at, self.dtypes, hooks, in_halves, dropped, compiled_for
            )
        runner = StageRunner(
            code=code,
            tensors=self.arguments,
            differentiable_inputs=frozenset(c.value for c in self.program.inputs(stage) if c.requires_grad),
            device=device,
            autocast=self._autocast,
            local_code=local_code,
            hooks=hooks,
        )
        return runner, reducer

    def _compiles(self) -> bool:
        """Return whether the plan compiles this stage.

        Raises:
            PolylaneError: nothing can be compiled here, or nothing of the model.
        """
        if not self.local_model.prepared.plan.compile:
            return False
        if self.program.partition.graph.is_opaque:
            raise PolylaneError(
                "compile=yes: the model runs as the user's own Python, of which no operator is known: leave it out"
            )
        refuse_without_compiler(self.local_model.tensors.device)
        return True

    def _bind_reduction(self, buckets: tuple[GradientBucket, ...]) -> tuple[StageHooks, AllReducer | None]:
        program, shards, transport = self.program, self.local_model.shards, self.connections.transport
        parameters, graph = self.local_model.tensors.parameters(), program.partition.graph
        targets = {name: parameters[name] for bucket in buckets for name in bucket.parameters}
        # The user's own Python may leave a parameter without a gradient; a branch that the loss does not read does.
        certain = {name for node in graph.nodes if node.requires_grad for name in node.parameters}
        optional = {name for node in graph.nodes if node.is_own_python for name in node.parameters}
        optional |= targets.keys() - certain
        if shards.flat_buffers:
            stage_program, plan, waits = (
                replace(program, buckets=buckets),
                self.local_model.prepared.plan,
                self.connections.mesh.waits,
            )
            cut = build_sharded_program(
                stage_program, plan, shards, targets, optional, transport, waits, self._read_otherwise
            )
            return cut, cut.reducer
        if not any(len(bucket.ranks) > 1 for bucket in buckets):
            return StageHooks(), None
        clock, late = self.connections.mesh.waits.clock, self._count_late(buckets) if transport.is_ordered else 0
        return StageHooks(), AllReducer(
            buckets, targets, optional, transport, self.codec, program.replicas, clock, late
        )

    def _count_late(self, buckets: Sequence[GradientBucket]) -> int:
        """Return how many buckets, from the first one on whose ranks do not end their last backward pass together."""
        plan, summed = self.local_model.prepared.plan, [bucket for bucket in buckets if len(bucket.ranks) > 1]
        for index, bucket in enumerate(summed):
            if plan.takes_turns or len({plan.stage_and_replica(rank)[0] for rank in bucket.ranks}) > 1:
                return len(summed) - index
        return 0


def _buckets_by_stage(
    program: Program, plan: Plan, codec: GradientCompressor | None
) -> dict[int, tuple[GradientBucket, ...]]:
    """Return for every stage of a worker the buckets whose gradients its last backward pass completes.

    Several workers reduce a tied weight; they do so behind all buckets of their own, as in the programs' order, so that
    none waits for another in two groups. A compressor counts its steps: it gets all buckets at once.
    """
    last_index = {action.stage: index for index, action in enumerate(program.actions) if action.kind in WEIGHT_PASSES}
    ending = max(program.stages, key=lambda stage: last_index.get(stage, -1))
    used = {stage: set(program.partition.parameters(stage)) for stage in program.stages}
    stage_buckets: dict[int, list[GradientBucket]] = {stage: [] for stage in program.stages}
    for bucket in program.buckets:
        alone = len({plan.stage_and_replica(rank)[0] for rank in bucket.ranks}) == 1
        using = [stage for stage in program.stages if not used[stage].isdisjoint(bucket.parameters)]
        if codec is not None or not alone or not using:
            stage_buckets[ending].append(bucket)
        else:
            stage_buckets[max(using, key=lambda stage: last_index.get(stage, -1))].append(bucket)
    return {stage: tuple(buckets) for stage, buckets in stage_buckets.items()}


def _used_names(program: Program) -> set[str]:
    """Return names of the parameters and buffers that the worker's stages read or write."""
    partition = program.partition
    return {name for s in program.stages for name in (*partition.parameters(s), *partition.buffers(s))}


def _bind_tensors(
    program: Program, tensors: ModelTensors, mesh: WorkerMesh, shards: Shards, counts: BatchStatistics
) -> dict[tuple[str, Any], Any]:
    """What the placeholders of a stage's code stand for, by (role, name), all on this worker's device."""
    partition, graph = program.partition, program.partition.graph
    parameters, buffers = tensors.parameters(), tensors.buffers()
    table: dict[tuple[str, Any], Any] = {
        ("constant", name): t.to(tensors.device) for name, t in graph.code.constants.items()
    }
    stages = program.stages
    for name in {name for stage in stages for name in partition.parameters(stage)}:
        # What this objective does not optimize takes part as a constant: no gradient is computed for it.
        has_own = graph.parameters[name].trainable or not parameters[name].requires_grad
        table["parameter", name] = parameters[name] if has_own else shards.constant_view(name, parameters[name])
    for name in {*counts.buffers, *(name for stage in stages for name in partition.buffers(stage))}:
        table["buffer", name] = buffers[name]
    return table | {("axis", name): axis for name, axis in mesh.axes.items()}
