"""Sync check: refuses a gradient synchronization that the training does not fit, before any worker starts."""

from __future__ import annotations

from collections.abc import Mapping

from polylane.compile.server_assignment import assign_parameters
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan


def check_sync(plan: Plan, partitions: Mapping[str, Partition], meets: bool) -> None:
    """Refuse a plan's sync that the training does not fit.

    Args:
        plan: the plan, with its sync options.
        partitions: every objective's graph with its cuts, by name.
        meets: whether a loss couples samples (it is no mean of a loss of each).

    Raises:
        PolylaneError: the loss couples samples, or there are more servers than parameters.
    """
    # With coupled samples replicas shard the operators of one batch: no replica has a gradient of its own that could be
    # compressed, averaged later, or sent to a server.
    if meets and plan.data > 1 and not plan.sync.is_plain_sum:
        raise PolylaneError(
            f"{plan.title}: sync ({','.join(plan.sync.to_words())}) is for losses that are means over samples, and in "
            "this one samples meet: leave sync out, or split by pipeline or tensor alone"
        )
    if plan.sync.has_servers:
        assign_parameters(partitions, plan)  # for its errors alone
