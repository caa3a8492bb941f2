"""Parameter-server client: a worker that trains sends its gradients to the servers and takes its weights from them.

step of a worker         forward, backward | push gradients | wait | pull weights |
server, synchronous                         ... of all replicas | one update
server, asynchronous                        | one update for each replica; waits only for one that is too far behind
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polylane.plan.plan import Plan
from polylane.runtime.connections import replica_of
from polylane.runtime.mesh import Waits
from polylane.runtime.sync.mean import means, restore_values
from polylane.runtime.sync.rule import CollectiveCall, Rule, Stepping
from polylane.runtime.sync.server_host import Host
from polylane.runtime.sync.server_line import CPU, Head, Kind, Line
from polylane.runtime.sync.server_log import Update
from polylane.runtime.sync.server_share import Trade
from polylane.runtime.sync.server_weights import options_of
from polylane.runtime.transport.protocol import Counters, Transport

if TYPE_CHECKING:
    from polylane.runtime.trainer import Trainer


class FromServers(Rule):
    """Gradients go to parameter servers, and weights come from them.

    The worker's own optimizer never steps. Its options are the servers': what a user changes in them goes along with
    the next gradients, and its scheduler follows the server that has made the most updates.

    Args:
        plan: how the training is split.
        host: lines to the servers, and those of them that live here.
        trainers: by the name of the objective.
        parameters: that this worker holds, or its parts of them, by name.
        buffers: this worker's, by name.
        transport: between the workers that train.
        waits: where the time is counted that is spent waiting for servers.

    Attributes:
        staleness: of this worker's last step, the most of all servers.
    """

    def __init__(
        self,
        plan: Plan,
        host: Host,
        trainers: Mapping[str, Trainer],
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        transport: Transport,
        waits: Waits,
    ) -> None:
        self._plan, self._host, self._sync = plan, host, plan.sync
        self._trainers, self._names = trainers, list(trainers)
        self._parameters, self._transport, self._waits = parameters, transport, waits
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._versions = dict.fromkeys(host.lines, 0)
        self._updates = dict.fromkeys(trainers, 0)
        self._options = {name: options_of(trainer.optimizer) for name, trainer in trainers.items()}
        self._steps = self.staleness = 0
        self._members = plan.group(transport.rank, ("data",))
        self._seen = [0] * len(self._members)
        self.together = replica_of(plan, transport.rank) if plan.sync.alone else None
        self._begin()

    def _begin(self) -> None:
        """Give the servers the weights to begin with: those of the first replica, the same as all others'."""
        for trainer in self._trainers.values():
            if trainer.scheduler is not None:  # it warns where it is stepped and the optimizer never was
                trainer.optimizer._opt_called = True  # type: ignore[attr-defined]
        mine = [(t, line) for t, line in self._host.lines.values() if t.replica == 0]
        with self.watch():
            for trade, line in mine:
                line.put(Head(Kind.WEIGHTS), trade.all[0].packed(self._parameters, CPU))
            for _, line in mine:
                line.get(lambda head: ())
        self._transport.barrier()

    # ---- a step ------------------------------------------------------------------------------------------------------

    @property
    def differs(self) -> bool:  # type: ignore[override]
        return self._sync.alone and self._steps > 0

    def alone(self, objective: str) -> bool:
        return self._sync.alone

    def update(self, objective: str, trainer: Trainer, samples: bool) -> None:
        """See :meth:`Rule.update`: servers do it, with the gradients of this replica, or of all."""
        if samples and self._sync.alone and trainer.clipper is not None:
            trainer.clipper.clip()  # of a sum over replicas the servers know the norm
        kind = Kind.GRADIENTS if samples else Kind.NOTHING
        options = self._changed_options(objective, trainer.optimizer)
        with self.watch():
            for server, (trade, line) in self._host.lines.items():
                self._push(server, trade, line, kind, objective, options)
            heads = [self._pulled(server, *line) for server, line in self._host.lines.items()]
        self._steps += 1
        self.staleness = max((head.staleness for head in heads), default=0)
        self._follow(objective, trainer, max((head.updates for head in heads), default=0), bool(samples))

    def stepped(self, objective: str, samples: Sequence[int]) -> None:
        if samples:
            self._seen = [seen + more for seen, more in zip(self._seen, samples, strict=True)]

    def _push(self, server: int, trade: Trade, line: Line, kind: Kind, objective: str, options: bytes) -> None:
        rows, flags, packing = list[Tensor](), b"", trade.gives[objective]
        if kind is Kind.GRADIENTS:
            found = {name: self._parameters[name].grad for name in packing.names}
            gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
            rows, flags = packing.packed(gradients, CPU), bytes(name in gradients for name in packing.names)
            self._waits.bytes += packing.bytes
            if options:
                rows.append(torch.frombuffer(bytearray(options), dtype=torch.uint8))
        extra = len(options) if kind is Kind.GRADIENTS else 0
        number, version = self._names.index(objective), self._versions[server]
        line.put(Head(kind, number, self._steps, version, extra=extra, flags=flags), rows)

    def _pulled(self, server: int, trade: Trade, line: Line) -> Head:
        """Take over the new weights that a server answers with."""
        head, values = self._asked(trade, line)
        self._take(values)
        self._versions[server] = head.version
        return head

    def _asked(self, trade: Trade, line: Line) -> tuple[Head, dict[str, Tensor]]:
        """The weights in a server's answer, by name."""
        start = time.perf_counter()
        head, rows = line.get(lambda head: trade.got(self._told(head)).sizes)
        self._waits.seconds += time.perf_counter() - start
        return head, trade.got(self._told(head)).unpacked(rows)

    def _told(self, head: Head) -> list[str]:
        return [name for number, name in enumerate(self._names) if head.objectives >> number & 1]

    def _take(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._parameters[name].copy_(value)

    # ---- what the user changes in the optimizer ----------------------------------------------------------------------

    def _changed_options(self, objective: str, optimizer: torch.optim.Optimizer) -> bytes:
        """The optimizer's options if they are not what they were after the last step; else nothing."""
        now = options_of(optimizer)
        return b"" if now == self._options[objective] else now

    def _follow(self, objective: str, trainer: Trainer, updates: int, sent: bool) -> None:
        """Let this worker's scheduler, and with it the rates that it shows, be where the servers' are.

        Options that were changed by hand stay to be sent, where nothing was.
        """
        changed = not sent and self._changed_options(objective, trainer.optimizer)
        for _ in range(updates - self._updates[objective] if trainer.scheduler is not None else 0):
            trainer.scheduler.step()
        self._updates[objective] = updates
        if not changed:
            self._options[objective] = options_of(trainer.optimizer)

    # ---- questions ---------------------------------------------------------------------------------------------------

    def summed_gradients(self, objective: str) -> None:
        """See :meth:`Rule.summed_gradients`: where replicas' gradients are summed, servers have the sums."""
        if self._sync.alone or not self._steps:
            return
        number, lines = self._names.index(objective), self._host.lines.values()
        with self.watch():
            for _, line in lines:
                line.put(Head(Kind.READ_GRADIENTS, number))
            for trade, line in lines:
                packing = trade.gets[objective]
                head, rows = line.get(lambda head, sizes=packing.sizes: sizes)  # type: ignore[misc]
                found = packing.unpacked(rows, self._transport_device())
                for name, flag in zip(packing.names, head.flags, strict=False):
                    self._parameters[name].grad = found[name] if flag else None

    def _transport_device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def stepping(self) -> list[Stepping]:
        return self._host.stepping()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """See :meth:`Rule.agreed`: the servers' weights, and the means of running statistics."""
        if not self._sync.alone:
            yield
            return
        with restore_values([*self._parameters.values(), *self._buffers.values()]):
            with self.watch():
                self._transport.barrier()  # every step that was begun is done
                for _, line in self._host.lines.values():
                    line.put(Head(Kind.READ_WEIGHTS))
                for trade, line in self._host.lines.values():
                    self._take(self._asked(trade, line)[1])
            if any(self._seen):
                share = self._seen[self._members.index(self._transport.rank)] / sum(self._seen)
                with torch.no_grad():
                    for name, mean in means(self._buffers, share, self._members, self._transport).items():
                        self._buffers[name].copy_(mean)
            yield

    def updates(self) -> tuple[tuple[Update, ...], ...]:
        self._transport.barrier()
        self.broadcast_result(CollectiveCall.UPDATES, None)
        return self._host.updates()

    def counters(self) -> tuple[Counters, ...]:
        return self._host.counters

    # ---- those that only serve ---------------------------------------------------------------------------------------

    def broadcast_result(self, call: CollectiveCall, value: Any) -> None:
        if self._transport.rank == 0:
            self._host.broadcast_result(call, value)

    def gathered(self, value: Any) -> list[Any]:
        self.broadcast_result(CollectiveCall.GATHERED, None)
        return self._host.transport.all_gather_object(value)

    def watch(self) -> AbstractContextManager[None]:
        return self._host.watch()

    def close(self) -> None:
        with self.watch():
            for _, line in self._host.lines.values():
                line.put(Head(Kind.END))
            self.broadcast_result(CollectiveCall.CLOSE, None)
            self._host.close()
