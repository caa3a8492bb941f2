"""A Slurm of two hosts: its daemons, as Debian packages them, on hosts that are namespaces of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.hosts import STORE_ADDRESS, Hosts, Namespaces, host_names, store_address

COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
START_SECONDS = 90.0
REQUEUE_SECONDS = 15  # that a requeued job waits: as long as a credential holds, else two minutes
CONFIGURATION = """
ClusterName=test
SlurmctldHost=middle({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue_seconds}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
KillWait=20
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm.

    Attributes:
        hosts: its nodes; their middle has the controller, and is where jobs are submitted.
        environment: variables of its commands.
    """

    hosts: Hosts
    environment: dict[str, str]

    def run(self, *words: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run one of its commands where jobs are submitted."""
        with self.hosts.middle.enter():
            return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=seconds)


def missing_command() -> str:
    """Return which of its programs is not installed; "" if all are."""
    return next((command for command in COMMANDS if shutil.which(command) is None), "")


@contextmanager
def running_slurm(hosts: Hosts, folder: Path) -> Iterator[Slurm]:
    """Start the daemons; end them afterwards.

    Args:
        hosts: the nodes.
        folder: for what they write.

    Raises:
        TimeoutError: the nodes are not idle in time.
    """
    names = host_names(len(hosts.hosts))
    for name in ("state", "munge", *(f"spool-{name}" for name in names)):
        (folder / name).mkdir()
    key, file = folder / "munge/key", folder / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={store_address(number)} CPUs=2 RealMemory=1000"
        for number, name in enumerate(names, 1)
    )
    file.write_text(
        CONFIGURATION.format(controller=STORE_ADDRESS, folder=folder, nodes=nodes, requeue_seconds=REQUEUE_SECONDS)
    )
    # Names of hosts are known to all on them, as in a cluster: what nodes run sees this file in place of the machine's.
    known_hosts = folder / "hosts"
    known_hosts.write_text(
        f"127.0.0.1 localhost\n{STORE_ADDRESS} middle\n"
        + "".join(f"{store_address(number)} {name}\n" for number, name in enumerate(names, 1))
    )
    slurm = Slurm(hosts, {**os.environ, "SLURM_CONF": str(file)})
    options = ("socket", "key-file", "pid-file", "log-file", "seed-file")
    munge = [f"--{option}={folder}/munge/{option.removesuffix('-file')}" for option in options]
    commands: list[tuple[Sequence[str], Namespaces]] = [(["munged", "-F", "--force", *munge], hosts.middle)]
    commands.append((["slurmctld", "-D", "-f", str(file)], hosts.middle))
    with_hosts = ["unshare", "--mount", "sh", "-c", f'mount --bind {known_hosts} /etc/hosts && exec "$@"', "sh"]
    commands += [
        ([*with_hosts, "slurmd", "-D", "-N", name, "-f", str(file)], host)
        for name, host in zip(names, hosts.hosts, strict=True)
    ]
    processes = list[subprocess.Popen[bytes]]()
    try:
        for words, host in commands:
            with (folder / f"{len(processes)}.log").open("wb") as log, host.enter():
                processes.append(subprocess.Popen(words, env=slurm.environment, stdout=log, stderr=log))
            if not processes[1:]:
                wait_for(lambda: (folder / "munge/socket").exists())
        wait_for(lambda: slurm.run("sinfo", "-h", "-o", "%t", "-N").stdout.split() == ["idle"] * len(names))
        yield slurm
    finally:
        _end_jobs(slurm)
        for process in reversed(processes):
            process.kill()
        for process in processes:
            process.wait()


def _end_jobs(slurm: Slurm) -> None:
    """End what still runs: a node's daemon leaves the steps of jobs behind when it ends."""
    with suppress(TimeoutError, subprocess.TimeoutExpired):
        slurm.run("scancel", "--signal=KILL", "--state=RUNNING", "--me", seconds=20)
        wait_for(lambda: not slurm.run("squeue", "-h", seconds=20).stdout, 30)


def wait_for(condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it does not in so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it does not come about")
        time.sleep(0.1)
