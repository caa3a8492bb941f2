"""Trainer: what one objective needs on one worker to turn gradients into new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from polylane.errors import PolylaneError
from polylane.program.program import Program
from polylane.runtime import optimizer
from polylane.runtime.binding import Lanes
from polylane.runtime.connections import replica_of
from polylane.runtime.holding import Holding
from polylane.runtime.optimizer import Clipper
from polylane.runtime.prepare import Objective, named_parameters


@dataclass
class Trainer:
    """What belongs to one objective on this worker.

    Attributes:
        optimizer: over the parameters of this worker, of those that the objective's optimizer takes.
        scheduler: of its learning rate, or None.
        order: names of all parameters that may get a gradient, of every worker, in the model's order.
        held: those of this worker.
        clipper: bounds the gradients' norm, or None.
        lanes: the objective's graphs, bound, by the form of their batches.
    """

    optimizer: torch.optim.Optimizer
    scheduler: Any
    order: list[str]
    held: dict[str, nn.Parameter]
    clipper: Clipper | None
    lanes: Lanes = field(default_factory=dict)

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        for parameter in self.held.values():
            parameter.grad = None

    def update(self, samples: bool = True) -> None:
        """What one device does after its backward pass; without any samples only time goes on."""
        if samples:
            if self.clipper is not None:
                self.clipper.clip()
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def rescale(self, factor: float) -> None:
        """Multiply the gradients."""
        grads = [p.grad for p in self.held.values() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)


def optimizer_of(holding: Holding, name: str) -> torch.optim.Optimizer:
    """The user's optimizer of an objective, on what this worker holds."""
    prepared = holding.prepared
    _, held = _optimized(holding, name)
    every = named_parameters(prepared.model, holding.tensors.losses)
    return optimizer.build(prepared.objectives[name], list(held.items()), every)  # type: ignore[no-any-return]


def trainer_of(
    holding: Holding,
    name: str,
    built: torch.optim.Optimizer,
    programs: Sequence[Program],
    clip_norm: float | None,
) -> Trainer:
    """All that an objective needs on this worker, but for its lanes.

    Args:
        holding: what this worker holds.
        name: of the objective.
        built: its optimizer.
        programs: of all workers.
        clip_norm: bound on the gradients' 2-norm, or None.

    Raises:
        PolylaneError: its scheduler wants to know a metric.
    """
    order, held = _optimized(holding, name)
    clipper = None if clip_norm is None else _clipper(holding, order, held, programs, clip_norm)
    return Trainer(built, _scheduler(holding.prepared.objectives[name], built), order, held, clipper)


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
    plan, world = holding.prepared.plan, holding.world
    reduced = {p for program in programs for bucket in program.buckets for p in bucket.parameters}
    counts = plan.uniform or plan.place(world.rank)[1] == 0  # else all replicas are summed over
    counted = [n for n in held if counts and n in reduced and holding.stage == min(holding.holders[n])]
    together = replica_of(plan, world.rank)
    return Clipper(
        clip_norm,
        [n for n in order if n in reduced],
        [n for n in counted if holding.pieces.counts("parameter", n)],
        held,
        world.device,
        lambda v: holding.transport.all_reduce(v, together).wait(),
    )


def _scheduler(objective: Objective, built: torch.optim.Optimizer) -> Any:
    scheduler = objective.scheduler(built) if objective.scheduler is not None else None
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise PolylaneError(
            "scheduler(optimizer): ReduceLROnPlateau steps on a metric, not on steps: leave it out here, make it "
            "of job.optimizer, and step it after each evaluation"
        )
    return scheduler
