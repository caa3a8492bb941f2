"""Binding: lowers one objective's graph and binds its program to the tensors of one worker, ready to run steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.dropped_tensors import find_dropped_tensors
from polylane.compile.reshard import Resharder, value_specs
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.graph.precision import dtypes_under_autocast
from polylane.graph.repeatable import DroppedTensors
from polylane.plan.plan import Plan
from polylane.program.check import check
from polylane.program.lower import lower, lower_evaluation, without_replica_sync
from polylane.program.program import GradientBucket, Program
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.pipeline.connections import Connections
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.pipeline.stage_code import OWN_PYTHON, LocalStageCode, StageHooks, extract_stage
from polylane.runtime.pipeline.stage_runner import StageRunner
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.zero.flat_shards import Shards
from polylane.runtime.sync.zero.stage_hooks import build_sharded_program
from polylane.runtime.tensor_parallel import WorkerMesh
from polylane.samples.batch_statistics import BatchStatistics
from polylane.schedule.action import WEIGHT_PASSES
from polylane.schedule.schedules import splits_backward
from polylane.sharding.stage_layouts import StageLayouts


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
    check(programs)
    return programs


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
    holding: LocalModel,
    connections: Connections,
    replica_local: bool = False,
    codec: GradientCompressor | None = None,
) -> Executor:
    """Bind one worker's program to its tensors, which are moved to its device.

    Args:
        program: this worker's program of the graph.
        compiled: the compiled graph of the program.
        holding: this worker's part of the model.
        connections: transports and mesh of this worker.
        replica_local: whether the replica takes steps of its own, without the others' statistics.
        codec: gradient compressor of the objective; its error feedback is shared by all bound programs. None: none.
    """
    plan, tensors, shards = holding.prepared.plan, holding.tensors, holding.shards
    transport, mesh, partition = connections.transport, connections.mesh, program.partition
    graph = partition.graph
    counts = BatchStatistics(graph.code.fx, {node.name for s in program.stages for node in partition.nodes(s)})
    tensors.move_to_device({*_used_names(program), *counts.buffers})
    autocast, dtypes = _autocast_of(plan, graph, tensors.device)
    parameters, optional = tensors.parameters(), _optional_parameters(graph)
    held = {name: parameters[name] for bucket in program.buckets for name in bucket.parameters}
    binder = StageBinder(
        partition=partition,
        layouts=compiled.layouts,
        coordinates=mesh.coordinates,
        arguments=_bind_tensors(program, tensors, mesh, shards, counts),
        device=tensors.device,
        autocast=autocast,
        dtypes=dtypes,
        in_halves=splits_backward(plan.schedule),
        dropped=_find_dropped(program, compiled, holding),
    )
    runners, reducers = dict[int, StageRunner](), dict[int, AllReducer]()
    for stage, buckets in _buckets_by_stage(program, plan, codec).items():
        own, hooks = replace(program, buckets=buckets), StageHooks()
        if shards.flat_buffers:
            hooks = cut = build_sharded_program(own, plan, shards, held, optional, transport, mesh.waits)
            reducers[stage] = cut.reducer
        elif buckets:
            reducers[stage] = AllReducer(buckets, held, optional, transport, codec, program.replicas)
        runners[stage] = binder.bind_stage(stage, hooks)
    travelling = value_specs(partition, dtypes, compiled.layouts[program.stage], mesh.coordinates)
    return Executor(
        program=program,
        runners=runners,
        resharder=Resharder(program.rank, plan, partition, compiled.layouts, travelling, compiled.orders),
        transport=transport,
        sum_statistics=None if replica_local else connections.sum_replicas,
        reducers=reducers,
        mesh=mesh,
        is_replica_local=replica_local,
        straggler=plan.slow.get(program.rank),
        batch_statistics=counts or None,
        per_sample=plan.per_sample,
    )


class StageBinder(NamedTuple):
    """What the stages of a worker have in common when their code is bound to its tensors.

    Attributes:
        partition: the graph and its cuts into stages.
        layouts: how the operators of every stage are sharded.
        coordinates: this worker's index on each axis of its mesh.
        arguments: what the placeholders of the stages' code stand for, by role.
        device: device of the worker's tensors.
        autocast: dtype of autocast, or None without it.
        dtypes: results of operators whose dtype autocast changes, by name.
        in_halves: whether backward passes are in two halves.
        dropped: what the forward passes of every stage drop, to recompute it.
    """

    partition: Partition
    layouts: StageLayouts
    coordinates: Mapping[str, int]
    arguments: dict[tuple[str, Any], Any]
    device: torch.device
    autocast: torch.dtype | None
    dtypes: Mapping[str, torch.dtype]
    in_halves: bool
    dropped: tuple[DroppedTensors, ...]

    def bind_stage(self, stage: int, hooks: StageHooks) -> StageRunner:
        """Return the runner of one stage, whose code gets the gates of ``hooks``."""
        partition, layout, local_code = self.partition, self.layouts[stage], None
        dropped = self.dropped[stage]
        # Code that is rewritten for sharded operators defers gradients of what it was rewritten to.
        code = extract_stage(partition, stage, self.device, hooks, self.in_halves and layout is None, dropped)
        if layout is not None:
            at, dtypes = self.coordinates, self.dtypes
            local_code = LocalStageCode(code, partition, layout, at, dtypes, hooks, self.in_halves, dropped)
        return StageRunner(
            code=code,
            tensors=self.arguments,
            differentiable_inputs=frozenset(
                c.value for c in partition.crossings if stage in c.consumers and c.requires_grad
            ),
            device=self.device,
            autocast=self.autocast,
            local_code=local_code,
            hooks=hooks,
        )


def _buckets_by_stage(
    program: Program, plan: Plan, codec: GradientCompressor | None
) -> dict[int, tuple[GradientBucket, ...]]:
    """Return for every stage of a worker the buckets whose gradients its last backward pass completes.

    Several workers reduce a tied weight; they do so behind all buckets of their own, as in the programs' order, so that
    none waits for another in two groups. A compressor counts its steps: it gets all buckets at once.
    """
    last = {action.stage: index for index, action in enumerate(program.actions) if action.kind in WEIGHT_PASSES}
    ending = max(program.stages, key=lambda stage: last.get(stage, -1))
    used = {stage: set(program.partition.parameters(stage)) for stage in program.stages}
    found: dict[int, list[GradientBucket]] = {stage: [] for stage in program.stages}
    for bucket in program.buckets:
        alone = len({plan.stage_and_replica(rank)[0] for rank in bucket.ranks}) == 1
        using = [stage for stage in program.stages if not used[stage].isdisjoint(bucket.parameters)]
        if codec is not None or not alone or not using:
            found[ending].append(bucket)
        else:
            found[max(using, key=lambda stage: last.get(stage, -1))].append(bucket)
    return {stage: tuple(buckets) for stage, buckets in found.items()}


def _find_dropped(program: Program, compiled: CompiledGraph, holding: LocalModel) -> tuple[DroppedTensors, ...]:
    """Return what every stage drops, to recompute it in the backward passes of the program, if it has any."""
    prepared, trains = holding.prepared, any(action.kind in WEIGHT_PASSES for action in program.actions)
    return find_dropped_tensors(program.partition, prepared.plan, compiled.layouts, prepared.in_float64, trains)


def _used_names(program: Program) -> set[str]:
    """Return names of the parameters and buffers that the worker's stages read or write."""
    partition = program.partition
    return {name for s in program.stages for name in (*partition.parameters(s), *partition.buffers(s))}


def _optional_parameters(graph: Graph) -> set[str]:
    """Return names of the parameters that the user's own Python reads, and so may leave without a gradient."""
    return {name for node in graph.nodes if node.op in OWN_PYTHON for name in node.parameters}


def _autocast_of(plan: Plan, graph: Graph, device: torch.device) -> tuple[torch.dtype | None, dict[str, torch.dtype]]:
    """Return the dtype of autocast, None without it; and the results whose dtype it changes, by name."""
    if plan.precision != "bfloat16":
        return None, {}
    return torch.bfloat16, dtypes_under_autocast(graph, device.type, torch.bfloat16)


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
        trainable = graph.parameters[name].trainable
        table["parameter", name] = parameters[name] if trainable else shards.constant_view(name, parameters[name])
    for name in {*counts.buffers, *(name for stage in stages for name in partition.buffers(stage))}:
        table["buffer", name] = buffers[name]
    return table | {("axis", name): axis for name, axis in mesh.axes.items()}
