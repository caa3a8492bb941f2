"""``polylane launch``: print what a cluster's launcher is to be given for a training."""

from __future__ import annotations

from collections.abc import Callable

from polylane.commands.launching.build_job import build_job
from polylane.commands.launching.cluster_job import ClusterJob
from polylane.commands.launching.kubernetes import write_job_set, write_kubernetes
from polylane.commands.launching.launch_request import LauncherName, LaunchRequest
from polylane.commands.launching.skypilot import write_task
from polylane.commands.launching.slurm import write_script
from polylane.commands.printing import print_json

# What writes the file of a launcher, and the command that takes it.
LAUNCHERS: dict[LauncherName, tuple[Callable[[ClusterJob], str], str]] = {
    "slurm": (write_script, "sbatch"),
    "kubernetes": (write_kubernetes, "kubectl apply -f"),
    "jobset": (write_job_set, "kubectl apply -f"),
    "skypilot": (write_task, "sky jobs launch"),
}


def run(request: LaunchRequest) -> None:
    """Print the file, or what is in it as JSON.

    Raises:
        PolylaneError: an option, the recipe, the script or the plan is wrong, or they do not go together.
    """
    job = build_job(request)
    write, submit = LAUNCHERS[request.launcher]
    text = write(job)
    if not request.json:
        print(text, end="", flush=True)
        return
    print_json(
        {
            "name": job.name,
            "hosts": job.hosts,
            "workers_per_host": job.workers,
            "device": job.device,
            "state_bytes": job.state.size,
            "save_seconds": job.state.seconds,
            "grace_seconds": job.grace,
            "end_seconds": job.end_seconds,
            "memory_bytes": job.memory,
            "command": list(job.command),
            "submit": submit,
            "text": text,
        }
    )
