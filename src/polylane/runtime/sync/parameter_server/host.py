"""Parameter servers of one process, and its channels to all servers; all processes open them together."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import named_parameters
from polylane.compile.server_assignment import assign_parameters, server_rank
from polylane.errors import PeerLost
from polylane.program.lower import differentiable_parameters
from polylane.runtime.parameters.clipping import GradientClipper
from polylane.runtime.sync.gradient_sync import CollectiveCall, LocalOptimizer
from polylane.runtime.sync.parameter_server.messages import Channel, RemoteChannel, open_local_channel
from polylane.runtime.sync.parameter_server.packing import ServerShard, plan_server_shards
from polylane.runtime.sync.parameter_server.server import ParameterServer, ServedWorker
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate
from polylane.runtime.sync.parameter_server.weights import ServerWeights
from polylane.runtime.transport import c10d, clock
from polylane.runtime.transport.protocol import PendingTransfer, Transport, TransportCounters
from polylane.runtime.transport.serialization import decode, encode
from polylane.runtime.workers.failure import is_peer_loss
from polylane.runtime.workers.world import World

# A server may have nothing to do for long, and a replica wait long for a slow one. One that dies is noticed at once.
PATIENCE = timedelta(days=1)

TO_SERVER, FROM_SERVER = "waiting for gradients", "waiting for new weights"
BETWEEN = "summing over parameter servers"


@dataclass
class ServerHost:
    """What one process has of the parameter servers.

    Attributes:
        world: of all processes of the training, those that only serve among them, over gloo.
        transport: between all of them, for collective calls; its channels lead from rank 0 to the dedicated servers.
        dedicated: ranks of the processes that only serve parameters.
        clock_offset: seconds that this process's clock is ahead of rank 0's.
        servers: those that live in this process, by ascending number.
        channels: from this worker to every server that holds something of its, by number, with what they give each
            other.
        transports: those that carry the lines of this process.
        results: sends of results to the dedicated servers that may still be under way.
    """

    world: World
    transport: Transport
    dedicated: range
    clock_offset: float
    servers: list[ParameterServer] = field(default_factory=list)
    channels: dict[int, tuple[ServerShard, Channel]] = field(default_factory=dict)
    transports: list[Transport] = field(default_factory=list)
    results: list[PendingTransfer] = field(default_factory=list)

    @property
    def counters(self) -> tuple[TransportCounters, ...]:
        """Of what went between workers and servers, and between servers."""
        return tuple(transport.counters for transport in self.transports)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context manager: re-raise PeerLost as the error that ended a server here, where that was its own fault.

        The other workers have then left because of this process, and not the other way round.
        """
        try:
            yield
        except PeerLost:
            for server in self.servers:
                if server.error is not None and not is_peer_loss(server.error):
                    raise server.error from None
            raise

    def broadcast_result(self, call: CollectiveCall, value: Any) -> None:
        """On rank 0: send every dedicated server which method the training workers are in, and its result.

        Args:
            call: the method, the same on all training workers.
            value: a plain value; None where a server needs to know only that the call is over.
        """
        for pending in self.results:
            pending.wait()
        content = torch.frombuffer(bytearray(encode((call, value))), dtype=torch.uint8)
        length = torch.tensor([content.numel()])
        self.results = [self.transport.send(each, rank) for rank in self.dedicated for each in (length, content)]

    def receive_result(self) -> tuple[CollectiveCall, Any]:
        """On a dedicated server: wait for the next collective call of the training workers, and its result.

        Raises:
            PeerLost: rank 0 is gone.
        """
        length = int(self.transport.receive((1,), torch.int64, 0).wait())
        content = self.transport.receive((length,), torch.uint8, 0).wait()
        call, value = decode(content.numpy().tobytes())
        return call, value

    def stepping_optimizers(self) -> list[LocalOptimizer]:
        """The optimizers of the servers that live here, of the first objective."""
        courses = [next(iter(server.weights.objectives.values())) for server in self.servers]
        return [
            LocalOptimizer(course.optimizer, course.parameters, partial(getattr, course, "updates"))
            for course in courses
        ]

    def gather_updates(self) -> tuple[tuple[ServerUpdate, ...], ...]:
        """What every server did, by number; all processes must ask for it."""
        own = {server.number: list(server.log) for server in self.servers}
        every: dict[int, list[ServerUpdate]] = {}
        for others in self.transport.all_gather_object(own):
            every |= others
        return tuple(tuple(every[number]) for number in sorted(every))

    def close(self) -> None:
        """Wait until all workers have ended, and leave together."""
        for server in self.servers:
            server.join()
            if server.error is not None:
                raise server.error
        self.transport.barrier()
        for transport in (*self.transports, self.transport):
            transport.close()
        if self.world.group is not None:
            dist.destroy_process_group(self.world.group)


def open_server_host(
    world: World, prepared: CompiledTraining, holders: Mapping[str, Collection[int]], clip_norm: float | None
) -> ServerHost:
    """Open the lines between workers and servers, and start the servers of this process; all processes must call it.

    Args:
        world: of all processes of the training, dedicated servers last.
        prepared: the training, equal on every worker.
        holders: stages that hold each parameter, by its canonical name.
        clip_norm: bound on the norm of sums of gradients, or None.
    """
    plan = prepared.plan
    # Lines carry CPU tensors over gloo, whatever device computes: a group of their own, with another time limit.
    device = torch.device("cpu")
    world.connect()
    group = dist.new_group(backend="gloo", timeout=PATIENCE) if world.size > 1 else None
    world.authenticate_group(group)
    every = World(world.rank, world.size, world.local_rank, device, "gloo" if world.size > 1 else None, group=group)
    dedicated = range(plan.workers, world.size)
    transport = c10d.C10dTransport(every, [(0, rank) for rank in dedicated])
    host = ServerHost(every, transport, dedicated, clock.measure_clock_offset(transport) if world.size > 1 else 0.0)
    model = dict(named_parameters(prepared.model, [o.loss for o in prepared.objectives.values()]))
    fellows = _open_server_channels(
        every, plan.sync.server_count, [server_rank(plan, q) for q in range(plan.sync.server_count)], host
    )
    for number, share in enumerate(assign_parameters(prepared.partitions, plan)):
        own, at = plan_server_shards(prepared, share, holders, model), server_rank(plan, number)
        ends = _open_channels(every, own, at, number, host)
        for trade in own:
            if trade.rank == world.rank:
                host.channels[number] = trade, ends[trade.rank][0]
        if at == world.rank:
            clients = {trade.rank: ServedWorker(trade, ends[trade.rank][1]) for trade in own}
            begin = partial(_build_weights, prepared, clip_norm if plan.sync.staleness == 0 else None, world.device)
            names, mine = list(prepared.objectives), fellows.get(number, ())
            host.servers.append(
                ParameterServer(number, at, clients, names, plan.sync.staleness, begin, world.device, mine)
            )
    for server in host.servers:
        server.start()
    return host


def _open_channels(
    world: World, trades: Sequence[ServerShard], at: int, number: int, host: ServerHost
) -> dict[int, tuple[Channel, Channel]]:
    """Of every worker's line to a server the worker's end and the server's; what is not in this process is unused."""
    others = [trade.rank for trade in trades if trade.rank != at]
    channels = [channel for rank in others for channel in ((rank, at), (at, rank))]
    transport, lock = c10d.C10dTransport(world, channels, tag=2 + number), threading.Lock()
    host.transports.append(transport)
    found: dict[int, tuple[Channel, Channel]] = {}
    for trade in trades:
        if trade.rank == at:
            found[at] = open_local_channel(at, FROM_SERVER, TO_SERVER)
        else:
            there = RemoteChannel(transport, lock, at, trade.max_flags, FROM_SERVER)
            found[trade.rank] = there, RemoteChannel(transport, lock, trade.rank, trade.max_flags, TO_SERVER)
    return found


def _open_server_channels(
    world: World, servers: int, hosts: Sequence[int], host: ServerHost
) -> dict[int, list[Channel]]:
    """Server 0's ends of the lines to all others, and theirs, as far as they are in this process."""
    found: dict[int, list[Channel]] = {}
    for other in range(1, servers):
        ends: tuple[Channel, Channel]
        if hosts[0] == hosts[other]:
            ends = open_local_channel(hosts[0], BETWEEN, BETWEEN)
        else:
            channels = [(hosts[0], hosts[other]), (hosts[other], hosts[0])]
            transport, lock = c10d.C10dTransport(world, channels, tag=1 + servers + other), threading.Lock()
            host.transports.append(transport)
            ends = (
                RemoteChannel(transport, lock, hosts[other], 0, BETWEEN),
                RemoteChannel(transport, lock, hosts[0], 0, BETWEEN),
            )
        found.setdefault(0, []).append(ends[0])
        found[other] = [ends[1]]
    return found


def _build_weights(
    prepared: CompiledTraining,
    clip_norm: float | None,
    device: torch.device,
    server: ParameterServer,
    values: Mapping[str, Tensor],
) -> ServerWeights:
    """A server's weights and optimizers, out of its part of the first weights."""
    model = dict(named_parameters(prepared.model, [o.loss for o in prepared.objectives.values()]))
    trained = {name: differentiable_parameters(each.graph) for name, each in prepared.partitions.items()}
    shapes: dict[str, Any] = {}
    for partition in prepared.partitions.values():
        shapes |= {name: info.shape for name, info in partition.graph.parameters.items()}
    weights = ServerWeights.from_values(values, model, shapes, prepared.objectives, trained, device)
    if clip_norm is not None:
        for name, course in weights.objectives.items():
            order = [n for n in model if n in trained[name]]
            course.clipper = GradientClipper(
                clip_norm, order, list(course.parameters), course.parameters, device, server.sum_over_servers
            )
    return weights
