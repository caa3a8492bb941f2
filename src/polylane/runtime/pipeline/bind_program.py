"""Binding: lowers one objective's graph and binds its program to the tensors of one worker, ready to run steps."""

from __future__ import annotations

from typing import Any

import torch

from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.dropped_tensors import find_dropped_tensors
from polylane.compile.reshard import Resharder, value_specs
from polylane.graph.precision import dtypes_under_autocast
from polylane.graph.repeatable import NOTHING_DROPPED
from polylane.program.check import check
from polylane.program.lower import lower, lower_evaluation, without_replica_sync
from polylane.program.program import Program
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.pipeline.connections import Connections
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.pipeline.stage_runner import OWN_PYTHON, LocalStageCode, StageHooks, StageRunner, extract_stage
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.zero.flat_shards import Shards
from polylane.runtime.sync.zero.stage_hooks import build_sharded_program
from polylane.runtime.tensor_parallel import WorkerMesh
from polylane.samples.batch_statistics import BatchStatistics
from polylane.schedule.action import ActionKind


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
        codec: gradient compressor of the objective; its error feedback is shared by all bound programs. Default:
            gradients are summed uncompressed.
    """
    plan, tensors, shards = holding.prepared.plan, holding.tensors, holding.shards
    transport, mesh = connections.transport, connections.mesh
    partition, graph, stage = program.partition, program.partition.graph, program.stage
    counts = BatchStatistics(graph.code.fx, {node.name for node in partition.nodes(stage)})
    tensors.move_to_device({*partition.parameters(stage), *partition.buffers(stage), *counts.buffers})
    parameters = tensors.parameters()
    autocast = torch.bfloat16 if plan.precision == "bfloat16" else None
    dtypes = dtypes_under_autocast(graph, tensors.device.type, autocast) if autocast is not None else {}
    # The user's own Python may leave a parameter without a gradient.
    optional = {name for node in graph.nodes if node.op in OWN_PYTHON for name in node.parameters}
    held = {name: parameters[name] for bucket in program.buckets for name in bucket.parameters}
    cut = None
    if shards.flat_buffers:
        cut = build_sharded_program(program, plan, shards, held, optional, transport, mesh.waits)
    hooks = StageHooks() if cut is None else cut
    trains = any(action.kind is ActionKind.BACKWARD for action in program.actions)
    dropped = find_dropped_tensors(partition, plan)[stage] if trains else NOTHING_DROPPED
    code, layout = extract_stage(partition, stage, tensors.device, hooks, dropped), compiled.layouts[stage]
    local = LocalStageCode(code, partition, layout, mesh.coordinates, dtypes, hooks, dropped) if layout else None
    runner = StageRunner(
        code=code,
        tensors=_bind_tensors(program, tensors, mesh, shards, counts),
        differentiable_inputs=frozenset(c.value for c in program.receives if c.requires_grad),
        device=tensors.device,
        autocast=autocast,
        local_code=local,
        hooks=hooks,
    )
    travelling = value_specs(partition, dtypes, layout, mesh.coordinates)
    return Executor(
        program=program,
        runner=runner,
        resharder=Resharder(program.rank, plan, partition, compiled.layouts, travelling, compiled.orders),
        transport=transport,
        sum_statistics=None if replica_local else connections.sum_replicas,
        reducer=cut.reducer if cut else AllReducer(program.buckets, held, optional, transport, codec, program.replicas),
        mesh=mesh,
        is_replica_local=replica_local,
        straggler=plan.slow.get(program.rank),
        batch_statistics=counts or None,
        per_sample=plan.per_sample,
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
