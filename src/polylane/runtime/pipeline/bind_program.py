"""Binding: lowers one objective's graph and binds its program to the tensors of one worker, ready to run steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.reshard import Resharder
from polylane.compile.value_spec import value_specs
from polylane.graph.autocast_dtypes import dtypes_under_autocast
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.program.check import check
from polylane.program.lower import lower, lower_evaluation, without_replica_sync
from polylane.program.program import Program
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.pipeline.stage_runner import (
    OWN_PYTHON,
    LocalStageCode,
    StageHooks,
    StageRunner,
    extract_stage,
    no_gates,
)
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.zero.flat_shards import Shards
from polylane.runtime.sync.zero.stage_hooks import build_sharded_program
from polylane.runtime.tensor_parallel import WorkerMesh
from polylane.runtime.transport.protocol import Transport
from polylane.samples.batch_statistics import BatchStatistics
from polylane.sharding.stage_layouts import StageLayouts


def lower_programs(
    partition: Partition,
    plan: Plan,
    holders: Mapping[str, Collection[int]],
    training: bool,
    layouts: StageLayouts,
    alone: bool = False,
) -> tuple[Program, ...]:
    """Lower a graph to every worker's program for training or evaluation, and check them for deadlocks.

    Args:
        partition: the graph and its cuts into stages.
        plan: the plan, for meshes and schedule.
        holders: by parameter, the stages that keep it up to date.
        training: forward and backward, or forward only.
        layouts: how the operators of every stage are sharded.
        alone: whether replicas do not sum gradients with each other.
    """
    programs = (
        lower(partition, plan, holders, layouts.partial_gradient_axes)
        if training
        else lower_evaluation(partition, plan)
    )
    if alone or (training and plan.sync.has_servers):  # parameter servers sum the replicas' gradients
        programs = tuple(without_replica_sync(program, plan) for program in programs)
    check(programs)
    return programs


def lower_ahead(
    prepared: CompiledTraining, holders: Mapping[str, Collection[int]], replica_local: bool = False
) -> dict[str, tuple[Program, ...]]:
    """Lower each objective's graph that was compiled ahead to every worker's program for training.

    Args:
        prepared: the compiled training that is to be run.
        holders: by parameter, the stages that keep it up to date.
        replica_local: whether replicas do not sum gradients with each other.
    """
    return {
        name: lower_programs(graph.partition, prepared.plan, holders, True, graph.layouts, replica_local)
        for name, graph in prepared.graphs.items()
    }


def bind_program(
    program: Program,
    plan: Plan,
    tensors: ModelTensors,
    transport: Transport,
    statistics: Callable[[Tensor], Tensor] | None,
    mesh: WorkerMesh,
    compiled: CompiledGraph,
    shards: Shards,
    alone: bool = False,
    codec: GradientCompressor | None = None,
) -> Executor:
    """Bind one worker's program to its tensors.

    Args:
        program: this worker's program of the graph.
        plan: the plan that the graph was compiled for.
        tensors: parameters and buffers of the user's model, by name.
        transport: main transport of this worker.
        statistics: sums batch statistics over replicas; None where each has its own.
        mesh: axes along which this worker's operators are sharded.
        compiled: the compiled graph of the program.
        shards: parameters, gradients and states that are sharded over replicas (ZeRO), if any.
        alone: whether the replica takes steps of its own, without the others' statistics.
        codec: gradient compressor of the objective; its error feedback is shared by all bound programs. Default:
            gradients are summed uncompressed.
    """
    partition, graph = program.partition, program.partition.graph
    parameters, counts = tensors.parameters(), batch_statistics_of(partition, program.stage)
    table = _bind_tensors(program, tensors, mesh, shards, counts)
    autocast = torch.bfloat16 if plan.precision == "bfloat16" else None
    dtypes = dtypes_under_autocast(graph, tensors.device.type, autocast) if autocast is not None else {}
    # The user's own Python may leave a parameter without a gradient.
    optional = {name for node in graph.nodes if node.op in OWN_PYTHON for name in node.parameters}
    held = {name: parameters[name] for bucket in program.buckets for name in bucket.parameters}
    cut = (
        build_sharded_program(program, plan, shards, held, optional, transport, mesh.waits)
        if shards.flat_buffers
        else None
    )
    gates = no_gates if cut is None else cut.gates
    code, layout = extract_stage(partition, program.stage, tensors.device, gates), compiled.layouts[program.stage]
    runner = StageRunner(
        code=code,
        tensors=table,
        differentiable_inputs=frozenset(c.value for c in program.receives if c.requires_grad),
        device=tensors.device,
        autocast=autocast,
        local_code=None if layout is None else LocalStageCode(code, partition, layout, mesh.coordinates, dtypes, gates),
        hooks=StageHooks() if cut is None else cut,
    )
    reducer = cut.reducer if cut else AllReducer(program.buckets, held, optional, transport, codec, program.replicas)
    travelling = value_specs(partition, dtypes, layout, mesh.coordinates)
    sizes = {name: wire.sizes for name, wire in travelling.items()}
    relays = Resharder(program.rank, plan, partition, compiled.layouts, sizes, compiled.orders)
    shared, slow = None if alone else statistics, plan.slow.get(program.rank)
    return Executor(
        program, runner, travelling, relays, transport, shared, reducer, mesh, alone, slow, counts, plan.per_sample
    )


def _bind_tensors(
    program: Program, tensors: ModelTensors, mesh: WorkerMesh, shards: Shards, counts: BatchStatistics
) -> dict[tuple[str, Any], Any]:
    """What the placeholders of a stage's code stand for, by (role, name), all on this worker's device."""
    partition, graph = program.partition, program.partition.graph
    parameters, buffers = tensors.parameters(), tensors.buffers()
    table: dict[tuple[str, Any], Any] = {
        ("constant", name): t.to(tensors.device) for name, t in graph.code.constants.items()
    }
    for name in partition.parameters(program.stage):
        # What this objective does not optimize takes part as a constant: no gradient is computed for it.
        trainable = graph.parameters[name].trainable
        table["parameter", name] = parameters[name] if trainable else shards.constant_view(name, parameters[name])
    for name in {*partition.buffers(program.stage), *counts.buffers}:
        table["buffer", name] = buffers[name]
    return table | {("axis", name): axis for name, axis in mesh.axes.items()}


def batch_statistics_of(partition: Partition, stage: int) -> BatchStatistics:
    """Return the statistics of the whole batch that a stage's operators need."""
    return BatchStatistics(partition.graph.code.fx, {node.name for node in partition.nodes(stage)})
