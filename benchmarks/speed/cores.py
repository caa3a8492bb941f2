"""A part of a core: the kernel's control groups, of version 1 or 2, hold a process to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PERIOD = 4000  # microseconds in which a process has its share


@dataclass(frozen=True)
class Groups:
    """A folder in which groups can be made, each a folder of files that limit its processes."""

    root: Path
    version: int

    def limits(self, share: float) -> dict[str, str]:
        """What to write to which file of a group that may have so much of one core."""
        quota = int(PERIOD * share)
        if self.version == 1:
            return {"cpu.cfs_period_us": str(PERIOD), "cpu.cfs_quota_us": str(quota)}
        return {"cpu.max": f"{quota} {PERIOD}"}


def find(root: Path = Path("/sys/fs/cgroup")) -> Groups | str:
    """The groups of this machine; or why there are none that could be used, in words."""
    if (root / "cpu" / "cgroup.procs").exists():
        groups = Groups(root / "cpu", 1)
    elif not (root / "cgroup.controllers").exists():
        return f"there are no control groups at {root}"
    elif "cpu" not in (root / "cgroup.subtree_control").read_text().split():
        return f"{root} hands no cpu controller to its groups (see its cgroup.subtree_control)"
    else:
        groups = Groups(root, 2)
    return groups if os.access(groups.root, os.W_OK) else f"{groups.root} cannot be written"


@contextmanager
def share_of_a_core(groups: Groups, share: float) -> Iterator[None]:
    """Hold this process to so much of one core."""
    before, group = _own(groups), groups.root / f"polylane-{os.getpid()}"
    group.mkdir()
    try:
        for file, text in groups.limits(share).items():
            (group / file).write_text(text)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own(groups: Groups) -> Path:
    """The group that this process is in; lines read "4:cpu,cpuacct:/path", of version 2 "0::/path"."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" if groups.version == 2 else "cpu" in controllers.split(","):
            return groups.root / path.lstrip("/")
    return groups.root
