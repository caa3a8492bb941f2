"""A parameter server: weights that many workers train, with the optimizer on it (Li et al., OSDI 2014).

Synchronous: the gradients of all replicas make one update. Asynchronous: each replica's gradient makes one, when it
comes, whatever the others did since that replica read the weights (Dean et al., NeurIPS 2012, Downpour SGD). Stale
synchronous parallel (Ho et al., NeurIPS 2013): the same, but a replica that is too many steps ahead of the slowest one
waits for it.

Over p replicas of |A| parameters of b bytes a step moves 2 |A| p b bytes, however many servers there are: every replica
sends its gradients and gets the weights. Where servers live with workers, a worker and its own server give each other
their part without sending it: 2 |A| (p - 1) b are left, as many as a ring all-reduce sends.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.observe.timeline import Span
from polylane.runtime.sync.flat_packing import FlatPacking
from polylane.runtime.sync.parameter_server.gradient_sum import GradientSum
from polylane.runtime.sync.parameter_server.messages import CPU, Channel, MessageHead, MessageKind, Sizes
from polylane.runtime.sync.parameter_server.packing import ServerShard
from polylane.runtime.sync.parameter_server.update_log import ALL, ServerUpdate, UpdateLog
from polylane.runtime.sync.parameter_server.weights import ServerWeights, load_options
from polylane.schedule import action

# Of as many updates it is kept when they were.
SPANS_KEPT = 1024


@dataclass(frozen=True)
class ServedWorker:
    """A worker, as a server sees it."""

    server_shard: ServerShard
    channel: Channel


class ParameterServer:
    """One parameter server: a thread for each worker waits for what it sends; one at a time changes the weights.

    Args:
        number, rank: of the server among all servers, and of the process where it lives.
        clients: the workers that hold any of its parameters, by rank.
        objectives: names of the objectives, in the order of their numbers in messages.
        staleness: most steps by which a replica may be ahead; 0: all replicas go together; "any": no bound.
        begin: makes the weights and optimizers of this server out of first values by name.
        device: where weights and optimizer states are.
        fellows: ends of lines to the other servers: those of server 0 to all others; of others, that to server 0.

    Attributes:
        log: the updates so far, in their order.
        spans: when the latest of them were made.
        error: what ended it, or None.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        clients: Mapping[int, ServedWorker],
        objectives: Sequence[str],
        staleness: int | str,
        begin: Callable[[ParameterServer, Mapping[str, Tensor]], ServerWeights],
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
        self._replica_steps: dict[int, float] = dict.fromkeys(replicas, 0)
        self._unanswered: set[int] = set()  # replicas that have no answer yet
        self._versions_sent = dict.fromkeys(replicas, 0)  # the version of the weights that each replica has
        self._last_staleness = dict.fromkeys(replicas, 0)  # of each replica's last update
        self._ended_ranks: set[int] = set()
        self._gradient_sums: dict[int, GradientSum] = {}
        self._weights: ServerWeights | None = None
        self._version, self._weights_ready = 0, threading.Event()
        self._answer_bytes = 0  # bytes of the answers of one step
        self._last_heads: dict[int, MessageHead] = {}  # of each rank, what is to be answered
        self._lock, self._failing = threading.Lock(), threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._serve_worker, args=(rank,), name=f"polylane-server-{number}-{rank}", daemon=True
            )
            for rank in clients
        ]

    def start(self) -> None:
        """Serve, until every worker has ended."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all have ended."""
        for thread in self._threads:
            thread.join()

    @property
    def weights(self) -> ServerWeights:
        """What it holds; waits for it to come.

        Raises:
            BaseException: what ended the server before.
        """
        self._weights_ready.wait()
        if self._weights is None:
            assert self.error is not None
            raise self.error
        return self._weights

    def sum_over_servers(self, vector: Tensor) -> Tensor:
        """The sum of all servers' vectors; all must ask for it."""
        if not self._other_servers:
            return vector
        head, own = MessageHead(MessageKind.SUM), vector.cpu()
        sizes: Sizes = [(vector.numel(), vector.dtype)]
        if self.number:
            self._other_servers[0].put(head, [own])
            return self._other_servers[0].get(lambda head: sizes)[1][0].to(vector.device)
        for line in self._other_servers:
            own = own + line.get(lambda head: sizes)[1][0]
        for line in self._other_servers:
            line.put(head, [own])
        return own.to(vector.device)

    # ---- one worker's thread -----------------------------------------------------------------------------------------

    def _serve_worker(self, rank: int) -> None:
        client = self._clients[rank]
        try:
            while rank not in self._ended_ranks:
                head, rows = client.channel.get(lambda head: self._row_sizes(client.server_shard, head))
                with self._lock, torch.no_grad():
                    self._handle_message(client, head, rows)
        except BaseException as error:  # of an optimizer, a scheduler, or of a worker that is gone
            self._fail(error)

    def _row_sizes(self, trade: ServerShard, head: MessageHead) -> Sizes:
        if head.kind is MessageKind.WEIGHTS:
            return trade.full_packings[0].sizes
        if head.kind is not MessageKind.GRADIENTS:
            return ()
        return [*trade.gradient_packings[self._objectives[head.objective]].sizes, *_option_sizes(head)]

    def _handle_message(self, client: ServedWorker, head: MessageHead, rows: Sequence[Tensor]) -> None:
        trade = client.server_shard
        if head.kind is MessageKind.END:
            self._end_worker(trade)
        elif head.kind is MessageKind.READ_WEIGHTS:
            self._send_answer(trade.rank, head, self._objectives, self._pack_weights(trade, self._objectives))
        elif head.kind is MessageKind.READ_GRADIENTS:
            self._send_gradients(trade, head)
        elif head.kind is MessageKind.WEIGHTS:
            self._receive_weights(client, head, rows)
        else:
            self._receive_gradients(trade, head, rows)

    def _end_worker(self, trade: ServerShard) -> None:
        self._ended_ranks.add(trade.rank)
        if self._ended_ranks.issuperset(self._replica_ranks[trade.replica]):
            self._replica_steps[trade.replica] = math.inf
            self._answer_ready()

    def _receive_weights(self, client: ServedWorker, head: MessageHead, rows: Sequence[Tensor]) -> None:
        """One worker's part of the first weights."""
        trade = client.server_shard
        parts = trade.full_packings[0].unpack(rows, self._device)
        if self._add_part(trade, trade.replica, head, parts, parts):
            self._weights = self._build_weights(self, self._gradient_sums.pop(trade.replica).take_sums())
            self._weights_ready.set()
            for rank in self._replica_ranks[trade.replica]:
                self._send_answer(rank, self._last_heads[rank], (), ())

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _receive_gradients(self, trade: ServerShard, head: MessageHead, rows: Sequence[Tensor]) -> None:
        """One worker's part of one step. The last part that an update needs makes it, and releases replicas.

        Args:
            trade: of the worker.
            head: says which objective and step it is, and which weights the gradients belong to.
            rows: packed gradients, and behind them the optimizer's options where they have changed.
        """
        name = self._objectives[head.objective]
        packing, parts, had = trade.gradient_packings[name], dict[str, Tensor](), list[str]()
        if head.kind is MessageKind.GRADIENTS:
            parts = packing.unpack(rows[: len(packing.rows)], self._device)
            had = [n for n, flag in zip(packing.names, head.flags, strict=False) if flag]
        if head.option_bytes:
            load_options(self.weights.objectives[name].optimizer, rows[-1].numpy().tobytes())
        # Synchronous: the parts of all replicas make one update. Asynchronous: those of each replica make one.
        together = self._staleness == 0
        key = ALL if together else trade.replica
        if not self._add_part(trade, key, head, parts, had):
            return
        gradients, start, self._answer_bytes = self._gradient_sums.pop(key).take_sums(), time.perf_counter(), 0
        if head.kind is MessageKind.GRADIENTS:
            self._apply_update(key, head, gradients)
        for replica in self._replica_ranks if together else (trade.replica,):
            self._last_staleness[replica] = (
                self._version - 1 - head.version if head.kind is MessageKind.GRADIENTS else 0
            )
            self._replica_steps[replica] += 1
            self._unanswered.add(replica)
        self._answer_ready()
        if head.kind is MessageKind.GRADIENTS:
            # The optimizer's steps are those of all stages: the lane shows when there was one, and what it gave.
            done = action.Action(action.ActionKind.STEP, 0)
            self.spans.append(Span(self._rank, done, start, time.perf_counter(), bytes=self._answer_bytes))

    def _add_part(
        self,
        trade: ServerShard,
        key: int,
        head: MessageHead,
        parts: Mapping[str, Tensor],
        had: Sequence[str] | Mapping[str, Any],
    ) -> bool:
        """Keep one worker's part; whether those of all that belong to it are there."""
        if key not in self._gradient_sums:
            ranks = self._clients if key == ALL else self._replica_ranks[key]
            self._gradient_sums[key] = GradientSum(
                {rank: self._clients[rank].server_shard.shard_spec for rank in ranks}
            )
        self._last_heads[trade.rank] = head
        return self._gradient_sums[key].add_part(trade.rank, parts, had)

    def _apply_update(self, replica: int, head: MessageHead, gradients: Mapping[str, Tensor]) -> None:
        name = self._objectives[head.objective]
        course = self.weights.objectives[name]
        with torch.enable_grad():
            course.apply_gradients(gradients)
        self._version += 1
        course.latest_version = self._version
        ahead = 0 if replica == ALL else int(self._replica_steps[replica] - min(self._replica_steps.values()))
        self.log.add(ServerUpdate(replica, head.step, head.objective, head.version, self._version, ahead))

    def _answer_ready(self) -> None:
        """Answer every replica that may take its next step: it is no more than ``staleness`` ahead of the slowest."""
        slowest = min(self._replica_steps.values())
        packed: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Tensor]] = {}
        for replica in sorted(self._unanswered):
            if self._staleness == "any" or self._replica_steps[replica] - slowest <= int(self._staleness):
                self._unanswered.discard(replica)
                # Only weights that changed since this replica's last answer travel: those of other objectives wait.
                changed = tuple(
                    n
                    for n in self._objectives
                    if self.weights.objectives[n].latest_version > self._versions_sent[replica]
                )
                self._versions_sent[replica] = self._version
                for rank in self._replica_ranks[replica]:
                    trade = self._clients[rank].server_shard
                    if (trade.shard_key, changed) not in packed:  # counterparts of several replicas get the same
                        packed[trade.shard_key, changed] = self._pack_weights(trade, changed)
                    self._send_answer(rank, self._last_heads[rank], changed, packed[trade.shard_key, changed])

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _pack_weights(self, trade: ServerShard, objectives: Sequence[str]) -> list[Tensor]:
        """A worker's part of the weights that some objectives train."""
        packing = trade.weights_of(objectives)
        return packing.pack(_take_parts(self.weights.parameters, packing, trade), CPU)

    def _send_answer(self, rank: int, asked: MessageHead, objectives: Sequence[str], rows: Sequence[Tensor]) -> None:
        client = self._clients[rank]
        self._answer_bytes += sum(row.nbytes for row in rows)
        bits = sum(1 << number for number, name in enumerate(self._objectives) if name in objectives)
        name = self._objectives[asked.objective]
        updates = self.weights.objectives[name].updates
        stale = self._last_staleness[client.server_shard.replica]
        client.channel.put(
            MessageHead(MessageKind.ANSWER, asked.objective, asked.step, self._version, updates, stale, bits), rows
        )

    def _send_gradients(self, trade: ServerShard, head: MessageHead) -> None:
        """Give a worker its part of the gradients of the last update, as the optimizer took them."""
        name = self._objectives[head.objective]
        packing, held = trade.weight_packings[name], self.weights.objectives[name].parameters
        gradients = {n: grad for n in packing.names if (grad := held[n].grad) is not None}
        flags = bytes(n in gradients for n in packing.names)
        rows = packing.pack(_take_parts(gradients, packing, trade), CPU)
        self._clients[trade.rank].channel.put(
            MessageHead(MessageKind.ANSWER, head.objective, head.step, self._version, flags=flags), rows
        )

    def _fail(self, error: BaseException) -> None:
        """End, and let nobody wait for what will not come."""
        with self._failing:
            if self.error is not None:
                return
            self.error = error
            self._weights_ready.set()
        for line in (*self._other_servers, *(client.channel for client in self._clients.values())):
            with suppress(Exception):  # it may be the one that is gone
                line.put(MessageHead(MessageKind.FAILED))


def _take_parts(tensors: Mapping[str, Tensor], packing: FlatPacking, trade: ServerShard) -> dict[str, Tensor]:
    """A worker's parts of whole tensors, as far as there are any."""
    wholes = {name: tensors[name] for name in packing.names if name in tensors}
    return {**wholes, **trade.shard_spec.local_shards(wholes)}


def _option_sizes(head: MessageHead) -> Sizes:
    return [(head.option_bytes, torch.uint8)] if head.option_bytes else []
