"""``plan="auto"`` on running workers: rank 0 finds the best plan that takes all of them, and broadcasts it."""

from __future__ import annotations

from polylane.auto.choose import announce_best, choose
from polylane.auto.plan_broadcast import compute_on_rank0
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.plan.fixed_keys import parse_auto
from polylane.plan.plan import AnyPlan, Plan
from polylane.plan.plan_file import load_or_parse
from polylane.probe.machine import running_cluster
from polylane.runtime.transport.shared_memory.rendezvous import host_identity
from polylane.runtime.workers.world import World


def resolve_plan(world: World, problem: TrainingProblem, plan: str | AnyPlan) -> AnyPlan:
    """Return the plan to be trained: the given one, parsed, or for "auto" the best one, the same on all workers.

    Rank 0 measures the model's nodes while the others wait, and prints on stderr what it chose.

    Args:
        world: the process group of all workers.
        problem: the model, its data and its losses; "auto" takes problems of one loss only.
        plan: a plan in one line, parsed or as text, a complete plan, its file, or "auto"; "auto,data=2" has keys that
            are kept.

    Raises:
        PolylaneError: the plan cannot be parsed; or, on every worker alike, there are several hosts or several losses,
            the model cannot be captured, or nothing fits.
    """
    fixed = parse_auto(plan)
    if fixed is None:
        return load_or_parse(plan) if isinstance(plan, str) else plan
    if len(names := list(problem.objectives)) > 1:
        raise PolylaneError(
            f"plan auto compares steps of one loss, not of {len(names)} ({', '.join(names)}): say which plan"
        )
    _check_one_host(world)

    def find() -> Plan:
        cluster = running_cluster(world.size, world.device.type)
        return announce_best(choose(problem, (world.size,), cluster, fixed=fixed))

    return find() if world.size == 1 else compute_on_rank0(world, find)


def _check_one_host(world: World) -> None:
    """Refuse workers on several hosts: rank 0 alone cannot measure the links between them.

    Raises:
        PolylaneError: the workers are on more than one host.
    """
    count = len(set(world.all_gather_object(host_identity())))
    if count > 1:
        raise PolylaneError(
            f"plan auto knows one host, and these {world.size} workers are on {count}: describe the hosts and their "
            "links in a cluster file (polylane probe -o cluster.yaml, started on all of them, writes one), let "
            "polylane plan RECIPE --cluster cluster.yaml -o plan.yaml choose, and give plan.yaml as the plan"
        )
