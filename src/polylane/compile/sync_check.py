"""Check of a plan's sync against a training, before any worker starts."""

from __future__ import annotations

from collections.abc import Mapping

from polylane.compile.server_assignment import assign_parameters
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan


def check_sync(plan: Plan, partitions: Mapping[str, Partition], meets: bool) -> None:
    """Refuse a rule that the training does not fit.

    Args:
        plan: how it is split.
        partitions: every objective's graph, by name.
        meets: whether every sample counts for the loss of every other one.

    Raises:
        PolylaneError: samples meet, or there are more servers than parameters.
    """
    if meets and plan.data > 1 and not plan.sync.is_plain_sum:
        raise PolylaneError(
            f"{plan.title}: sync ({','.join(plan.sync.to_words())}) is for losses that are means over samples, and in "
            "this one samples meet: leave sync out, or split by pipeline or tensor alone"
        )
    if plan.sync.has_servers:
        assign_parameters(partitions, plan)
