"""Synchronization checks: whether a training fits a plan's way of keeping its replicas and stages in step."""

from __future__ import annotations

from collections.abc import Mapping

from polylane.compile.objectives import Parameters
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.graph.python_state.gradient_hooks import hooked_names
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan
from polylane.program.server_assignment import assign_parameters
from polylane.samples.running_norms import find_running_norms


def check_sync(plan: Plan, partitions: Mapping[str, Partition], couples_samples: bool) -> None:
    """Refuse a plan's gradient synchronization that the training does not fit, before any worker starts.

    Raises:
        PolylaneError: the loss couples samples, or there are more servers than parameters.
    """
    # With coupled samples replicas shard the operators of one batch: no replica has a gradient of its own that could be
    # compressed, averaged later, or sent to a server.
    if couples_samples and plan.data > 1 and not plan.sync.is_plain_sum:
        raise PolylaneError(
            f"{plan.title}: sync ({','.join(plan.sync.to_words())}) is for losses that are means over samples, and in "
            "this one samples meet: leave sync out, or split by pipeline or tensor alone"
        )
    for partition in partitions.values() if plan.takes_turns else ():
        names = {n.name for s in range(plan.pipeline) if plan.degree("data", s) > 1 for n in partition.nodes(s)}
        find_running_norms(partition.graph.code.fx, names)  # for its errors alone
    if couples_samples and plan.takes_turns and plan.data > 1:
        raise PolylaneError(
            f"{plan.title}: replicas: {plan.replicas} is for losses that are means over samples, and in this one "
            "samples meet: leave replicas out, or split by pipeline or tensor alone"
        )
    if plan.sync.has_servers:
        assign_parameters(partitions, plan)  # for its errors alone
    if plan.is_asynchronous:
        _check_asynchronous(plan, partitions)


def refuse_hooks_on_servers(plan: Plan, parameters: Parameters) -> None:
    """Refuse hooks on gradients that a parameter server sums, in a process without the user's hooks."""
    if plan.sync.has_servers and (hooked := hooked_names(parameters)):
        raise PolylaneError(
            f"{plan.title}: servers sum the gradient of {hooked[0]}, and the hook on it would see one worker's part: "
            "leave servers out, or the hook"
        )


def _check_asynchronous(plan: Plan, partitions: Mapping[str, Partition]) -> None:
    """Refuse a training that a pipeline cannot run without being emptied between steps.

    Raises:
        PolylaneError: there are several losses, the loss is no mean over samples, or stages share a weight.
    """
    if len(partitions) > 1:
        raise PolylaneError(
            f"{plan.title}: schedule: {plan.schedule} trains with one loss, and here are {len(partitions)}: take a "
            "schedule that waits"
        )
    (partition,) = partitions.values()
    fit.check_asynchronous(plan, partition)
