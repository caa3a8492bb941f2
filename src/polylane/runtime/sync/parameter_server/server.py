"""Parameter server: holds a part of the weights and steps the optimizer on pushed gradients (Li et al., OSDI 2014).

    staleness    one update for             a replica waits if                          algorithm
    0            the sum of all replicas    any other has not sent its gradients yet    synchronous
    "any"        each replica's gradients   never                                       Downpour SGD
    s > 0        each replica's gradients   it is more than s steps ahead of the        stale synchronous parallel
                                            slowest replica

Downpour SGD: Dean et al., NeurIPS 2012. Stale synchronous parallel: Ho et al., NeurIPS 2013.

Over p replicas of |A| parameters of b bytes a step moves 2 |A| p b bytes, whatever the number of servers: every replica
sends its gradients and receives the weights. If servers share processes with workers, a worker and its local server
exchange their part without sending it: 2 |A| (p - 1) b are left, as many as a ring all-reduce sends.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.observe.timeline import Span
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.sync.flat_packing import FlatPacking
from polylane.runtime.sync.parameter_server.messages import CPU, Channel, MessageHead, MessageKind, Sizes
from polylane.runtime.sync.parameter_server.packing import ServerShard
from polylane.runtime.sync.parameter_server.update_log import ALL, ServerUpdate, UpdateLog
from polylane.runtime.sync.parameter_server.weights import ServerWeights, load_options
from polylane.schedule import action

# Number of latest updates of which begin and end are kept, for the timeline.
SPANS_KEPT = 1024


@dataclass(frozen=True)
class ServedWorker:
    """One worker of a server: what they exchange, and the server's end of their channel."""

    server_shard: ServerShard
    channel: Channel


class GradientSum:
    """Sum of several workers' gradients, in the order of their ranks: the same bits in every run.

        arrives     rank 2    rank 0    rank 1
        added                 0         1, 2

    Args:
        ranks: shards that each contributing worker holds, by its rank.

    Attributes:
        gradients: the partial sums so far, in full shapes, by canonical name.
    """

    def __init__(self, ranks: Mapping[int, ShardSpec]) -> None:
        self._shard_specs = dict(sorted(ranks.items()))
        self._waiting: dict[int, Mapping[str, Tensor]] = {}
        self._next = iter(self._shard_specs)
        self._expected: int | None = next(self._next, None)
        self.gradients: dict[str, Tensor] = {}
        self._with_gradient: set[str] = set()

    def add_part(self, rank: int, parts: Mapping[str, Tensor], had: Iterable[str]) -> bool:
        """Add one worker's gradients; return whether those of all workers have arrived.

        Args:
            rank: rank of the worker that sent them.
            parts: gradients, or shards of them, by name; kept, and overwritten by partial sums.
            had: names of parameters that have a gradient; the others are zeros.
        """
        self._waiting[rank] = parts
        self._with_gradient.update(had)
        while self._expected is not None and self._expected in self._waiting:
            self._add_to_sum(self._waiting.pop(self._expected), self._shard_specs[self._expected])
            self._expected = next(self._next, None)
        return self._expected is None

    def _add_to_sum(self, parts: Mapping[str, Tensor], pieces: ShardSpec) -> None:
        for name, part in parts.items():
            # Shards are padded with zeros to full shapes: the sum over a replica's workers joins them.
            gradient = pieces.pad_to_full(name, part) if pieces.is_sharded(name) else part
            self.gradients[name] = self.gradients[name].add_(gradient) if name in self.gradients else gradient

    def take_sums(self) -> dict[str, Tensor]:
        """Return the sums of the parameters for which any worker had a gradient, by name."""
        return {name: gradient for name, gradient in self.gradients.items() if name in self._with_gradient}


class ParameterServer:
    """One parameter server: a thread for each worker waits for its messages; one at a time changes the weights.

    Args:
        number: number of the server among all servers.
        rank: rank of the process that the server is in.
        clients: the workers that hold any of its parameters, by rank.
        objectives: names of the objectives, in the order of their numbers in messages.
        staleness: most steps by which a replica may be ahead of the slowest; 0: synchronous; "any": no bound.
        begin: builds the weights and optimizers of this server from :meth:`sum_over_servers` and initial values by
            name.
        device: device of the weights and optimizer states.
        fellows: ends of channels to other servers: server 0 has one to each other, each other has one to server 0.

    Attributes:
        number: number of the server among all servers.
        log: all updates so far, in their order.
        spans: begin and end of the latest updates, for the timeline.
        error: the exception that ended the server, or None.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        clients: Mapping[int, ServedWorker],
        objectives: Sequence[str],
        staleness: int | str,
        begin: Callable[[Callable[[Tensor], Tensor], Mapping[str, Tensor]], ServerWeights],
        device: torch.device,
        fellows: Sequence[Channel],
    ) -> None:
        self.number, self._rank, self.log = number, rank, UpdateLog()
        self.error: BaseException | None = None
        self.spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._clients, self._objectives, self._staleness = dict(clients), tuple(objectives), staleness
        self._build_weights, self._device, self._other_servers = begin, device, fellows
        replicas = sorted({client.server_shard.replica for client in clients.values()})
        self._replica_ranks = {
            r: [rank for rank, c in clients.items() if c.server_shard.replica == r] for r in replicas
        }
        self._replica_steps: dict[int, float] = dict.fromkeys(replicas, 0)  # infinity: the replica has ended
        self._unanswered: set[int] = set()  # replicas whose last step was applied but not answered yet
        self._versions_sent = dict.fromkeys(replicas, 0)  # the version of the weights that each replica has
        self._last_staleness = dict.fromkeys(replicas, 0)  # of each replica's last update
        self._ended_ranks: set[int] = set()
        self._gradient_sums: dict[int, GradientSum] = {}
        self._weights: ServerWeights | None = None
        self._version, self._weights_ready = 0, threading.Event()
        self._answer_bytes = 0  # bytes of the answers of one step
        self._last_heads: dict[int, MessageHead] = {}  # by rank, head of the message that the next answer is for
        self._lock, self._failing = threading.Lock(), threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._serve_worker, args=(rank,), name=f"polylane-server-{number}-{rank}", daemon=True
            )
            for rank in clients
        ]

    def start(self) -> None:
        """Start the threads, which serve until every worker has ended."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the threads of all workers have ended."""
        for thread in self._threads:
            thread.join()

    @property
    def weights(self) -> ServerWeights:
        """Weights and optimizers of the server; waits until initial weights have arrived.

        Raises:
            BaseException: the error that ended the server before they arrived.
        """
        self._weights_ready.wait()
        if self._weights is None:
            assert self.error is not None
            raise self.error
        return self._weights

    def collect_state(self) -> WorkerState:
        """Return weights and optimizer states for a checkpoint; while no worker is in a step."""
        with self._lock:
            return self.weights.collect_state()

    def restore_state(self, saved: SavedState) -> None:
        """Make weights and optimizers those of a checkpoint; while no worker is in a step."""
        with self._lock, torch.no_grad():
            self.weights.restore_state(saved)

    def sum_over_servers(self, vector: Tensor) -> Tensor:
        """Return the sum of all servers' vectors, in the order of servers; a collective of all servers."""
        # A star: server 0 adds up and returns the sum, so that all servers clip by the same bits.
        if not self._other_servers:
            return vector
        head, total = MessageHead(MessageKind.SUM), vector.cpu()
        sizes: Sizes = [(vector.numel(), vector.dtype)]
        if self.number:
            self._other_servers[0].put(head, [total])
            return self._other_servers[0].get(lambda head: sizes)[1][0].to(vector.device)
        for line in self._other_servers:
            total = total + line.get(lambda head: sizes)[1][0]
        for line in self._other_servers:
            line.put(head, [total])
        return total.to(vector.device)

    # ---- one worker's thread -----------------------------------------------------------------------------------------

    def _serve_worker(self, rank: int) -> None:
        client = self._clients[rank]
        if self._device.type != "cpu":  # else that of a new thread is the host's first one
            torch.accelerator.set_device_index(self._device)
        try:
            while rank not in self._ended_ranks:
                head, rows = client.channel.get(lambda head: self._row_sizes(client.server_shard, head))
                with self._lock, torch.no_grad():
                    self._handle_message(client, head, rows)
        except BaseException as error:  # raised by an optimizer, a scheduler, or the channel of a lost worker
            self._fail(error)

    def _row_sizes(self, server_shard: ServerShard, head: MessageHead) -> Sizes:
        if head.kind is MessageKind.WEIGHTS:
            return server_shard.full_packings[0].sizes
        if head.kind is not MessageKind.GRADIENTS:
            return ()
        gradients = server_shard.gradient_packings[self._objectives[head.objective]].sizes
        return [*gradients, (head.option_bytes, torch.uint8)] if head.option_bytes else gradients

    def _handle_message(self, client: ServedWorker, head: MessageHead, rows: Sequence[Tensor]) -> None:
        server_shard = client.server_shard
        if head.kind is MessageKind.END:
            self._end_worker(server_shard)
        elif head.kind is MessageKind.READ_WEIGHTS:
            self._send_answer(
                server_shard.rank, head, self._objectives, self._pack_weights(server_shard, self._objectives)
            )
        elif head.kind is MessageKind.READ_GRADIENTS:
            self._send_gradients(server_shard, head)
        elif head.kind is MessageKind.WEIGHTS:
            self._receive_weights(client, head, rows)
        else:
            self._receive_gradients(server_shard, head, rows)

    def _end_worker(self, server_shard: ServerShard) -> None:
        self._ended_ranks.add(server_shard.rank)
        if self._ended_ranks.issuperset(self._replica_ranks[server_shard.replica]):
            # An ended replica must not hold back others as the slowest one.
            self._replica_steps[server_shard.replica] = math.inf
            self._answer_ready()

    def _receive_weights(self, client: ServedWorker, head: MessageHead, rows: Sequence[Tensor]) -> None:
        """Store one worker's part of the initial weights; the last part builds the optimizers."""
        server_shard = client.server_shard
        parts = server_shard.full_packings[0].unpack(rows, self._device)
        if self._add_part(server_shard, server_shard.replica, head, parts, parts):
            self._weights = self._build_weights(
                self.sum_over_servers, self._gradient_sums.pop(server_shard.replica).take_sums()
            )
            self._weights_ready.set()
            for rank in self._replica_ranks[server_shard.replica]:
                self._send_answer(rank, self._last_heads[rank], (), ())

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _receive_gradients(self, server_shard: ServerShard, head: MessageHead, rows: Sequence[Tensor]) -> None:
        """Store one worker's gradients of a step; the last part of an update applies it and answers replicas.

        Args:
            server_shard: what the worker that sent them exchanges with this server.
            head: names objective and step, and the version of the weights that the gradients were computed with.
            rows: packed gradients, followed by the optimizer's options if they have changed.
        """
        name = self._objectives[head.objective]
        packing, parts, had = server_shard.gradient_packings[name], dict[str, Tensor](), list[str]()
        if head.kind is MessageKind.GRADIENTS:
            parts = packing.unpack(rows[: len(packing.rows)], self._device)
            had = [n for n, flag in zip(packing.names, head.flags, strict=False) if flag]
        if head.option_bytes:
            load_options(self.weights.objectives[name].optimizer, rows[-1].numpy().tobytes())
        # Synchronous: one update of the gradients of all replicas. Asynchronous: one of each replica's.
        is_synchronous = self._staleness == 0
        key = ALL if is_synchronous else server_shard.replica
        if not self._add_part(server_shard, key, head, parts, had):
            return
        gradients, start, self._answer_bytes = self._gradient_sums.pop(key).take_sums(), time.perf_counter(), 0
        if head.kind is MessageKind.GRADIENTS:
            self._apply_update(key, head, gradients)
        for replica in self._replica_ranks if is_synchronous else (server_shard.replica,):
            self._last_staleness[replica] = (
                self._version - 1 - head.version if head.kind is MessageKind.GRADIENTS else 0
            )
            self._replica_steps[replica] += 1
            self._unanswered.add(replica)
        self._answer_ready()
        if head.kind is MessageKind.GRADIENTS:
            # An update belongs to all stages of the program: the span shows its time and the bytes of its answers.
            step_action = action.Action(action.ActionKind.STEP, 0)
            self.spans.append(Span(self._rank, step_action, start, time.perf_counter(), bytes=self._answer_bytes))

    def _add_part(
        self,
        server_shard: ServerShard,
        key: int,
        head: MessageHead,
        parts: Mapping[str, Tensor],
        had: Sequence[str] | Mapping[str, Any],
    ) -> bool:
        """Add one worker's part to the sum of an update; return whether the parts of all its workers have arrived.

        Args:
            server_shard: what the worker exchanges with this server.
            key: number of the replica whose update it is, or :data:`ALL`.
            head: head of the worker's message, to be answered later.
            parts: tensors or shards of tensors, by name.
            had: names of the parameters that have a gradient.
        """
        if key not in self._gradient_sums:
            ranks = self._clients if key == ALL else self._replica_ranks[key]
            self._gradient_sums[key] = GradientSum(
                {rank: self._clients[rank].server_shard.shard_spec for rank in ranks}
            )
        self._last_heads[server_shard.rank] = head
        return self._gradient_sums[key].add_part(server_shard.rank, parts, had)

    def _apply_update(self, replica: int, head: MessageHead, gradients: Mapping[str, Tensor]) -> None:
        name = self._objectives[head.objective]
        objective_state = self.weights.objectives[name]
        with torch.enable_grad():  # messages are handled under no_grad; a user's optimizer may use autograd
            objective_state.apply_gradients(gradients)
        self._version += 1
        objective_state.latest_version = self._version
        ahead = 0 if replica == ALL else int(self._replica_steps[replica] - min(self._replica_steps.values()))
        self.log.add(ServerUpdate(replica, head.step, head.objective, head.version, self._version, ahead))

    def _answer_ready(self) -> None:
        """Answer every replica that is at most ``staleness`` steps ahead of the slowest, so may take its next step."""
        slowest = min(self._replica_steps.values())
        packed: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Tensor]] = {}
        for replica in sorted(self._unanswered):
            if self._staleness == "any" or self._replica_steps[replica] - slowest <= int(self._staleness):
                self._unanswered.discard(replica)
                # Send only weights of objectives that were updated since this replica's last answer.
                changed = tuple(
                    n
                    for n in self._objectives
                    if self.weights.objectives[n].latest_version > self._versions_sent[replica]
                )
                self._versions_sent[replica] = self._version
                for rank in self._replica_ranks[replica]:
                    server_shard = self._clients[rank].server_shard
                    if (server_shard.shard_key, changed) not in packed:  # pack once for counterparts in all replicas
                        packed[server_shard.shard_key, changed] = self._pack_weights(server_shard, changed)
                    self._send_answer(rank, self._last_heads[rank], changed, packed[server_shard.shard_key, changed])

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _pack_weights(self, server_shard: ServerShard, objectives: Sequence[str]) -> list[Tensor]:
        """Return the rows of a worker's parameters or shards that some objectives train."""
        packing = server_shard.weights_of(objectives)
        return packing.pack(_take_parts(self.weights.parameters, packing, server_shard), CPU)

    def _send_answer(self, rank: int, head: MessageHead, objectives: Sequence[str], rows: Sequence[Tensor]) -> None:
        client = self._clients[rank]
        self._answer_bytes += sum(row.nbytes for row in rows)
        bits = sum(1 << number for number, name in enumerate(self._objectives) if name in objectives)
        name = self._objectives[head.objective]
        updates = self.weights.objectives[name].updates
        stale = self._last_staleness[client.server_shard.replica]
        client.channel.put(
            MessageHead(MessageKind.ANSWER, head.objective, head.step, self._version, updates, stale, bits), rows
        )

    def _send_gradients(self, server_shard: ServerShard, head: MessageHead) -> None:
        """Answer a worker with its part of the gradients of the last update, as the optimizer used them."""
        name = self._objectives[head.objective]
        packing, parameters = server_shard.weight_packings[name], self.weights.objectives[name].parameters
        gradients = {n: grad for n in packing.names if (grad := parameters[n].grad) is not None}
        flags = bytes(n in gradients for n in packing.names)
        rows = packing.pack(_take_parts(gradients, packing, server_shard), CPU)
        self._clients[server_shard.rank].channel.put(
            MessageHead(MessageKind.ANSWER, head.objective, head.step, self._version, flags=flags), rows
        )

    def _fail(self, error: BaseException) -> None:
        """Store the error that ends the server, and send FAILED to all workers and servers that may wait for it."""
        with self._failing:
            if self.error is not None:
                return
            self.error = error
            self._weights_ready.set()
        for line in (*self._other_servers, *(client.channel for client in self._clients.values())):
            with suppress(Exception):  # this may be the lost peer
                line.put_last(MessageHead(MessageKind.FAILED))


def _take_parts(tensors: Mapping[str, Tensor], packing: FlatPacking, server_shard: ServerShard) -> dict[str, Tensor]:
    """Return a worker's shards of full tensors, of those that exist in ``tensors``."""
    wholes = {name: tensors[name] for name in packing.names if name in tensors}
    return {**wholes, **server_shard.shard_spec.local_shards(wholes)}
