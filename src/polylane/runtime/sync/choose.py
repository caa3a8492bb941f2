"""From a plan's sync to the rule by which its replicas agree."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from polylane.runtime.holding import Holding
from polylane.runtime.sync.local_steps import LocalSteps
from polylane.runtime.sync.rule import Rule


def rule_of(holding: Holding, trained: Mapping[str, Mapping[str, nn.Parameter]]) -> Rule:
    """How this worker's replica agrees with the others.

    Args:
        holding: what the worker holds.
        trained: by objective, the parameters that it trains and this worker holds.
    """
    plan, rank = holding.prepared.plan, holding.world.rank
    if plan.sync.every > 1:
        held = {name: buffer for name, buffer in holding.held().items() if not isinstance(buffer, nn.Parameter)}
        members = plan.group(rank, ("data",))
        return LocalSteps(plan.sync, plan.microbatches, members, holding.transport, trained, held)
    return Rule()
