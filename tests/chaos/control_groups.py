"""Control groups (cgroup v1): a process that the system freezes, or that may start no other one, for a fault.

A frozen process takes no signal, not even SIGKILL, until it is thawed: so does one that waits for a disk that does not
answer. The groups are below those of this machine, hold what a fault puts there alone, and are removed with the trial.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

FREEZER, PIDS = Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup/pids")
REMOVE_SECONDS = 5.0  # wait for the processes of a group to be gone


def can_hold(controller: Path) -> bool:
    """Return whether this user may make groups of a controller."""
    group = controller / f"polylane-{os.getpid()}"
    try:
        group.mkdir()
        group.rmdir()
    except OSError:
        return False
    return (controller / "cgroup.procs").exists()


def name_group(controller: Path, log: Path) -> Path:
    """Return the folder of the group for the faults of a log: those of one trial."""
    return controller / f"polylane{str(log).replace('/', '-')}"


def freeze_process(pid: int, log: Path) -> None:
    """Freeze a process; the call does not return where it is this one."""
    group = _take_in(pid, name_group(FREEZER, log))
    (group / "freezer.state").write_text("FROZEN")


def forbid_processes(pid: int, log: Path) -> None:
    """Let a process start no other one, nor a thread."""
    group = _take_in(pid, name_group(PIDS, log))
    (group / "pids.max").write_text((group / "pids.current").read_text())


def _take_in(pid: int, group: Path) -> Path:
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(pid))
    return group


def release(log: Path) -> None:
    """Thaw what the faults of a log have frozen, and remove their groups."""
    for controller in (FREEZER, PIDS):
        group = name_group(controller, log)
        with suppress(OSError):
            (group / "freezer.state").write_text("THAWED")
        deadline = time.monotonic() + REMOVE_SECONDS
        while group.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # processes are in it
                group.rmdir()
            time.sleep(0.02)
