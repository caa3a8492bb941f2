"""Parameter-server host: the servers in one process, and its channels to all servers; opened collectively."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import named_parameters
from polylane.errors import PeerLost
from polylane.program.server_assignment import assign_parameters, server_rank
from polylane.runtime.plain_data.serialization import decode, encode
from polylane.runtime.progress_page import UNWATCHED, Progress
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.sync.gradient_sync import CollectiveCall, LocalOptimizer
from polylane.runtime.sync.parameter_server.messages import Channel, RemoteChannel, open_local_channel
from polylane.runtime.sync.parameter_server.packing import ServerShard, plan_server_shards
from polylane.runtime.sync.parameter_server.server import ParameterServer, ServedWorker
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate
from polylane.runtime.sync.parameter_server.weights import build_weights
from polylane.runtime.transport import c10d, clock
from polylane.runtime.transport.protocol import PendingTransfer, Transport, TransportCounters
from polylane.runtime.workers.failure import is_peer_loss
from polylane.runtime.workers.world import World

# A server may be idle for hours, and a replica may wait long for a slow one. A dead peer closes its connection, which
# is noticed at once.
PATIENCE = timedelta(days=1)

TO_SERVER, FROM_SERVER = "waiting for gradients", "waiting for new weights"
BETWEEN = "summing over parameter servers"


@dataclass
class ServerHost:
    """The parameter servers and channels of one process.

    Attributes:
        world: all processes of the training over gloo, dedicated servers among them.
        transport: connects all processes, for collective calls; its channels lead from rank 0 to dedicated servers.
        dedicated: ranks of the processes that only serve parameters.
        clock_offset: seconds that this process's clock is ahead of rank 0's.
        servers: the servers in this process, by ascending number.
        channels: by the server's number, what this worker exchanges with it, and this worker's end of the channel.
        transports: transports that carry the channels of this process.
        results: pending sends of results to the dedicated servers.
        progress: the page of this process, where the watch over a script says who was ended for a hang.
    """

    world: World
    transport: Transport
    dedicated: range
    clock_offset: float
    servers: list[ParameterServer] = field(default_factory=list)
    channels: dict[int, tuple[ServerShard, Channel]] = field(default_factory=dict)
    transports: list[Transport] = field(default_factory=list)
    results: list[PendingTransfer] = field(default_factory=list)
    progress: Progress = UNWATCHED

    @property
    def counters(self) -> tuple[TransportCounters, ...]:
        """Counters of the traffic between workers and servers, and between servers."""
        return tuple(transport.counters for transport in self.transports)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context manager: re-raise PeerLost as the error of a server in this process, if that is not a PeerLost too.

        The other workers have then left because this process failed, not the other way round. Where one was ended for a
        hang, and only the user's script can handle it, that is raised.
        """
        try:
            yield
        except PeerLost as lost:
            for server in self.servers:
                if server.error is not None and not is_peer_loss(server.error):
                    raise server.error from None
            if (explained := self.progress.explain(lost)) is lost:
                raise
            raise explained from lost

    def broadcast_result(self, call: CollectiveCall, value: Any) -> None:
        """On rank 0: send every dedicated server which method the training workers are in, and its result.

        Args:
            call: the collective method, the same on all training workers.
            value: the call's result, a plain value; None where a server only needs to know that the call is over.
        """
        # Sends are waited for at the next call: rank 0 goes on while a dedicated server is still busy.
        for pending in self.results:
            pending.wait()
        content = torch.frombuffer(bytearray(encode((call, value))), dtype=torch.uint8)
        length = torch.tensor([content.numel()])
        self.results = [self.transport.send(tensor, rank) for rank in self.dedicated for tensor in (length, content)]

    def receive_result(self) -> tuple[CollectiveCall, Any]:
        """On a dedicated server: wait for the next collective call of the training workers, and its result.

        Raises:
            PeerLost: rank 0 has closed its connection.
        """
        length = int(self.transport.receive((1,), torch.int64, 0).wait())
        content = self.transport.receive((length,), torch.uint8, 0).wait()
        call, value = decode(content.numpy().tobytes())
        return call, value

    def stepping_optimizers(self) -> list[LocalOptimizer]:
        """Return the first objective's optimizers of the servers in this process."""
        courses = [next(iter(server.weights.objectives.values())) for server in self.servers]
        return [
            LocalOptimizer(
                objective_state.optimizer, objective_state.parameters, partial(getattr, objective_state, "updates")
            )
            for objective_state in courses
        ]

    def gather_updates(self) -> tuple[tuple[ServerUpdate, ...], ...]:
        """Return the update log of every server, by its number; a collective of all processes."""
        local_logs = {server.number: list(server.log) for server in self.servers}
        logs: dict[int, list[ServerUpdate]] = {}
        for host_logs in self.transport.all_gather_object(local_logs):
            logs |= host_logs
        return tuple(tuple(logs[number]) for number in sorted(logs))

    def collect_state(self) -> WorkerState:
        """Return the weights and optimizers of this process's servers, for a checkpoint."""
        state = WorkerState()
        for server in self.servers:
            state.extend(server.collect_state())
        return state

    def restore_state(self, saved: SavedState) -> None:
        """Make the state of this process's servers that of a checkpoint."""
        for server in self.servers:
            server.restore_state(saved)

    def close(self) -> None:
        """Wait until all workers have ended, then close all channels; a collective of all processes."""
        for server in self.servers:
            server.join()
            if server.error is not None:
                raise server.error
        self.transport.barrier()
        for transport in (*self.transports, self.transport):
            transport.close()
        if self.world.group is not None:
            dist.destroy_process_group(self.world.group)


def open_server_host(world: World, prepared: CompiledTraining, clip_norm: float | None) -> ServerHost:
    """Open the channels between workers and servers, and start the servers of this process.

    A collective of all processes.

    Args:
        world: all processes of the training, dedicated servers last.
        prepared: the compiled training, equal on every worker.
        clip_norm: upper bound on the 2-norm of summed gradients, or None.
    """
    plan = prepared.plan
    # Channels carry CPU tensors over gloo, whatever device computes: a group of its own, with the longer timeout.
    device = torch.device("cpu")
    world.connect()
    world.agree_on_group_numbers()
    group = dist.new_group(backend="gloo", timeout=PATIENCE) if world.size > 1 else None
    world.authenticate_group(group)
    cpu_world = World(world.rank, world.size, world.local_rank, device, "gloo" if world.size > 1 else None, group=group)
    dedicated = range(plan.workers, world.size)
    transport = c10d.C10dTransport(cpu_world, [(0, rank) for rank in dedicated])
    host = ServerHost(cpu_world, transport, dedicated, clock.measure_clock_offset(transport) if world.size > 1 else 0.0)
    host.progress = world.progress
    model = dict(named_parameters(prepared.model, prepared.losses))
    fellows = _open_server_channels(cpu_world, [server_rank(plan, q) for q in range(plan.sync.server_count)], host)
    # Every process goes through all servers in the same order: opening a transport is a collective.
    for number, share in enumerate(assign_parameters(prepared.partitions, plan)):
        shards, at = plan_server_shards(prepared, share, model), server_rank(plan, number)
        # Transports over one gloo group differ by their tags: 0 for collective calls, 2 + number for a server's
        # channels, tags from 2 + servers on between servers.
        pairs = [(server_shard.rank, at, server_shard.max_flags) for server_shard in shards]
        opened = _open_channels(cpu_world, pairs, (FROM_SERVER, TO_SERVER), 2 + number, host)
        ends = {server_shard.rank: pair for server_shard, pair in zip(shards, opened, strict=True)}
        for server_shard in shards:
            if server_shard.rank == world.rank:
                host.channels[number] = server_shard, ends[server_shard.rank][0]
        if at == world.rank:
            clients = {
                server_shard.rank: ServedWorker(server_shard, ends[server_shard.rank][1]) for server_shard in shards
            }
            # Asynchronous updates are of single replicas, whose workers clip their gradients themselves.
            begin = partial(build_weights, prepared, clip_norm if plan.sync.staleness == 0 else None, world.device)
            names, server_channels = list(prepared.objectives), fellows.get(number, ())
            host.servers.append(
                ParameterServer(number, at, clients, names, plan.sync.staleness, begin, world.device, server_channels)
            )
    for server in host.servers:
        server.start()
    return host


def _open_channels(
    world: World, pairs: Sequence[tuple[int, int, int]], waits: tuple[str, str], tag: int, host: ServerHost
) -> list[tuple[Channel, Channel]]:
    """Open a channel for each pair of ranks, over one transport; return (first rank's end, second rank's end) of each.

    Each process uses only its own ends.

    Args:
        world: all processes of the training.
        pairs: (first rank, second rank, flags in a message) of each channel; both ranks may be equal.
        waits: what the first and the second end wait for, in words, for errors.
        tag: tag of the transport that carries the channels, which is added to the host's.
        host: the parameter-server host of this process.
    """
    remote = [(rank, peer) for rank, peer, _ in pairs if rank != peer]
    remote += [(peer, rank) for rank, peer in remote]
    transport, lock = c10d.C10dTransport(world, remote, tag=tag), threading.Lock()
    host.transports.append(transport)
    channels = list[tuple[Channel, Channel]]()
    for first_rank, second, flags in pairs:
        if first_rank == second:
            channels.append(open_local_channel(first_rank, *waits))
        else:
            channel = RemoteChannel(transport, lock, second, flags, waits[0])
            channels.append((channel, RemoteChannel(transport, lock, first_rank, flags, waits[1])))
    return channels


def _open_server_channels(world: World, hosts: Sequence[int], host: ServerHost) -> dict[int, list[Channel]]:
    """Open the star of channels between server 0 and all others; return the ends of each server by its number.

    Args:
        world: all processes of the training.
        hosts: rank of the process of each server, by the server's number.
        host: the parameter-server host of this process.
    """
    channels: dict[int, list[Channel]] = {}
    for number in range(1, len(hosts)):
        pair = (hosts[0], hosts[number], 0)
        ((first_end, other_end),) = _open_channels(world, [pair], (BETWEEN, BETWEEN), 1 + len(hosts) + number, host)
        channels.setdefault(0, []).append(first_end)
        channels[number] = [other_end]
    return channels
