"""Trainer: what one objective needs on one worker to turn gradients into new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import named_parameters
from polylane.optim.trust import set_sum_over_holders
from polylane.program.program import Program
from polylane.runtime.parameters import clipping as optimizer
from polylane.runtime.parameters.clipping import GradientClipper, SumOverMesh, build_scheduler
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.pipeline.connections import replica_ranks
from polylane.runtime.sync.compression.choose import choose_compressor
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.zero.flat_shards import Shards


@dataclass
class ObjectiveUpdate:
    """What belongs to one objective on this worker.

    Attributes:
        optimizer: over the parameters of this worker, of those that the objective's optimizer takes.
        scheduler: of its learning rate, or None.
        parameter_order: names of all parameters that may get a gradient, of every worker, in the model's order.
        local_parameters: those of this worker, or the parts that it updates.
        clipper: bounds the gradients' norm, or None.
        shards: what replicas hold parts of.
        full_parameters: this worker's parameters as its passes see them.
        compressor: how its gradients are summed over replicas, in all of its lanes: what one of them could not send,
            the next one may.
    """

    optimizer: torch.optim.Optimizer
    scheduler: Any
    parameter_order: list[str]
    local_parameters: dict[str, nn.Parameter]
    clipper: GradientClipper | None
    shards: Shards
    full_parameters: dict[str, nn.Parameter]
    compressor: GradientCompressor

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        for parameter in (*self.local_parameters.values(), *self.full_parameters.values()):
            parameter.grad = None

    def update_weights(self, samples: bool = True) -> None:
        """What one device does after its backward pass; without any samples only time goes on."""
        if samples:
            if self.clipper is not None:
                self.clipper.clip_gradients()
            self.optimizer.step()
            if self.shards.flat_buffers:
                self.shards.gather_updated(self.full_parameters.keys())
        if self.scheduler is not None:
            self.scheduler.step()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients."""
        grads = [p.grad for p in self.local_parameters.values() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)


def trainers_of(
    holding: LocalModel, programs: Mapping[str, Sequence[Program]], clip_norm: float | None
) -> dict[str, ObjectiveUpdate]:
    """All that every objective needs on this worker, by name; from then on the worker holds parts only.

    Args:
        holding: what this worker holds, whole parameters until now: optimizers are made of these.
        programs: of all workers, by objective.
        clip_norm: bound on the gradients' 2-norm, or None.

    Raises:
        PolylaneError: a scheduler is none, or wants to know a metric; or gradients cannot travel as the plan says.
    """
    optimizers = {name: _optimizer_of(holding, name) for name in programs}
    holding.shard_parameters(optimizers.values())
    return {name: _trainer_of(holding, name, optimizers[name], each, clip_norm) for name, each in programs.items()}


def _optimizer_of(holding: LocalModel, name: str) -> torch.optim.Optimizer:
    """The user's optimizer of an objective, on what this worker holds."""
    prepared = holding.prepared
    _, held = _optimized_parameters(holding, name)
    every = named_parameters(prepared.model, holding.tensors.losses)
    return optimizer.build_optimizer(prepared.objectives[name], list(held.items()), every)  # type: ignore[no-any-return]


def _trainer_of(
    holding: LocalModel,
    name: str,
    built: torch.optim.Optimizer,
    programs: Sequence[Program],
    clip_norm: float | None,
) -> ObjectiveUpdate:
    order, whole = _optimized_parameters(holding, name)
    held = holding.shards.updated_parameters(whole)
    if holding.prepared.layouts or holding.shard_units.units:
        set_sum_over_holders(built, _build_part_sums(holding, order, held))
    clipper = None if clip_norm is None else _build_clipper(holding, order, held, programs, clip_norm)
    scheduler = build_scheduler(holding.prepared.objectives[name].scheduler, built)
    codec = choose_compressor(holding.prepared.plan.sync, whole)
    return ObjectiveUpdate(built, scheduler, order, held, clipper, holding.shards, whole, codec)


def _optimized_parameters(holding: LocalModel, name: str) -> tuple[list[str], dict[str, nn.Parameter]]:
    """All parameters that may get a gradient of an objective, in the model's order; and those of this worker."""
    graph = holding.prepared.partitions[name].graph
    parameters, info = holding.tensors.parameters(), graph.parameters
    used = {p for node in graph.nodes for p in node.parameters}
    order = [n for n in info if info[n].trainable and n in used]
    return order, {n: parameters[n] for n in order if holding.stage in holding.owning_stages[n]}


def _build_clipper(
    holding: LocalModel,
    order: Sequence[str],
    held: dict[str, nn.Parameter],
    programs: Sequence[Program],
    clip_norm: float,
) -> GradientClipper:
    reduced = {p for program in programs for bucket in program.buckets for p in bucket.parameters}
    return GradientClipper(
        clip_norm,
        [n for n in order if n in reduced],
        [n for n in _counted_names(holding, held) if n in reduced],
        held,
        holding.world.device,
        _make_replica_sum(holding),
    )


def _build_part_sums(holding: LocalModel, order: Sequence[str], held: dict[str, nn.Parameter]) -> SumOverMesh:
    return SumOverMesh(order, _counted_names(holding, held), held, holding.world.device, _make_replica_sum(holding))


def _counted_names(holding: LocalModel, held: Iterable[str]) -> list[str]:
    """Names of which this worker's part, or the whole, counts in the sums of :func:`_make_replica_sum`: each part
    once.
    """
    plan, shards = holding.prepared.plan, holding.shards
    first = plan.stage_and_replica(holding.world.rank)[1] == 0
    if not (plan.resplits_batch or holding.shard_units.units):
        first = True  # else all replicas are summed over, and the first ones count
    mine = [n for n in held if holding.stage == min(holding.owning_stages[n])]
    return [
        n
        for n in mine
        if holding.shard_spec.is_counted("parameter", n) and (shards.is_counted if n in shards.buffer_of else first)
    ]


def _make_replica_sum(holding: LocalModel) -> Callable[[Tensor], Tensor]:
    """Sums over this replica; over all replicas where they hold parts, or where stages have different ones."""
    plan = holding.prepared.plan
    together = range(plan.workers) if holding.shard_units.units else replica_ranks(plan, holding.world.rank)
    return lambda values: holding.transport.all_reduce(values, together).wait()
