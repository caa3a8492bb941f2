"""Workers started apart (by torchrun) agree on one plan: rank 0 measures and decides, or all give up alike."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec, parse
from polylane.runtime.materialize import Init
from polylane.runtime.prepare import Objective, Prepared, prepare
from polylane.runtime.world import World


def prepare_together(
    world: World,
    model: nn.Module,
    objectives: dict[str, Objective],
    example: Any,
    plan: str | Spec | Plan,
    batch_size: int | None,
    init: Init | None = None,
) -> Prepared:
    """Prepare on every worker what rank 0 chose.

    Raises:
        PolylaneError: on every worker, when rank 0 could not prepare, or another worker's model is not the same.
    """
    spec = parse(plan) if isinstance(plan, str) else plan
    if spec.workers != world.size:
        raise PolylaneError(f"the plan takes {spec.workers} workers, torchrun started {world.size}")
    if world.rank == 0:
        prepared, refusal = _attempt(model, objectives, example, spec, batch_size, init)
        _broadcast(refusal if prepared is None else prepared.plan)
        if refusal is not None:
            raise refusal
    else:
        decision = _broadcast(None)
        if isinstance(decision, PolylaneError):
            raise decision
        prepared, refusal = _attempt(model, objectives, example, decision, batch_size, init)
    refusals: list[Any] = [None] * world.size
    dist.all_gather_object(refusals, None if refusal is None else str(refusal))
    for rank, reason in enumerate(refusals):
        if reason is not None:
            raise PolylaneError(reason if rank == 0 else f"on rank {rank}: {reason}")
    assert prepared is not None
    return prepared


def _attempt(
    model: nn.Module,
    objectives: dict[str, Objective],
    example: Any,
    plan: Spec | Plan,
    batch_size: int | None,
    init: Init | None,
) -> tuple[Prepared | None, PolylaneError | None]:
    try:
        return prepare(model, objectives, example, plan, batch_size=batch_size, init=init), None
    except PolylaneError as error:
        return None, error


def _broadcast(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
