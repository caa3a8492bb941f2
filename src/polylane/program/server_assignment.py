"""Parameter-server placement: which server holds which parameters, and which process runs which server."""

from __future__ import annotations

from collections.abc import Mapping

from polylane.errors import PolylaneError, format_plural
from polylane.graph.partition import Partition
from polylane.plan.plan import AnyPlan, Plan


def assign_parameters(partitions: Mapping[str, Partition], plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Assign the parameters that some objective trains to servers, each to one, balanced by bytes.

    One that no graph uses yet is among them: a later batch may.

    Args:
        partitions: partitions of every objective's graph, by name.
        plan: the plan, which says how many servers there are.

    Returns:
        For each server, the names of its parameters.

    Raises:
        PolylaneError: there are more servers than parameters.
    """
    sizes: dict[str, int] = {}
    for partition in partitions.values():
        sizes |= {name: info.bytes for name, info in partition.graph.parameters.items() if info.trainable}
    count = plan.sync.server_count
    if count > len(sizes):
        raise PolylaneError(
            f"{plan.title}: sync.servers: {count} servers are more than "
            f"{format_plural(len(sizes), 'trained parameter')}, of which each is on one server: "
            f"lower servers to at most {len(sizes)}"
        )
    # An empty parameter counts as one byte, so that empty ones are spread as well, and every server gets a parameter.
    owners = assign_longest_first({name: max(1, size) for name, size in sizes.items()}, [0] * count)
    return tuple(tuple(name for name in sizes if owners[name] == server) for server in range(count))


def assign_longest_first(sizes: Mapping[str, int], load: list[int]) -> dict[str, int]:
    """Assign by the longest-processing-time rule: in descending size, each to the owner with the least load so far.

    The fullest owner has at most 4/3 of its load in the best assignment (Graham 1969).

    Args:
        sizes: bytes by name; equal sizes are assigned in this order.
        load: bytes that each owner has already; increased in place.

    Returns:
        Name -> number of its owner.
    """
    owners = dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = load.index(min(load))
        load[owners[name]] += sizes[name]
    return owners


def server_rank(plan: AnyPlan, server: int) -> int:
    """Return the rank whose process runs a server: a dedicated one behind those that train, or one that trains too."""
    # Else spread over the workers, so that hosts share the servers' work.
    if plan.sync.dedicated:
        return plan.workers + server
    return server * plan.workers // plan.sync.server_count
