"""``plan="auto"`` on workers that are here: rank 0 finds the best plan that takes all of them, all ranks get it."""

from __future__ import annotations

import socket
from pathlib import Path

from polylane.auto.choose import best_plan
from polylane.auto.plan_broadcast import compute_on_rank0
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.plan.spec import AUTO, Spec, parse
from polylane.probe.machine import running_cluster
from polylane.runtime.workers.world import World

# Changes with every start of a machine, and is the same for all of its containers.
BOOT = Path("/proc/sys/kernel/random/boot_id")


def resolve_plan(world: World, problem: TrainingProblem, plan: str | Spec | Plan) -> Spec | Plan:
    """A plan as it was given, read; for "auto" the best one that takes every worker, the same on all of them.

    Rank 0 measures the model's nodes while the others wait, and says on stderr what it chose.

    Args:
        world: the process group of all workers.
        problem: what is to be trained; "auto" takes problems of one loss only.
        plan: one line, read or not, a plan, or "auto".

    Raises:
        PolylaneError: the plan cannot be read; or, on every worker alike, there are several hosts or several losses,
            the model cannot be captured, or nothing fits.
    """
    if plan != AUTO:
        return parse(plan) if isinstance(plan, str) else plan
    if len(names := list(problem.objectives)) > 1:
        raise PolylaneError(
            f"plan auto compares steps of one loss, not of {len(names)} ({', '.join(names)}): say which plan"
        )
    _check_one_host(world)

    def find() -> Plan:
        return best_plan(problem, (world.size,), running_cluster(world.size, world.device.type))

    return find() if world.size == 1 else compute_on_rank0(world, find)


def _check_one_host(world: World) -> None:
    """Refuse several hosts: nothing that rank 0 could measure alone says how they are linked."""
    count = len(set(world.all_gather_object(host())))
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
