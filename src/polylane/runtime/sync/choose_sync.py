"""Choice of a worker's gradient synchronization, by its plan.

plan                            synchronization
servers, asynchronous servers   ParameterServerSync: servers make the updates
every=n, DiLoCo                 LocalSgd: replicas step alone, and agree every n steps
others                          GradientSync: the programs reduce gradients, every worker makes the update of its part
"""

from __future__ import annotations

from collections.abc import Mapping

from polylane.runtime.connections.connections import Connections
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.sync.gradient_sync import GradientSync
from polylane.runtime.sync.local_sgd import LocalSgd
from polylane.runtime.sync.objective_update import ObjectiveUpdate
from polylane.runtime.sync.parameter_server.client import ParameterServerSync
from polylane.runtime.sync.parameter_server.host import open_server_host
from polylane.runtime.workers.world import World


def build_sync(
    all_processes: World,
    local_model: LocalModel,
    connections: Connections,
    updates: Mapping[str, ObjectiveUpdate],
    clip_norm: float | None,
) -> GradientSync:
    """Build a worker's gradient synchronization; collective, also for dedicated servers.

    Args:
        all_processes: the world with dedicated servers.
        local_model: what this worker holds.
        connections: of this worker to the others that train.
        updates: of this worker, by objective.
        clip_norm: bound on the gradients' 2-norm, or None.
    """
    sync = local_model.prepared.plan.sync
    if sync.has_servers:
        host = open_server_host(all_processes, local_model.prepared, clip_norm)
        return ParameterServerSync(local_model, host, updates, connections.mesh.waits)
    return LocalSgd(local_model, updates) if sync.every > 1 else GradientSync(connections.transport)
