"""Which processes a process has started, and not yet seen the end of, zombies too."""

from pathlib import Path


def children(of: int | str = "self") -> set[int]:
    """Process ids of all children of a process; of this one, if none is given."""
    lists = Path(f"/proc/{of}/task").glob("*/children")
    return {int(pid) for each in lists for pid in each.read_text().split()}


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; a zombie has."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
