"""Cluster job: what a launcher must know of a training, whichever launcher it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from polylane.cluster.catalogue import device_presets
from polylane.cluster.figures import format_size
from polylane.commands.launching.launch_request import LaunchRequest
from polylane.errors import format_plural

REQUEUE_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
WRONG_INPUT = 2
STEP_SECONDS = 30  # of the longest step, which is not known before the training
PORT = 29500  # at which torchrun's agents meet
START_SECONDS = 120  # for workers to begin; Slurm's signal may come a minute before its time
END_SECONDS = 30  # from the end of --grace to the launcher's own: for the last files, and Python's end


@dataclass(frozen=True)
class CheckpointCost:
    """What a checkpoint of the training has.

    Attributes:
        size: bytes of all its files; None where that is not known before the training.
        seconds: time to write them.
        source: how both are known, as a part of a sentence.
    """

    size: int | None
    seconds: float
    source: str


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A training on a cluster.

    Attributes:
        request: the options of the command, among them the number of hosts.
        name: a DNS label, short enough for the names that launchers make of it.
        command: words of the command that trains, without what starts it on each host.
        workers: number of workers on each host.
        device: "cpu", "gpu" or a device preset.
        cpus: CPU cores of a host.
        memory: bytes of a host's memory; None: as the cluster gives it.
        state: what a checkpoint has.
        grace: seconds that a stop signal leaves for a checkpoint.
        restarts: times that the job is restarted after a worker has died.
        mount: folder at which a container has the volume; "" without a container.
    """

    request: LaunchRequest
    name: str
    command: tuple[str, ...]
    workers: int
    device: str
    cpus: int
    memory: int | None
    state: CheckpointCost
    grace: int
    restarts: int
    mount: str

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.request.hosts

    @property
    def requeue_code(self) -> int:
        """Exit code of a run that a signal ended after a checkpoint."""
        return int(self.request.values.get("requeue_code", REQUEUE_CODE))

    @cached_property
    def has_gpus(self) -> bool:
        """Whether every worker has a GPU of its own."""
        return is_gpu(self.device)

    @property
    def end_seconds(self) -> int:
        """Seconds from the launcher's stop signal to its kill."""
        return self.grace + END_SECONDS

    @property
    def gibibytes(self) -> int | None:
        """Memory of a host in whole GiB."""
        return None if self.memory is None else -(-self.memory // 2**30)

    def describe(self) -> list[str]:
        """Return sentences on the numbers that the job is filled with."""
        workers = f"{format_plural(self.workers, 'worker')}, each with {'a GPU' if self.has_gpus else 'CPU cores only'}"
        assumed = "" if "grace" in self.request.values else f" (at most {STEP_SECONDS} s, which is assumed)"
        size = "" if self.state.size is None else f" of {format_size(self.state.size)}"
        return [
            f"{format_plural(self.hosts, 'host')} with {workers} (--device).",
            f"Saving a checkpoint{size} takes {self.state.seconds:.2g} s ({self.state.source}): a stop signal leaves",
            f"--grace {self.grace} s for it and the step before{assumed}; {END_SECONDS} s later the job is killed.",
        ]


def is_gpu(device: str) -> bool:
    """Return whether a device is a GPU.

    Args:
        device: "cpu", "gpu" or a device preset.
    """
    return device == "gpu" or device_presets()[device].get("type") != "cpu"
