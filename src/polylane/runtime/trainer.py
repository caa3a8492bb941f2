"""Trainer: what one objective needs on one worker to turn gradients into new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.optim.trust import bind
from polylane.program.program import Program
from polylane.runtime import optimizer
from polylane.runtime.connections import replica_of
from polylane.runtime.holding import Holding
from polylane.runtime.optimizer import Clipper, PartSums, scheduler_of
from polylane.runtime.prepare import named_parameters
from polylane.runtime.sync.codec import Codec
from polylane.runtime.sync.compress import codec_of
from polylane.runtime.sync.sharded import Shards


@dataclass
class Trainer:
    """What belongs to one objective on this worker.

    Attributes:
        optimizer: over the parameters of this worker, of those that the objective's optimizer takes.
        scheduler: of its learning rate, or None.
        order: names of all parameters that may get a gradient, of every worker, in the model's order.
        held: those of this worker, or the parts that it updates.
        clipper: bounds the gradients' norm, or None.
        shards: what replicas hold parts of.
        whole: this worker's parameters as its passes see them.
        codec: how its gradients are summed over replicas, in all of its lanes: what one of them could not send, the
            next one may.
    """

    optimizer: torch.optim.Optimizer
    scheduler: Any
    order: list[str]
    held: dict[str, nn.Parameter]
    clipper: Clipper | None
    shards: Shards
    whole: dict[str, nn.Parameter]
    codec: Codec

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        for parameter in (*self.held.values(), *self.whole.values()):
            parameter.grad = None

    def update(self, samples: bool = True) -> None:
        """What one device does after its backward pass; without any samples only time goes on."""
        if samples:
            if self.clipper is not None:
                self.clipper.clip()
            self.optimizer.step()
            if self.shards.flats:
                self.shards.share(self.whole.keys())
        if self.scheduler is not None:
            self.scheduler.step()

    def rescale(self, factor: float) -> None:
        """Multiply the gradients."""
        grads = [p.grad for p in self.held.values() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)


def trainers_of(
    holding: Holding, programs: Mapping[str, Sequence[Program]], clip_norm: float | None
) -> dict[str, Trainer]:
    """All that every objective needs on this worker, by name; from then on the worker holds parts only.

    Args:
        holding: what this worker holds, whole parameters until now: optimizers are made of these.
        programs: of all workers, by objective.
        clip_norm: bound on the gradients' 2-norm, or None.

    Raises:
        PolylaneError: a scheduler is none, or wants to know a metric; or gradients cannot travel as the plan says.
    """
    optimizers = {name: _optimizer_of(holding, name) for name in programs}
    holding.keep_parts(optimizers.values())
    return {name: _trainer_of(holding, name, optimizers[name], each, clip_norm) for name, each in programs.items()}


def _optimizer_of(holding: Holding, name: str) -> torch.optim.Optimizer:
    """The user's optimizer of an objective, on what this worker holds."""
    prepared = holding.prepared
    _, held = _optimized(holding, name)
    every = named_parameters(prepared.model, holding.tensors.losses)
    return optimizer.build(prepared.objectives[name], list(held.items()), every)  # type: ignore[no-any-return]


def _trainer_of(
    holding: Holding,
    name: str,
    built: torch.optim.Optimizer,
    programs: Sequence[Program],
    clip_norm: float | None,
) -> Trainer:
    order, whole = _optimized(holding, name)
    held = holding.shards.updated(whole)
    if holding.prepared.layouts or holding.layout.units:
        bind(built, _part_sums(holding, order, held))
    clipper = None if clip_norm is None else _clipper(holding, order, held, programs, clip_norm)
    scheduler = scheduler_of(holding.prepared.objectives[name].scheduler, built)
    codec = codec_of(holding.prepared.plan.sync, whole)
    return Trainer(built, scheduler, order, held, clipper, holding.shards, whole, codec)


def _optimized(holding: Holding, name: str) -> tuple[list[str], dict[str, nn.Parameter]]:
    """All parameters that may get a gradient of an objective, in the model's order; and those of this worker."""
    graph = holding.prepared.partitions[name].graph
    parameters, info = holding.tensors.parameters(), graph.parameters
    used = {p for node in graph.nodes for p in node.parameters}
    order = [n for n in info if info[n].trainable and n in used]
    return order, {n: parameters[n] for n in order if holding.stage in holding.holders[n]}


def _clipper(
    holding: Holding,
    order: Sequence[str],
    held: dict[str, nn.Parameter],
    programs: Sequence[Program],
    clip_norm: float,
) -> Clipper:
    reduced = {p for program in programs for bucket in program.buckets for p in bucket.parameters}
    return Clipper(
        clip_norm,
        [n for n in order if n in reduced],
        [n for n in _counted(holding, held) if n in reduced],
        held,
        holding.world.device,
        _sum_replica(holding),
    )


def _part_sums(holding: Holding, order: Sequence[str], held: dict[str, nn.Parameter]) -> PartSums:
    return PartSums(order, _counted(holding, held), held, holding.world.device, _sum_replica(holding))


def _counted(holding: Holding, held: Iterable[str]) -> list[str]:
    """Names of which this worker's part, or the whole, counts in the sums of :func:`_sum_replica`: each part once."""
    plan, shards = holding.prepared.plan, holding.shards
    first = plan.place(holding.world.rank)[1] == 0
    if not (plan.redivides or holding.layout.units):
        first = True  # else all replicas are summed over, and the first ones count
    mine = [n for n in held if holding.stage == min(holding.holders[n])]
    return [n for n in mine if holding.pieces.counts("parameter", n) and (shards.counts if n in shards.of else first)]


def _sum_replica(holding: Holding) -> Callable[[Tensor], Tensor]:
    """Sums over this replica; over all replicas where they hold parts, or where stages have different ones."""
    plan = holding.prepared.plan
    together = range(plan.workers) if holding.layout.units else replica_of(plan, holding.world.rank)
    return lambda values: holding.transport.all_reduce(values, together).wait()
