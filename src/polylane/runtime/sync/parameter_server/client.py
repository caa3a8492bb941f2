"""Parameter-server client: a training worker pushes gradients to the servers and pulls its weights from them.

worker                   forward, backward | push gradients | wait    | pull weights
server, synchronous                        | from all replicas        | one update
server, asynchronous                       | from one replica         | one update; answered at once, unless this
                                                                        replica is too far ahead of the slowest
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from polylane.compile.optimizer_sequence import optimizers_in
from polylane.runtime.connections.connections import replica_ranks
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.parameters.optimizer import step_scheduler
from polylane.runtime.span_clock import CollectiveWaits
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.sync.flat_packing import FlatPacking
from polylane.runtime.sync.gradient_sync import CollectiveCall, GradientSync, LocalOptimizer
from polylane.runtime.sync.objective_update import ObjectiveUpdate
from polylane.runtime.sync.parameter_server.host import ServerHost
from polylane.runtime.sync.parameter_server.messages import CPU, Channel, MessageHead, MessageKind
from polylane.runtime.sync.parameter_server.packing import ServerShard
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate
from polylane.runtime.sync.parameter_server.weights import encode_options
from polylane.runtime.sync.replica_mean import average_over_replicas, averaged_buffers, copy_values, restore_values
from polylane.runtime.transport.protocol import TransportCounters


class ParameterServerSync(GradientSync):
    """Synchronization through parameter servers: gradients are pushed, weights are pulled.

    The worker's own optimizer never steps. Its options are the servers' options: changes by the user are sent with the
    next gradients, and its scheduler follows the server that has made the most updates.

    Args:
        local_model: the parameters and buffers of this worker.
        host: channels to all servers, and the servers in this process.
        updates: optimizers and their parameters, by the name of the objective.
        waits: counter to which time and bytes spent on servers are added.

    Attributes:
        staleness: updates by others between reading the weights of the last step and its update, the most of any
            server.
    """

    def __init__(
        self, local_model: LocalModel, host: ServerHost, updates: Mapping[str, ObjectiveUpdate], waits: CollectiveWaits
    ) -> None:
        super().__init__(local_model.transport)
        plan, rank = local_model.prepared.plan, local_model.world.rank
        self._host, self._sync, self._waits = host, plan.sync, waits
        self._updates, self._objective_names = updates, list(updates)
        self._parameters = {name: p for update in updates.values() for name, p in update.local_parameters.items()}
        # What is frozen from the start is on no server: workers have it, and nobody changes it.
        self._server_parameters = frozenset(
            name for objective in updates for name in local_model.prepared.trained_names(objective)
        )
        self._buffers = averaged_buffers(local_model)
        self._versions = dict.fromkeys(host.channels, 0)
        self._updates_seen = dict.fromkeys(updates, 0)
        self._sent_options = {name: encode_options(update.optimizer) for name, update in updates.items()}
        self._steps = self.staleness = 0
        self._members = plan.group(rank, ("data",))
        self._samples_seen = [0] * len(self._members)
        # Servers answer once they have the gradients of all replicas, or else those of this one.
        answered = (rank,) if plan.sync.is_replica_local else self._members
        self._watched = self._waits.progress.add_line(f"servers of {answered}", answered) or 0
        self.loss_ranks = replica_ranks(plan, rank) if plan.sync.is_replica_local else None
        self._send_first_weights()

    def _send_first_weights(self) -> None:
        """Send the servers their initial weights: those of replica 0, which are equal on all replicas."""
        for update in self._updates.values():
            if update.scheduler is not None:  # torch warns if a scheduler steps before its optimizer ever did
                for optimizer in optimizers_in(update.optimizer):
                    optimizer._opt_called = True  # type: ignore[attr-defined]
        channels = [(t, line) for t, line in self._host.channels.values() if t.replica == 0]
        with self.blame_local_server():
            for server_shard, line in channels:
                line.put(MessageHead(MessageKind.WEIGHTS), server_shard.full_packings[0].pack(self._parameters, CPU))
            for _, line in channels:
                line.get(lambda head: ())
        # Other replicas push gradients only once the servers have weights.
        self._transport.barrier()

    # ---- a step ------------------------------------------------------------------------------------------------------

    @property
    def weights_differ(self) -> bool:  # type: ignore[override]
        return self._sync.is_replica_local and self._steps > 0

    def is_replica_local(self, objective: str) -> bool:
        return self._sync.is_replica_local

    def update_weights(self, objective: str, update: ObjectiveUpdate, samples: bool) -> None:
        if samples and self._sync.is_replica_local and update.clipper is not None:
            update.clipper.clip_gradients()  # the norm of a sum over replicas is known to servers only
        kind = MessageKind.GRADIENTS if samples else MessageKind.NOTHING
        options = self._changed_options(objective, update.optimizer)
        with self.blame_local_server():
            # All pushes first, then all pulls: the servers work on this step at the same time.
            for server, (server_shard, line) in self._host.channels.items():
                self._send_gradients(server, server_shard, line, kind, objective, options)
            self._waits.progress.begin_wait(self._watched, self._waits.progress.begin_operation(self._watched))
            heads = [self._receive_weights(server, *line) for server, line in self._host.channels.items()]
            self._waits.progress.end_wait()
        self._steps += 1
        self.staleness = max((head.staleness for head in heads), default=0)
        self._follow_scheduler(objective, update, max((head.updates for head in heads), default=0), bool(samples))

    def after_step(self, objective: str, samples: Sequence[int]) -> None:
        if samples:
            self._samples_seen = [total + count for total, count in zip(self._samples_seen, samples, strict=True)]

    def _send_gradients(
        self, server: int, server_shard: ServerShard, line: Channel, kind: MessageKind, objective: str, options: bytes
    ) -> None:
        rows, flags, packing = list[Tensor](), b"", server_shard.gradient_packings[objective]
        if kind is MessageKind.GRADIENTS:
            all_gradients = {name: self._parameters[name].grad for name in packing.names}
            gradients = {name: gradient for name, gradient in all_gradients.items() if gradient is not None}
            rows, flags = packing.pack(gradients, CPU), bytes(name in gradients for name in packing.names)
            self._waits.bytes += packing.nbytes
            if options:
                rows.append(torch.frombuffer(bytearray(options), dtype=torch.uint8))
        extra = len(options) if kind is MessageKind.GRADIENTS else 0
        number, version = self._objective_names.index(objective), self._versions[server]
        line.put(MessageHead(kind, number, self._steps, version, option_bytes=extra, flags=flags), rows)

    def _receive_weights(self, server: int, server_shard: ServerShard, line: Channel) -> MessageHead:
        """Wait for a server's answer and load the new weights in it."""
        head, values = self._receive_answer(server_shard, line)
        copy_values(self._parameters, values)
        self._versions[server] = head.version
        return head

    def _receive_answer(self, server_shard: ServerShard, line: Channel) -> tuple[MessageHead, dict[str, Tensor]]:
        """Return the head of a server's next answer, and the weights in it by name."""

        def packing(head: MessageHead) -> FlatPacking:
            sent = [name for number, name in enumerate(self._objective_names) if head.objectives >> number & 1]
            return server_shard.weights_of(sent)

        with self._waits.timing():
            head, rows = line.get(lambda head: packing(head).sizes)
        return head, packing(head).unpack(rows)

    # ---- optimizer options that the user changes ---------------------------------------------------------------------

    def _changed_options(self, objective: str, optimizer: torch.optim.Optimizer) -> bytes:
        """Return the optimizer's encoded options if the user changed them since the last step; else no bytes."""
        options = encode_options(optimizer)
        return b"" if options == self._sent_options[objective] else options

    def _follow_scheduler(self, objective: str, update: ObjectiveUpdate, updates: int, sent: bool) -> None:
        """Step this worker's scheduler as often as the servers' one, so that its learning rates are theirs.

        Args:
            objective: name of the objective that was stepped.
            update: its optimizer and scheduler on this worker.
            updates: updates of the objective by the server that made the most.
            sent: whether this step sent gradients, and changed options with them.
        """
        # Options that the user changed and that were not sent yet stay different from _sent_options.
        changed = not sent and self._changed_options(objective, update.optimizer)
        for _ in range(updates - self._updates_seen[objective] if update.scheduler is not None else 0):
            step_scheduler(update.scheduler)
        self._updates_seen[objective] = updates
        if not changed:
            self._sent_options[objective] = encode_options(update.optimizer)

    # ---- reading state of the servers --------------------------------------------------------------------------------

    def load_summed_gradients(self, objective: str) -> None:
        # Replica-local steps use the gradients that are here already; summed ones are on the servers only.
        if self._sync.is_replica_local or not self._steps:
            return
        number, lines = self._objective_names.index(objective), self._host.channels.values()
        with self.blame_local_server():
            for _, line in lines:
                line.put(MessageHead(MessageKind.READ_GRADIENTS, number))
            for server_shard, line in lines:
                packing = server_shard.weight_packings[objective]
                head, rows = line.get(lambda head, sizes=packing.sizes: sizes)  # type: ignore[misc]
                gradients = packing.unpack(rows, next(iter(self._parameters.values())).device)
                for name, flag in zip(packing.names, head.flags, strict=False):
                    self._parameters[name].grad = gradients[name] if flag else None

    def stepping_optimizers(self) -> list[LocalOptimizer]:
        return self._host.stepping_optimizers()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        if not self._sync.is_replica_local:
            yield
            return
        with restore_values([*self._parameters.values(), *self._buffers.values()]):
            with self.blame_local_server():
                self._transport.barrier()  # steps of all workers have been applied: all read the same weights
                for _, line in self._host.channels.values():
                    line.put(MessageHead(MessageKind.READ_WEIGHTS))
                for server_shard, line in self._host.channels.values():
                    copy_values(self._parameters, self._receive_answer(server_shard, line)[1])
            # Servers have no buffers: running statistics are averaged over replicas, weighted by samples.
            if any(self._samples_seen):
                means = average_over_replicas(self._buffers, self._samples_seen, self._members, self._transport)
                copy_values(self._buffers, means)
            yield

    def server_updates(self) -> tuple[tuple[ServerUpdate, ...], ...]:
        self._transport.barrier()
        with self.blame_local_server():
            self.broadcast_result(CollectiveCall.UPDATES, None)
            return self._host.gather_updates()

    def server_counters(self) -> tuple[TransportCounters, ...]:
        return self._host.counters

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def server_parameters(self) -> Collection[str]:
        return self._server_parameters

    def collect_state(self, replica: int) -> WorkerState:
        state = self._host.collect_state()
        state.plain[f"server_client/{replica}"] = self._samples_seen
        return state

    def restore_state(self, saved: SavedState, replica: int) -> None:
        self._host.restore_state(saved)
        counts = saved.plain.get(f"server_client/{replica}", [])
        self._samples_seen = list(counts) if len(counts) == len(self._members) else [0] * len(self._members)
        # The servers have the options of the checkpoint as well: there is nothing to send.
        self._sent_options = {name: encode_options(t.optimizer) for name, t in self._updates.items()}

    # ---- dedicated servers -------------------------------------------------------------------------------------------

    def broadcast_result(self, call: CollectiveCall, value: Any) -> None:
        # One worker tells the dedicated servers: their channels lead from rank 0.
        if self._transport.rank == 0:
            self._host.broadcast_result(call, value)

    def all_gather_object(self, value: Any) -> list[Any]:
        with self.blame_local_server():
            self.broadcast_result(CollectiveCall.GATHERED, None)
            return self._host.transport.all_gather_object(value)

    def blame_local_server(self) -> AbstractContextManager[None]:
        return self._host.watch()

    def leave(self) -> None:
        with self.blame_local_server():
            for _, line in self._host.channels.values():
                line.put(MessageHead(MessageKind.END))

    def close(self) -> None:
        with self.blame_local_server():
            self.broadcast_result(CollectiveCall.CLOSE, None)
            self._host.close()
