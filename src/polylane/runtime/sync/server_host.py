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

from polylane.errors import PeerLost
from polylane.program.lower import differentiated
from polylane.runtime import clock
from polylane.runtime.failure import is_peer_loss
from polylane.runtime.optimizer import Clipper
from polylane.runtime.prepare import Prepared, named_parameters
from polylane.runtime.sync.rule import CollectiveCall, Stepping
from polylane.runtime.sync.server import Client, Server
from polylane.runtime.sync.server_line import Line, Wire, inside
from polylane.runtime.sync.server_log import Update
from polylane.runtime.sync.server_share import Trade, trades
from polylane.runtime.sync.server_split import host_of, shared_out
from polylane.runtime.sync.server_weights import Weights
from polylane.runtime.transport import c10d
from polylane.runtime.transport.protocol import Counters, Pending, Transport
from polylane.runtime.world import World
from polylane.values import decode, encode

# A server may have nothing to do for long, and a replica wait long for a slow one. One that dies is noticed at once.
PATIENCE = timedelta(days=1)

TO_SERVER, FROM_SERVER = "waiting for gradients", "waiting for new weights"
BETWEEN = "summing over parameter servers"


@dataclass
class Host:
    """What one process has of the parameter servers.

    Attributes:
        world: of all processes of the training, those that only serve among them, over gloo.
        transport: between all of them, for collective calls; its channels lead from rank 0 to the dedicated servers.
        dedicated: ranks of the processes that only serve parameters.
        ahead: seconds that this process's clock is ahead of rank 0's.
        servers: those that live in this process, by ascending number.
        lines: from this worker to every server that holds something of its, by number, with what they give each other.
        transports: those that carry the lines of this process.
        results: sends of results to the dedicated servers that may still be under way.
    """

    world: World
    transport: Transport
    dedicated: range
    ahead: float
    servers: list[Server] = field(default_factory=list)
    lines: dict[int, tuple[Trade, Line]] = field(default_factory=dict)
    transports: list[Transport] = field(default_factory=list)
    results: list[Pending] = field(default_factory=list)

    @property
    def counters(self) -> tuple[Counters, ...]:
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

    def stepping(self) -> list[Stepping]:
        """The optimizers of the servers that live here, of the first objective."""
        courses = [next(iter(server.weights.courses.values())) for server in self.servers]
        return [Stepping(course.optimizer, course.held, partial(getattr, course, "updates")) for course in courses]

    def updates(self) -> tuple[tuple[Update, ...], ...]:
        """What every server did, by number; all processes must ask for it."""
        own = {server.number: list(server.log) for server in self.servers}
        every: dict[int, list[Update]] = {}
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


def opened(world: World, prepared: Prepared, holders: Mapping[str, Collection[int]], clip_norm: float | None) -> Host:
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
    world.introduce(group)
    every = World(world.rank, world.size, world.local_rank, device, "gloo" if world.size > 1 else None, group=group)
    dedicated = range(plan.workers, world.size)
    transport = c10d.Transport(every, [(0, rank) for rank in dedicated])
    host = Host(every, transport, dedicated, clock.ahead_of_rank_0(transport) if world.size > 1 else 0.0)
    model = dict(named_parameters(prepared.model, [o.loss for o in prepared.objectives.values()]))
    fellows = _between(every, plan.sync.server_count, [host_of(plan, q) for q in range(plan.sync.server_count)], host)
    for number, share in enumerate(shared_out(prepared.partitions, plan)):
        own, at = trades(prepared, share, holders, model), host_of(plan, number)
        ends = _ends(every, own, at, number, host)
        for trade in own:
            if trade.rank == world.rank:
                host.lines[number] = trade, ends[trade.rank][0]
        if at == world.rank:
            clients = {trade.rank: Client(trade, ends[trade.rank][1]) for trade in own}
            begin = partial(_begun, prepared, clip_norm if plan.sync.staleness == 0 else None, world.device)
            names, mine = list(prepared.objectives), fellows.get(number, ())
            host.servers.append(Server(number, at, clients, names, plan.sync.staleness, begin, world.device, mine))
    for server in host.servers:
        server.start()
    return host


def _ends(world: World, trades: Sequence[Trade], at: int, number: int, host: Host) -> dict[int, tuple[Line, Line]]:
    """Of every worker's line to a server the worker's end and the server's; what is not in this process is unused."""
    others = [trade.rank for trade in trades if trade.rank != at]
    channels = [channel for rank in others for channel in ((rank, at), (at, rank))]
    transport, lock = c10d.Transport(world, channels, tag=2 + number), threading.Lock()
    host.transports.append(transport)
    found: dict[int, tuple[Line, Line]] = {}
    for trade in trades:
        if trade.rank == at:
            found[at] = inside(at, FROM_SERVER, TO_SERVER)
        else:
            there = Wire(transport, lock, at, trade.flags, FROM_SERVER)
            found[trade.rank] = there, Wire(transport, lock, trade.rank, trade.flags, TO_SERVER)
    return found


def _between(world: World, servers: int, hosts: Sequence[int], host: Host) -> dict[int, list[Line]]:
    """Server 0's ends of the lines to all others, and theirs, as far as they are in this process."""
    found: dict[int, list[Line]] = {}
    for other in range(1, servers):
        ends: tuple[Line, Line]
        if hosts[0] == hosts[other]:
            ends = inside(hosts[0], BETWEEN, BETWEEN)
        else:
            channels = [(hosts[0], hosts[other]), (hosts[other], hosts[0])]
            transport, lock = c10d.Transport(world, channels, tag=1 + servers + other), threading.Lock()
            host.transports.append(transport)
            ends = Wire(transport, lock, hosts[other], 0, BETWEEN), Wire(transport, lock, hosts[0], 0, BETWEEN)
        found.setdefault(0, []).append(ends[0])
        found[other] = [ends[1]]
    return found


def _begun(
    prepared: Prepared, clip_norm: float | None, device: torch.device, server: Server, values: Mapping[str, Tensor]
) -> Weights:
    """A server's weights and optimizers, out of its part of the first weights."""
    model = dict(named_parameters(prepared.model, [o.loss for o in prepared.objectives.values()]))
    trained = {name: differentiated(each.graph) for name, each in prepared.partitions.items()}
    shapes: dict[str, Any] = {}
    for partition in prepared.partitions.values():
        shapes |= {name: info.shape for name, info in partition.graph.parameters.items()}
    weights = Weights.begun(values, model, shapes, prepared.objectives, trained, device)
    if clip_norm is not None:
        for name, course in weights.courses.items():
            order = [n for n in model if n in trained[name]]
            course.clipper = Clipper(clip_norm, order, list(course.held), course.held, device, server.sum)
    return weights
