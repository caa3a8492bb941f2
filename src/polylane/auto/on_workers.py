"""``plan="auto"``: the plan that is best for a model on the workers that are here, found by rank 0 for all of them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from polylane.auto.plan_broadcast import found_by_first
from polylane.errors import PolylaneError
from polylane.graph.batch import flatten, sample_count
from polylane.plan.plan import Plan
from polylane.plan.spec import AUTO, Spec, parse
from polylane.runtime.optimizer_probe import whole_parameters
from polylane.runtime.prepare import Objective, named_parameters, optimized
from polylane.runtime.world import World

if TYPE_CHECKING:
    from polylane.auto.choose import Subject

# Changes with every start of a machine, and is the same for all of its containers.
BOOT = Path("/proc/sys/kernel/random/boot_id")


def settled(
    world: World,
    model: nn.Module,
    objectives: Mapping[str, Objective],
    example: Any,
    plan: str | Spec | Plan,
    batch_size: int | None,
) -> Spec | Plan:
    """A plan as it was given, read; for "auto" the best one that takes every worker, the same on all of them.

    Rank 0 measures the model's nodes while the others wait, and says on stderr what it chose.

    Raises:
        PolylaneError: the plan cannot be read; or, on every worker alike, there are several hosts or several losses,
            the model cannot be captured, or nothing fits.
    """
    if plan != AUTO:
        return parse(plan) if isinstance(plan, str) else plan
    if len(objectives) > 1:
        raise PolylaneError(
            f"plan auto compares steps of one loss, not of {len(objectives)} ({', '.join(objectives)}): say which plan"
        )
    objective = next(iter(objectives.values()))

    _check_one_host(world)

    def find() -> Plan:
        return _best(world, model, objective, example, batch_size)

    return find() if world.size == 1 else found_by_first(world, find)


def _check_one_host(world: World) -> None:
    """Refuse several hosts: nothing that rank 0 could measure alone says how they are linked."""
    count = len(set(world.exchange(host())))
    if count > 1:
        raise PolylaneError(
            f"plan auto knows one host, and these {world.size} workers are on {count}: describe the hosts and their "
            "links in a cluster file (polylane probe -o cluster.yaml measures one of them), let polylane plan RECIPE "
            "--cluster cluster.yaml -o plan.yaml choose, and give plan.yaml as the plan"
        )


def host() -> str:
    """Which machine this process is on; containers have names of their own."""
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return f"{socket.gethostname()} {boot}"


def _best(world: World, model: nn.Module, objective: Objective, example: Any, batch_size: int | None) -> Plan:
    """The best plan for all workers; says which one."""
    from polylane.auto import choose as auto
    from polylane.probe.machine import around

    given = subject(model, objective, example, batch_size)
    answer = auto.choose(given, (world.size,), around(world.size, world.device.type))
    print(auto.told(answer), file=sys.stderr, flush=True)
    return answer.found[0].plan


def subject(model: nn.Module, objective: Objective, example: Any, batch_size: int | None) -> Subject:
    """What the planner must know of a model, its loss and its optimizer.

    Args:
        model: the user's.
        objective: its one loss, with the optimizer.
        example: a batch.
        batch_size: of the training, if it is another than the example's.

    Raises:
        PolylaneError: the optimizer is wrong, or the batch has no samples.
    """
    from polylane.auto.choose import Subject

    leaves, rebuild = flatten(example)
    named = named_parameters(model, [objective.loss])
    return Subject(
        model=model,
        loss=objective.loss,
        optimizer=objective.optimizer,
        trainable=sorted(optimized(named, objective.optimizer)),
        whole={name: str(why) for name, why in whole_parameters(named, [objective.optimizer]).items()},
        leaves=leaves,
        rebuild=rebuild,
        batch=batch_size or sample_count(leaves),
    )
