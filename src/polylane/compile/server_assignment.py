"""Assignment of parameters to servers, and of servers to processes."""

from __future__ import annotations

from collections.abc import Mapping

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.program.lower import differentiable_parameters


def assign_parameters(partitions: Mapping[str, Partition], plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters that each server holds: whole ones, balanced by bytes.

    Only what some objective trains: the rest never changes.

    Args:
        partitions: of every objective's graph, by name.
        plan: says how many servers there are.

    Raises:
        PolylaneError: there are more servers than parameters.
    """
    sizes: dict[str, int] = {}
    for partition in partitions.values():
        trained = differentiable_parameters(partition.graph)
        sizes |= {name: info.bytes for name, info in partition.graph.parameters.items() if name in trained}
    count = plan.sync.server_count
    if count > len(sizes):
        raise PolylaneError(
            f"{plan.title}: sync.servers: {count} servers are more than the {len(sizes)} parameters that are trained, "
            f"of which each is on one server: lower servers to at most {len(sizes)}"
        )
    found = assign_longest_first({name: max(1, size) for name, size in sizes.items()}, [0] * count)
    return tuple(tuple(name for name in sizes if found[name] == server) for server in range(count))


def assign_longest_first(sizes: Mapping[str, int], load: list[int]) -> dict[str, int]:
    """Longest-processing-time rule: each the largest of those left to the owner that has least so far.

    The fullest owner has at most 4/3 of what the best division would give it (Graham 1969).

    Args:
        sizes: bytes by name; of equal ones the earlier comes first.
        load: bytes that each owner has already; grows by what it is given.

    Returns:
        By name, the number of its owner.
    """
    owners = dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = load.index(min(load))
        load[owners[name]] += sizes[name]
    return owners


def server_rank(plan: Plan, server: int) -> int:
    """The rank in whose process a server lives: one of its own, behind those that train, or one that trains too."""
    if plan.sync.dedicated:
        return plan.workers + server
    return server * plan.workers // plan.sync.server_count
