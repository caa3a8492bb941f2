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
from polylane.runtime.sync.flat_packing import Packing
from polylane.runtime.sync.server_line import CPU, Head, Kind, Line, Sizes
from polylane.runtime.sync.server_log import ALL, Log, Update
from polylane.runtime.sync.server_share import Trade
from polylane.runtime.sync.server_sum import Arriving
from polylane.runtime.sync.server_weights import Weights, set_options
from polylane.schedule import action

# Of as many updates it is kept when they were.
SPANS_KEPT = 1024


@dataclass(frozen=True)
class Client:
    """A worker, as a server sees it."""

    trade: Trade
    line: Line


class Server:
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
        clients: Mapping[int, Client],
        objectives: Sequence[str],
        staleness: int | str,
        begin: Callable[[Server, Mapping[str, Tensor]], Weights],
        device: torch.device,
        fellows: Sequence[Line],
    ) -> None:
        self.number, self._rank, self.log = number, rank, Log()
        self.error: BaseException | None = None
        self.spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._clients, self._objectives, self._staleness = dict(clients), tuple(objectives), staleness
        self._begin, self._device, self._fellows = begin, device, fellows
        replicas = sorted({client.trade.replica for client in clients.values()})
        self._ranks = {r: [rank for rank, c in clients.items() if c.trade.replica == r] for r in replicas}
        self._clocks: dict[int, float] = dict.fromkeys(replicas, 0)
        self._owed: set[int] = set()  # replicas that have no answer yet
        self._seen = dict.fromkeys(replicas, 0)  # the version of the weights that each replica has
        self._stale = dict.fromkeys(replicas, 0)  # of each replica's last update
        self._ended: set[int] = set()
        self._arriving: dict[int, Arriving] = {}
        self._weights: Weights | None = None
        self._version, self._ready = 0, threading.Event()
        self._given = 0  # bytes of the answers of one step
        self._last: dict[int, Head] = {}  # of each rank, what is to be answered
        self._lock, self._failing = threading.Lock(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"polylane-server-{number}-{rank}", daemon=True)
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
    def weights(self) -> Weights:
        """What it holds; waits for it to come.

        Raises:
            BaseException: what ended the server before.
        """
        self._ready.wait()
        if self._weights is None:
            assert self.error is not None
            raise self.error
        return self._weights

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of all servers' vectors; all must ask for it."""
        if not self._fellows:
            return vector
        head, own = Head(Kind.SUM), vector.cpu()
        sizes: Sizes = [(vector.numel(), vector.dtype)]
        if self.number:
            self._fellows[0].put(head, [own])
            return self._fellows[0].get(lambda head: sizes)[1][0].to(vector.device)
        for line in self._fellows:
            own = own + line.get(lambda head: sizes)[1][0]
        for line in self._fellows:
            line.put(head, [own])
        return own.to(vector.device)

    # ---- one worker's thread -----------------------------------------------------------------------------------------

    def _serve(self, rank: int) -> None:
        client = self._clients[rank]
        try:
            while rank not in self._ended:
                head, rows = client.line.get(lambda head: self._sizes(client.trade, head))
                with self._lock, torch.no_grad():
                    self._take(client, head, rows)
        except BaseException as error:  # of an optimizer, a scheduler, or of a worker that is gone
            self._fail(error)

    def _sizes(self, trade: Trade, head: Head) -> Sizes:
        if head.kind is Kind.WEIGHTS:
            return trade.all[0].sizes
        if head.kind is not Kind.GRADIENTS:
            return ()
        return [*trade.gives[self._objectives[head.objective]].sizes, *_extra(head)]

    def _take(self, client: Client, head: Head, rows: Sequence[Tensor]) -> None:
        trade = client.trade
        if head.kind is Kind.END:
            self._end(trade)
        elif head.kind is Kind.READ_WEIGHTS:
            self._answer(trade.rank, head, self._objectives, self._rows(trade, self._objectives))
        elif head.kind is Kind.READ_GRADIENTS:
            self._tell_gradients(trade, head)
        elif head.kind is Kind.WEIGHTS:
            self._set(client, head, rows)
        else:
            self._step(trade, head, rows)

    def _end(self, trade: Trade) -> None:
        self._ended.add(trade.rank)
        if self._ended.issuperset(self._ranks[trade.replica]):
            self._clocks[trade.replica] = math.inf
            self._release()

    def _set(self, client: Client, head: Head, rows: Sequence[Tensor]) -> None:
        """One worker's part of the first weights."""
        trade = client.trade
        parts = trade.all[0].unpacked(rows, self._device)
        if self._arrived(trade, trade.replica, head, parts, parts):
            self._weights = self._begin(self, self._arriving.pop(trade.replica).taken())
            self._ready.set()
            for rank in self._ranks[trade.replica]:
                self._answer(rank, self._last[rank], (), ())

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _step(self, trade: Trade, head: Head, rows: Sequence[Tensor]) -> None:
        """One worker's part of one step. The last part that an update needs makes it, and releases replicas.

        Args:
            trade: of the worker.
            head: says which objective and step it is, and which weights the gradients belong to.
            rows: packed gradients, and behind them the optimizer's options where they have changed.
        """
        name = self._objectives[head.objective]
        packing, parts, had = trade.gives[name], dict[str, Tensor](), list[str]()
        if head.kind is Kind.GRADIENTS:
            parts = packing.unpacked(rows[: len(packing.rows)], self._device)
            had = [n for n, flag in zip(packing.names, head.flags, strict=False) if flag]
        if head.extra:
            set_options(self.weights.courses[name].optimizer, rows[-1].numpy().tobytes())
        # Synchronous: the parts of all replicas make one update. Asynchronous: those of each replica make one.
        together = self._staleness == 0
        key = ALL if together else trade.replica
        if not self._arrived(trade, key, head, parts, had):
            return
        gradients, start, self._given = self._arriving.pop(key).taken(), time.perf_counter(), 0
        if head.kind is Kind.GRADIENTS:
            self._update(key, head, gradients)
        for replica in self._ranks if together else (trade.replica,):
            self._stale[replica] = self._version - 1 - head.version if head.kind is Kind.GRADIENTS else 0
            self._clocks[replica] += 1
            self._owed.add(replica)
        self._release()
        if head.kind is Kind.GRADIENTS:
            # The optimizer's steps are those of all stages: the lane shows when there was one, and what it gave.
            done = action.Action(action.Kind.STEP, 0)
            self.spans.append(Span(self._rank, done, start, time.perf_counter(), bytes=self._given))

    def _arrived(
        self, trade: Trade, key: int, head: Head, parts: Mapping[str, Tensor], had: Sequence[str] | Mapping[str, Any]
    ) -> bool:
        """Keep one worker's part; whether those of all that belong to it are there."""
        if key not in self._arriving:
            ranks = self._clients if key == ALL else self._ranks[key]
            self._arriving[key] = Arriving({rank: self._clients[rank].trade.pieces for rank in ranks})
        self._last[trade.rank] = head
        return self._arriving[key].add(trade.rank, parts, had)

    def _update(self, replica: int, head: Head, gradients: Mapping[str, Tensor]) -> None:
        name = self._objectives[head.objective]
        course = self.weights.courses[name]
        with torch.enable_grad():
            course.update(gradients)
        self._version += 1
        course.latest = self._version
        ahead = 0 if replica == ALL else int(self._clocks[replica] - min(self._clocks.values()))
        self.log.add(Update(replica, head.step, head.objective, head.version, self._version, ahead))

    def _release(self) -> None:
        """Answer every replica that may take its next step: it is no more than ``staleness`` ahead of the slowest."""
        slowest = min(self._clocks.values())
        packed: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Tensor]] = {}
        for replica in sorted(self._owed):
            if self._staleness == "any" or self._clocks[replica] - slowest <= int(self._staleness):
                self._owed.discard(replica)
                # Only weights that changed since this replica's last answer travel: those of other objectives wait.
                changed = tuple(n for n in self._objectives if self.weights.courses[n].latest > self._seen[replica])
                self._seen[replica] = self._version
                for rank in self._ranks[replica]:
                    trade = self._clients[rank].trade
                    if (trade.place, changed) not in packed:  # counterparts of several replicas get the same
                        packed[trade.place, changed] = self._rows(trade, changed)
                    self._answer(rank, self._last[rank], changed, packed[trade.place, changed])

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _rows(self, trade: Trade, objectives: Sequence[str]) -> list[Tensor]:
        """A worker's part of the weights that some objectives train."""
        packing = trade.got(objectives)
        return packing.packed(_parts(self.weights.parameters, packing, trade), CPU)

    def _answer(self, rank: int, asked: Head, objectives: Sequence[str], rows: Sequence[Tensor]) -> None:
        client = self._clients[rank]
        self._given += sum(row.nbytes for row in rows)
        bits = sum(1 << number for number, name in enumerate(self._objectives) if name in objectives)
        name = self._objectives[asked.objective]
        updates = self.weights.courses[name].updates
        stale = self._stale[client.trade.replica]
        client.line.put(Head(Kind.ANSWER, asked.objective, asked.step, self._version, updates, stale, bits), rows)

    def _tell_gradients(self, trade: Trade, head: Head) -> None:
        """Give a worker its part of the gradients of the last update, as the optimizer took them."""
        name = self._objectives[head.objective]
        packing, held = trade.gets[name], self.weights.courses[name].held
        gradients = {n: grad for n in packing.names if (grad := held[n].grad) is not None}
        flags = bytes(n in gradients for n in packing.names)
        rows = packing.packed(_parts(gradients, packing, trade), CPU)
        self._clients[trade.rank].line.put(
            Head(Kind.ANSWER, head.objective, head.step, self._version, flags=flags), rows
        )

    def _fail(self, error: BaseException) -> None:
        """End, and let nobody wait for what will not come."""
        with self._failing:
            if self.error is not None:
                return
            self.error = error
            self._ready.set()
        for line in (*self._fellows, *(client.line for client in self._clients.values())):
            with suppress(Exception):  # it may be the one that is gone
                line.put(Head(Kind.FAILED))


def _parts(tensors: Mapping[str, Tensor], packing: Packing, trade: Trade) -> dict[str, Tensor]:
    """A worker's parts of whole tensors, as far as there are any."""
    wholes = {name: tensors[name] for name in packing.names if name in tensors}
    return {**wholes, **trade.pieces.of(wholes)}


def _extra(head: Head) -> Sizes:
    return [(head.extra, torch.uint8)] if head.extra else []
