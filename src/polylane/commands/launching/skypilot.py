"""SkyPilot: a task, on whose nodes ``polylane`` reads ``SKYPILOT_*`` and becomes torchrun's agent."""

from __future__ import annotations

import shlex
from typing import Any

from polylane.commands.launching.cluster_job import ClusterJob
from polylane.commands.launching.kubernetes import dump_manifest

# SkyPilot's names of devices, where they are not the preset's in capitals and without hyphens.
NAMES = {"a100-40g": "A100", "a100-80g": "A100-80GB", "h100-80g": "H100", "h100-96g-500w": "GH200"}


def write_task(job: ClusterJob) -> str:
    """Return the task, for ``sky jobs launch``."""
    resources: dict[str, Any] = {"cpus": f"{job.cpus}+"}
    if job.has_gpus:
        accelerator = NAMES.get(job.device) or job.device.upper().replace("-", "")
        resources = {"accelerators": f"{accelerator}:{job.workers}", **resources}
    if job.gibibytes is not None:
        resources["memory"] = f"{job.gibibytes}+"
    if job.request.image is not None:
        resources["image_id"] = f"docker:{job.request.image}"
    resources["job_recovery"] = {"max_restarts_on_errors": job.restarts, "recover_on_exit_codes": [job.requeue_code]}
    task: dict[str, Any] = {"name": job.name, "workdir": ".", "num_nodes": job.hosts, "resources": resources}
    task["volumes"] = {job.mount: job.request.volume or "runs"}
    if job.hosts > 1 and not job.has_gpus:  # SkyPilot says how many GPUs a node has, and no number of workers
        task["envs"] = {"PET_NPROC_PER_NODE": str(job.workers)}
    if job.request.image is None:
        task["setup"] = "pip install polylane"
    return dump_manifest({**task, "run": f"exec {shlex.join(job.command)}\n"}, job.describe())
