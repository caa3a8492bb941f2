"""What parameter servers recorded, done again in one process, update by update, without any of their code."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.proof.record import Reference
from polylane.proof.replicated import Replica
from polylane.runtime.prepare import Prepared, named_parameters
from polylane.runtime.sync.server_log import Update
from polylane.runtime.sync.server_split import shared_out

_Step = tuple[int, int]  # replica, and its step


def replay(
    prepared: Prepared,
    batches: Sequence[Any],
    orders: Sequence[Sequence[Update]],
    *,
    clip_norm: float | None = None,
    seed: int = 0,
) -> Reference:
    """Train again as asynchronous servers did: from the same start, every gradient at the weights that it was taken at.

    Args:
        prepared: the training; its model is left as it is.
        batches: whole batches, one a step.
        orders: of every server, its updates, as :meth:`polylane.runtime.job.Job.updates` tells.
        clip_norm, seed: as in training.

    Returns:
        Of every step the loss over all replicas, each at the weights that it had read; the gradients of the first
        replica's first step; weights and buffers after the last update, running statistics being the replicas' means.

    Raises:
        ValueError: no training can have had this order.
    """
    if len(prepared.objectives) > 1:
        raise ValueError("a replay knows one loss: several of them share servers' weights in turn")
    if not prepared.plan.sync.alone:
        raise ValueError("synchronous updates are those of one device: there is no order to replay")
    count = prepared.plan.data
    replicas = [Replica(prepared, batches[0], number, count, clip_norm, seed) for number in range(count)]
    shares = shared_out(prepared.partitions, prepared.plan)
    reads = _reads(orders)
    servers = [
        _Server(prepared, share, order, {read[number] for read in reads.values()})
        for number, (share, order) in enumerate(zip(shares, orders, strict=True))
    ]
    losses: dict[_Step, tuple[float, float]] = {}
    gradients: dict[_Step, dict[str, Tensor]] = {}
    while any(server.left for server in servers):
        before = sum(server.version for server in servers)
        for server in servers:
            while (update := server.left) is not None:
                key = update.replica, update.step
                if key not in gradients:
                    if any(s.version < version for s, version in zip(servers, reads[key], strict=True)):
                        break  # another server is not yet where this replica read it
                    losses[key], gradients[key] = _taken(servers, replicas, reads[key], update, batches)
                server.apply(update, gradients[key])
        if sum(server.version for server in servers) == before:
            raise ValueError("each server's next update waits for another one's: no training has had this order")
    parts = [[losses[r, step] for r in range(count) if (r, step) in losses] for step in range(len(batches))]
    means = [sum(total for total, _ in each) / sum(n for _, n in each) for each in parts]
    first, eager = gradients.get((0, 0), {}), replicas[0].loop.eager
    return Reference(means, first, _state(prepared, replicas, servers, batches), [], eager)


def _reads(orders: Sequence[Sequence[Update]]) -> dict[_Step, list[int]]:
    """The versions of every server's weights at which each replica's step was taken."""
    found: dict[_Step, list[int]] = {}
    for number, order in enumerate(orders):
        for update in order:
            found.setdefault((update.replica, update.step), [0] * len(orders))[number] = update.read
    return found


class _Server:
    """One server's weights: a copy of the model of which it trains its share."""

    def __init__(self, prepared: Prepared, share: Sequence[str], order: Sequence[Update], read: set[int]) -> None:
        objective = next(iter(prepared.objectives.values()))
        model, loss = copy.deepcopy((prepared.model, objective.loss))
        named = named_parameters(model, [loss])
        self.held = {name: parameter for name, parameter in named if name in share}
        self._optimizer = objective.optimizer(list(named))
        self._scheduler = objective.scheduler(self._optimizer) if objective.scheduler else None
        self._order, self._read, self.version = order, read, 0
        self.kept: dict[int, dict[str, Tensor]] = {}
        self._keep()

    @property
    def left(self) -> Update | None:
        """Its next update."""
        return self._order[self.version] if self.version < len(self._order) else None

    def apply(self, update: Update, gradients: Mapping[str, Tensor]) -> None:
        """Make an update."""
        for name, parameter in self.held.items():
            parameter.grad = gradients.get(name)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self.version += 1
        if update.version != self.version:
            raise ValueError(f"update {self.version} of a server is recorded as {update.version}")
        self._keep()

    def _keep(self) -> None:
        if self.version in self._read:
            self.kept[self.version] = {name: p.detach().clone() for name, p in self.held.items()}


def _taken(
    servers: Sequence[_Server], replicas: Sequence[Replica], read: Sequence[int], update: Update, batches: Sequence[Any]
) -> tuple[tuple[float, float], dict[str, Tensor]]:
    """The loss and the gradients of one replica's step, at the weights that it had read."""
    replica = replicas[update.replica]
    with torch.no_grad():
        for server, version in zip(servers, read, strict=True):
            for name, value in server.kept[version].items():
                replica.trained[name].copy_(value)
    sums = replica.loop.backward(batches[update.step], update.step)
    return sums, {name: gradient.clone() for name, gradient in replica.loop.gradients().items()}


def _state(
    prepared: Prepared, replicas: Sequence[Replica], servers: Sequence[_Server], batches: Sequence[Any]
) -> dict[str, Tensor]:
    seen = [sum(replica.loop.samples(batch) for batch in batches) for replica in replicas]
    every = [replica.model.state_dict() for replica in replicas]
    means = {
        name: sum((n / sum(seen) * state[name] for n, state in zip(seen, every, strict=True)), torch.zeros(()))
        for name, value in every[0].items()
        if value.is_floating_point()
    }
    trained = {name: parameter.detach().clone() for server in servers for name, parameter in server.held.items()}
    tied = prepared.main.graph.tied
    return {name: trained.get(tied.get(name, name), means.get(name, value)) for name, value in every[0].items()}
