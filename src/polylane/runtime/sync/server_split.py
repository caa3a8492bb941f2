"""Which parameters each server holds, and in whose process it lives."""

from __future__ import annotations

from collections.abc import Mapping

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.program.lower import differentiated


def shared_out(partitions: Mapping[str, Partition], plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters that each server holds: whole ones, by bytes, each the longest of those left to the
    server that has least (Graham 1969: never more than 4/3 of what the best division gives the fullest one).

    Only what some objective trains: the rest never changes.

    Raises:
        PolylaneError: there are more servers than parameters.
    """
    sizes: dict[str, int] = {}
    for partition in partitions.values():
        trained = differentiated(partition.graph)
        sizes |= {name: info.bytes for name, info in partition.graph.parameters.items() if name in trained}
    count = plan.sync.server_count
    if count > len(sizes):
        raise PolylaneError(
            f"{plan.title}: sync.servers: {count} servers are more than the {len(sizes)} parameters that are trained, "
            f"of which each is on one server: lower servers to at most {len(sizes)}"
        )
    filled = [0] * count
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        found[name] = min(range(count), key=lambda server: filled[server])
        filled[found[name]] += max(1, sizes[name])
    return tuple(tuple(name for name in sizes if found[name] == server) for server in range(count))


def host_of(plan: Plan, server: int) -> int:
    """The rank in whose process a server lives: one of its own, behind those that train, or one that trains too."""
    if plan.sync.dedicated:
        return plan.workers + server
    return server * plan.workers // plan.sync.server_count
