"""Replay of asynchronous parameter servers: their recorded updates again, in one process, without any of their code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.program.server_assignment import assign_parameters
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate
from polylane.verify.local_sgd_reference import ReferenceReplica
from polylane.verify.record import ComparedTraining, ReferenceRun

_Step = tuple[int, int]  # number of the replica, and of its step


def replay_updates(training: ComparedTraining, orders: Sequence[Sequence[ServerUpdate]]) -> ReferenceRun:
    """Train again as asynchronous servers did: from the same weights, each gradient at the weights that it had read.

    Args:
        training: the training that is compared; its model is not changed.
        orders: the updates of each server, as :meth:`polylane.runtime.job.Job.updates` returns them.

    Returns:
        The loss of each step over all replicas, each at the weights that it had read; the gradients of the first
        replica's first step; weights and buffers after the last update, with running statistics as the replicas' means.

    Raises:
        ValueError: no training can have had this order.
    """
    prepared, steps = training.prepared, range(len(training.batches))
    if len(prepared.objectives) > 1:
        raise ValueError("a replay knows one loss: several of them share servers' weights in turn")
    if not prepared.plan.sync.is_replica_local:
        raise ValueError("synchronous updates are those of one device: there is no order to replay")
    count = prepared.plan.data
    replicas = [ReferenceReplica(training, number, count) for number in range(count)]
    shares = assign_parameters(prepared.partitions, prepared.plan)
    reads = _versions_read(orders)
    servers = [
        _ReplayedServer(training, share, order, {read[number] for read in reads.values()})
        for number, (share, order) in enumerate(zip(shares, orders, strict=True))
    ]
    losses: dict[_Step, tuple[float, float]] = {}
    gradients: dict[_Step, dict[str, Tensor]] = {}
    # Every server repeats its own updates in order. The gradients of a replica's step need the weights that it had read
    # of all servers, so that a server waits here until the others have come to those versions.
    while any(server.next_update for server in servers):
        version_sum = sum(server.version for server in servers)
        for server in servers:
            while (update := server.next_update) is not None:
                key = update.replica, update.step
                if key not in gradients:
                    if any(s.version < version for s, version in zip(servers, reads[key], strict=True)):
                        break  # another server is not yet where this replica read it
                    losses[key], gradients[key] = _take_gradients(servers, replicas, reads[key], update)
                server.apply_update(update, gradients[key])
        if sum(server.version for server in servers) == version_sum:
            raise ValueError("each server's next update waits for another one's: no training has had this order")
    parts = [[losses[r, step] for r in range(count) if (r, step) in losses] for step in steps]
    means = [sum(total for total, _ in step_losses) / sum(n for _, n in step_losses) for step_losses in parts]
    first_gradients, eager = gradients.get((0, 0), {}), replicas[0].loop.is_eager
    return ReferenceRun(means, first_gradients, _assemble_state(prepared, replicas, servers, steps), [], eager)


def _versions_read(orders: Sequence[Sequence[ServerUpdate]]) -> dict[_Step, list[int]]:
    """Return, for each replica's step, the version of every server's weights that it had read."""
    versions: dict[_Step, list[int]] = {}
    for number, order in enumerate(orders):
        for update in order:
            versions.setdefault((update.replica, update.step), [0] * len(orders))[number] = update.read_version
    return versions


class _ReplayedServer:
    """One server's weights: a copy of the model, of which the server's own parameters are trained.

    Only the versions that some replica has read are kept.
    """

    def __init__(
        self, training: ComparedTraining, share: Sequence[str], order: Sequence[ServerUpdate], read: set[int]
    ) -> None:
        self._copy = ReferenceReplica(training, 0, 1)
        self.trained_parameters = {n: p for n, p in self._copy.trained_parameters.items() if n in share}
        self._updates, self._versions_read, self.version = order, read, 0
        self.kept_versions: dict[int, dict[str, Tensor]] = {}
        self._keep_version()

    @property
    def next_update(self) -> ServerUpdate | None:
        """The next recorded update, None after the last one."""
        return self._updates[self.version] if self.version < len(self._updates) else None

    def apply_update(self, update: ServerUpdate, gradients: Mapping[str, Tensor]) -> None:
        """Apply one recorded update with these gradients.

        Raises:
            ValueError: the record numbers this update otherwise.
        """
        for name, parameter in self.trained_parameters.items():
            parameter.grad = gradients.get(name)
        self._copy.step_key = (self.version,)
        self._copy.update_weights()
        self.version += 1
        if update.version != self.version:
            raise ValueError(f"update {self.version} of a server is recorded as {update.version}")
        self._keep_version()

    def _keep_version(self) -> None:
        if self.version in self._versions_read:
            self.kept_versions[self.version] = {name: p.detach().clone() for name, p in self.trained_parameters.items()}


def _take_gradients(
    servers: Sequence[_ReplayedServer],
    replicas: Sequence[ReferenceReplica],
    read: Sequence[int],
    update: ServerUpdate,
) -> tuple[tuple[float, float], dict[str, Tensor]]:
    """Return the loss and the gradients of one replica's step, at the weights that it had read."""
    replica = replicas[update.replica]
    with torch.no_grad():
        for server, version in zip(servers, read, strict=True):
            for name, value in server.kept_versions[version].items():
                replica.trained_parameters[name].copy_(value)
    sums = replica.loop.backward(update.step)
    return sums, {name: gradient.clone() for name, gradient in replica.loop.named_gradients().items()}


def _assemble_state(
    prepared: CompiledTraining,
    replicas: Sequence[ReferenceReplica],
    servers: Sequence[_ReplayedServer],
    steps: range,
) -> dict[str, Tensor]:
    # Trained parameters are the servers'; running statistics are averaged by samples; the rest is replica 0's.
    samples = [sum(map(replica.loop.count_samples, steps)) for replica in replicas]
    states = [replica.model.state_dict() for replica in replicas]
    means = {
        name: sum((n / sum(samples) * state[name] for n, state in zip(samples, states, strict=True)), torch.zeros(()))
        for name, value in states[0].items()
        if value.is_floating_point()
    }
    trained = {
        name: parameter.detach().clone() for server in servers for name, parameter in server.trained_parameters.items()
    }
    tied = prepared.main_partition.graph.tied
    return {name: trained.get(tied.get(name, name), means.get(name, value)) for name, value in states[0].items()}
