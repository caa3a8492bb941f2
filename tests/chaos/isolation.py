"""Isolation: a chaos command's own view of the system, in which whatever a training leaves behind is seen.

Processes whose parents are gone become children of this one (a subreaper). Where the user may mount, /dev/shm is an
empty one of this process and its children alone, and disks of any size can be made; all of it goes with the processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 16384, 1 << 18

SHARED_MEMORY = Path("/dev/shm")
SETTLE_SECONDS = 7.0  # processes of torch's loaders look every 5 s whether their worker is still there


def isolate_process() -> bool:
    """Isolate this process, as far as the system and the user's rights allow; return whether disks can be mounted."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return (
        os.geteuid() == 0
        and library.unshare(_CLONE_NEWNS) == 0
        and library.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and mount_disk(SHARED_MEMORY, "50%")
    )


def mount_disk(folder: Path, size: str) -> bool:
    """Mount an empty disk of some size, in memory, over a folder; return whether that was possible."""
    options = f"size={size},mode=1777".encode()
    code: int = ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options)
    return code == 0


def unmount_disk(folder: Path) -> None:
    """Unmount what :func:`mount_disk` has mounted; its files are gone then."""
    ctypes.CDLL(None).umount2(os.fsencode(folder), 2)  # MNT_DETACH


def list_children() -> list[int]:
    """Return the process ids of this process's children, zombies too."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in lists for pid in path.read_text().split()]


def end_orphans(known_pids: frozenset[int] = frozenset()) -> list[str]:
    """Wait a little for processes that a training has left behind, and end those that are still there.

    Args:
        known_pids: children that belong to this process itself.

    Returns:
        The command lines of those that had to be ended.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while (orphans := _reap(known_pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    descriptions = [f"{pid}: {_read_command(pid)}" for pid in orphans]
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while orphans:
        time.sleep(0.02)
        orphans = _reap(known_pids)
    return descriptions


def _reap(known_pids: frozenset[int]) -> list[int]:
    """Return the children that live, after those that ended are taken away."""
    living = []
    for pid in set(list_children()) - known_pids:
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                living.append(pid)
    return living


def _read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "?"
