"""Choice of gradient synchronization: the rule by which this worker's replica agrees with the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from polylane.runtime.holding import Holding
from polylane.runtime.mesh import Waits
from polylane.runtime.sync.local_steps import LocalSteps
from polylane.runtime.sync.rule import Rule
from polylane.runtime.sync.server_host import opened
from polylane.runtime.sync.server_rule import FromServers
from polylane.runtime.world import World

if TYPE_CHECKING:
    from polylane.runtime.trainer import Trainer


def rule_of(
    holding: Holding, trainers: Mapping[str, Trainer], everyone: World, clip_norm: float | None, waits: Waits
) -> Rule:
    """How this worker's replica agrees with the others; all workers must ask for it.

    Args:
        holding: what the worker holds.
        trainers: optimizers and their parameters, by the name of the objective.
        everyone: the world with those in it that only serve parameters.
        clip_norm: bound on the gradients' 2-norm, or None.
        waits: where the time is counted that a step spends waiting.
    """
    plan, rank, transport = holding.prepared.plan, holding.world.rank, holding.transport
    held = {name: buffer for name, buffer in holding.held().items() if not isinstance(buffer, nn.Parameter)}
    if plan.sync.serves:
        host = opened(everyone, holding.prepared, holding.holders, clip_norm)
        parameters = {name: p for trainer in trainers.values() for name, p in trainer.held.items()}
        return FromServers(plan, host, trainers, parameters, held, transport, waits)
    if plan.sync.every > 1:
        trained = {name: trainer.held for name, trainer in trainers.items()}
        return LocalSteps(plan.sync, plan.group(rank, ("data",)), transport, trained, held)
    return Rule(transport)
