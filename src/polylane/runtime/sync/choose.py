"""Choice of gradient synchronization: builds the one that the plan names, for one worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.sync.gradient_sync import GradientSync
from polylane.runtime.sync.local_sgd import LocalSgd
from polylane.runtime.sync.parameter_server.client import ParameterServerSync
from polylane.runtime.sync.parameter_server.host import open_server_host
from polylane.runtime.tensor_parallel import CollectiveWaits
from polylane.runtime.workers.world import World

if TYPE_CHECKING:
    from polylane.runtime.parameters.update import ObjectiveUpdate


def choose_sync(
    holding: LocalModel,
    trainers: Mapping[str, ObjectiveUpdate],
    everyone: World,
    clip_norm: float | None,
    waits: CollectiveWaits,
) -> GradientSync:
    """Build this worker's gradient synchronization; a collective of all workers and dedicated servers.

    Args:
        holding: the parameters and buffers of this worker.
        trainers: optimizers and their parameters, by the name of the objective.
        everyone: the world of all processes, dedicated parameter servers among them.
        clip_norm: upper bound on the gradients' 2-norm, or None.
        waits: counter to which time and bytes spent on synchronization are added.
    """
    sync = holding.prepared.plan.sync
    if sync.has_servers:
        host = open_server_host(everyone, holding.prepared, holding.owning_stages, clip_norm)
        return ParameterServerSync(holding, host, trainers, waits)
    return LocalSgd(holding, trainers) if sync.every > 1 else GradientSync(holding.transport)
