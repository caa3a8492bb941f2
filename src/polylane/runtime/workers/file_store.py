"""File-based rendezvous of workers that one process of this host starts: a c10d FileStore that no other user can open.

A store that listens on a port accepts everybody who can reach it, and on a host that is every user. Nothing listens
here: the file is unnamed if the system supports that (workers inherit it), and otherwise in a folder of mode 0700.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polylane.errors import PeerLost
from polylane.runtime.nameless_file import open_nameless_file
from polylane.runtime.plain_data.serialization import decode, encode

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between polls for another worker's value; backs off
_LEFT = "polylane/left"


@dataclass(frozen=True)
class MeetingPlace:
    """The file and the secret of a rendezvous; made and removed by the process that starts the workers.

    Attributes:
        file: path of the store's file, as workers open it.
        secret: 32 random bytes that only workers of this job know.
    """

    file: str
    secret: bytes = field(repr=False)
    _descriptor: int | None = None
    _folder: str | None = None

    @classmethod
    def in_memory(cls) -> MeetingPlace:
        """Make an unnamed file in memory; a folder that only this user may enter if there is no memfd or /proc."""
        if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
            return cls.in_folder()
        try:
            descriptor = open_nameless_file("store")
        except OSError:  # not allowed
            return cls.in_folder()
        return _open_descriptor(descriptor, secrets.token_bytes(32))

    @classmethod
    def in_folder(cls) -> MeetingPlace:
        """Make a folder that only this user may enter, where the system has no files without a name."""
        folder = tempfile.mkdtemp(prefix="polylane-")
        return cls(str(Path(folder) / "store"), secrets.token_bytes(32), None, folder)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this for a process that multiprocessing starts, which gets the descriptor."""
        if self._descriptor is None:
            return MeetingPlace, (self.file, self.secret, None, self._folder)
        return _open_descriptor, (DupFd(self._descriptor), self.secret)

    def remove_files(self) -> None:
        """Close the file, and remove its folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _open_descriptor(descriptor: Any, secret: bytes) -> MeetingPlace:
    """Return the place whose file is open in this process, under a number or as multiprocessing hands it on."""
    number = descriptor if isinstance(descriptor, int) else descriptor.detach()
    # A forked worker has the same descriptor: this path opens the same file in its process.
    return MeetingPlace(f"/proc/self/fd/{number}", secret, number)


class FileStore:
    """Object collectives and a c10d store over the file of a :class:`MeetingPlace`.

    Args:
        meeting_place: rendezvous of the job, with its secret.
        rank: rank of this worker, from 0.
        size: number of workers of the job.
        timeout: longest wait for another worker's value.
    """

    def __init__(self, meeting_place: MeetingPlace, rank: int, size: int, timeout: timedelta) -> None:
        self.secret = meeting_place.secret
        self.store = dist.FileStore(meeting_place.file, -1)  # type: ignore[attr-defined]
        self.store.set_timeout(timeout)
        self._rank, self._size, self._rounds = rank, size, 0
        self._timeout = timeout

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every worker's plain value, by rank; a collective of all workers.

        Raises:
            PeerLost: a worker has ended, or stored no value in time.
        """
        key, self._rounds = f"polylane/{self._rounds}", self._rounds + 1
        self._write(f"{key}/{self._rank}", encode(value))
        values = (value if peer == self._rank else self._read(f"{key}/{peer}", peer) for peer in range(self._size))
        return list(values)

    def mark_left(self) -> None:
        """Record that this worker has ended, so that others do not wait for its values."""
        self._write(f"{_LEFT}/{self._rank}", b"left")

    def _write(self, key: str, content: bytes) -> None:
        self.store.set(key, content)  # type: ignore[arg-type]  # bytes, too

    def _read(self, key: str, peer: int) -> Any:
        end, pause = time.monotonic() + self._timeout.total_seconds(), SHORTEST_PAUSE
        while not self.store.check([key]):
            # Check the value again after the mark: the worker may have stored both in between.
            if self.store.check([f"{_LEFT}/{peer}"]) and not self.store.check([key]):
                raise PeerLost(peer, "meeting it", "it has ended")
            if time.monotonic() > end:
                raise PeerLost(peer, "meeting it", f"no answer in {self._timeout.total_seconds():g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        return decode(self.store.get(key))
