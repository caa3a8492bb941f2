"""Memory of a worker's whole steps: as predicted from its program, and as measured in real ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.cost.memory.allocation_meter import AllocationMeter
from polylane.cost.memory.held_messages import find_held_messages
from polylane.cost.memory.live_ranges import LiveRanges
from polylane.cost.memory.optimizer_state import probe_optimizer_state
from polylane.cost.memory.peak import MemoryBreakdown, TrainedBytes, peak_memory
from polylane.cost.memory.saved_by_operators import saved_on_rank, trace_saved_tensors
from polylane.cost.memory.saved_tensors import BackendSetting, SavedTensors
from polylane.graph.graph import Graph
from polylane.plan.plan import Plan
from polylane.program.lower import lower
from polylane.runtime.job import Job
from polylane.runtime.transport.protocol import PendingTransfer
from polylane.runtime.transport.shared_memory import transport as shared_memory
from polylane.runtime.workers.world import World
from polylane.schedule.action import PASSES


def parameter_bytes(graph: Graph, keeping: SavedTensors, pieces: list[tuple[int, int]]) -> tuple[int, int]:
    """Of the parameters that a stage reads on a rank, and of the trained ones among them."""
    names = {name for first, end in pieces for node in graph.nodes[first:end] for name in node.parameters}
    sizes = {name: keeping.storage_bytes.get((f"parameter:{name}", 0), graph.parameters[name].bytes) for name in names}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if graph.parameters[name].trainable)


def predicted(prepared: CompiledTraining, samples: int, optimizer: Any) -> list[MemoryBreakdown]:
    """Of every rank."""
    plan: Plan = prepared.plan
    (partition,) = prepared.partitions.values()
    graph, layouts = partition.graph, prepared.main.layouts
    state = probe_optimizer_state(graph, optimizer)
    programs, found = lower(partition, plan), []
    for rank in range(plan.workers):
        stage, _ = plan.stage_and_replica(rank)
        replicas = plan.degree("data", stage)
        setting = BackendSetting(samples // plan.microbatches // replicas, sync_batch_norm=replicas > 1)
        layout = layouts[stage]
        keeping = trace_saved_tensors(graph, setting)
        if layout is not None:
            keeping = saved_on_rank(graph, setting, *layout.at(setting.samples), aliases=layout.view.aliases)
        own, stages = LiveRanges(graph, keeping), programs[rank].stages
        pieces = {each: [(first, end) for first, end, owner in partition.pieces if owner == each] for each in stages}
        sizes = {each: parameter_bytes(graph, keeping, pieces[each]) for each in stages}
        parameters, trained = (sum(size[i] for size in sizes.values()) for i in range(2))
        names = [name for each in stages for name in partition.parameters(each)]
        states = sum(state.bytes(name, graph.parameters[name].shape) for name in names)
        share = trained / max(sum(graph.parameters[name].bytes for name in names), 1)
        constants = sum(t.nbytes for t in graph.code.constants.values())
        together = [b for b in programs[rank].buckets if len(b.ranks) > 1 and len(b.parameters) > 1]
        copied = sum(graph.parameters[name].bytes for bucket in together for name in bucket.parameters)
        load = TrainedBytes(parameters + constants, trained, states * share, bucket_copies=copied)
        lane = [action for action in programs[rank].actions if action.kind in PASSES]
        needs = {each: own.microbatch_memory(pieces[each]) for each in stages}
        messages = find_held_messages(programs[rank], needs)
        trained_of = {each: size[1] for each, size in sizes.items()}
        found.append(peak_memory(lane, needs, trained_of, load, messages=messages))
    return found


class Awaited:
    """A receive that holds the room of its tensor from when it is asked for.

    Over gloo that is so. Over shared memory the values lie elsewhere until they are taken, in the socket, in a message
    or in the sender's block, where no operator made them: on this host they are there just the same.
    """

    def __init__(self, receive: PendingTransfer, room: Tensor) -> None:
        self._receive, self._room = receive, room

    def wait(self) -> Tensor:
        self._room = torch.empty(0)
        return self._receive.wait()


def counted(receive: Callable[..., PendingTransfer]) -> Callable[..., Any]:
    def asked(self: Any, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Awaited:
        return Awaited(receive(self, shape, dtype, peer), torch.empty(tuple(shape), dtype=dtype))

    return asked


def alive(prepared: CompiledTraining, example: Any) -> int:
    """Bytes of tensors that were alive at most in two steps of a worker."""
    shared_memory.SharedMemoryTransport.receive = counted(shared_memory.SharedMemoryTransport.receive)  # type: ignore[method-assign]
    with Job(prepared, World.join(), example=example) as job:
        gc.collect()
        with AllocationMeter() as ledger:
            for tensor in (*job.worker.held().values(), *example):
                ledger.add(tensor)
            for _ in range(2):
                _ = job.step(example).loss
        return ledger.peak_bytes
