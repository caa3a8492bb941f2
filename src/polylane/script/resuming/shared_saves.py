"""Shared saves: ``torch.save`` of a path in a script that several workers run: one of them writes the file, whole.

    the first worker of a host to come      writes beside the path, renames, and says that it is done
    the others                              wait for that: what they load afterwards is the whole file

Who comes to a path alone, as behind a choice by rank, writes it and waits for nobody.
"""

from __future__ import annotations

import functools
import io
import os
from collections import Counter
from typing import Any

import torch

from polylane.runtime.progress.host_watch import identify_host
from polylane.runtime.workers.world import World
from polylane.script.recording import line_of_script

_PART = ".part"  # ending of a file that is being written


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing: whole values are gathered while they are pickled, on every worker."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        return memoryview(content).nbytes


def share_saves(world: World) -> None:
    """Let ``torch.save`` of this process write each file by one of the workers; not undone, since the script is theirs.

    Args:
        world: this worker among all workers.
    """
    store: Any = world.store if world.board is None else world.board.store
    if world.size == 1 or store is None or hasattr(torch.save, "writes_once"):
        return
    plain_save, saves = torch.save, Counter[str]()

    @functools.wraps(plain_save)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        path = os.path.realpath(f) if isinstance(f, str | os.PathLike) else ""
        if not path or (os.path.exists(path) and not os.path.isfile(path)):  # a stream, or a device
            plain_save(obj, f, *args, **kwargs)
            return
        # By line: what one worker has saved alone elsewhere, behind a choice by rank, does not count.
        line_key = f"{path}/{line_of_script()}"
        saves[line_key] += 1
        key = f"save/{identify_host()[0]}/{line_key}/{saves[line_key]}"
        if store.add(f"{key}/workers", 1) > 1:
            nowhere: Any = _Nowhere()
            plain_save(obj, nowhere, *args, **kwargs)
            store.wait([f"{key}/end"])
            if store.get(f"{key}/end") == b"written":
                return
        _write_whole(lambda part: plain_save(obj, part, *args, **kwargs), path, store, f"{key}/end")

    save.writes_once = True  # type: ignore[attr-defined]
    torch.save = save


def _write_whole(write: Any, path: str, store: Any, key: str) -> None:
    """Write a file beside its path and rename it; say how that ended."""
    part = f"{path}{_PART}{os.getpid()}"
    end = "failed"
    try:
        write(part)
        os.replace(part, path)
        end = "written"
    finally:
        if end == "failed" and os.path.exists(part):
            os.unlink(part)
        store.set(key, end)
