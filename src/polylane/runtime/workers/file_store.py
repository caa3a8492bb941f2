"""Rendezvous of workers that one process of this host starts: a store in a file that no other user can open.

A store that listens on a port lets everybody in who can reach it, and on a host that is every user. Nothing listens
here: the file has no name where the system can make such a one (workers inherit it), and else lies in a folder that is
its owner's alone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polylane.errors import PeerLost
from polylane.runtime.transport.serialization import decode, encode

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between looks for what another worker has still to leave
_LEFT = "polylane/left"


@dataclass(frozen=True)
class MeetingPlace:
    """Where workers meet; the process that starts them makes it, and ends it after them.

    Attributes:
        file: of the store, as workers open it.
        secret: what only they know.
    """

    file: str
    secret: bytes = field(repr=False)
    _descriptor: int | None = None
    _folder: str | None = None

    @classmethod
    def in_memory(cls) -> MeetingPlace:
        """For workers that are forked: in memory, without a name."""
        try:
            descriptor = os.memfd_create("polylane-store", os.MFD_CLOEXEC)
        except (AttributeError, OSError):  # not Linux, or not allowed
            return cls.in_folder()
        os.fchmod(descriptor, 0o600)
        return cls(f"/proc/self/fd/{descriptor}", secrets.token_bytes(32), descriptor)

    @classmethod
    def in_folder(cls) -> MeetingPlace:
        """For workers that are new processes: in a folder that only this user may enter."""
        folder = tempfile.mkdtemp(prefix="polylane-")
        return cls(str(Path(folder) / "store"), secrets.token_bytes(32), None, folder)

    @property
    def folder(self) -> Path:
        """The folder; only where there is one."""
        assert self._folder is not None
        return Path(self._folder)

    def remove_files(self) -> None:
        """Leave nothing behind."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class FileStore:
    """What workers leave for one another at a place.

    Args:
        file, secret: of the place.
        rank, size: this worker, and how many there are.
        timeout: for what another one has still to leave.
    """

    def __init__(self, file: str, secret: bytes, rank: int, size: int, timeout: timedelta) -> None:
        self.secret = secret
        self.store = dist.FileStore(file, -1)  # type: ignore[attr-defined]
        self.store.set_timeout(timeout)
        self._rank, self._size, self._rounds = rank, size, 0
        self._timeout = timeout

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every worker's value, by rank; all call it, as often as one another.

        Raises:
            PeerLost: a worker has left instead, or left nothing in time.
        """
        key, self._rounds = f"polylane/{self._rounds}", self._rounds + 1
        self._write(f"{key}/{self._rank}", encode(value))
        every = (value if peer == self._rank else self._read(f"{key}/{peer}", peer) for peer in range(self._size))
        return list(every)

    def mark_left(self) -> None:
        """Say that nothing more comes of this worker."""
        self._write(f"{_LEFT}/{self._rank}", b"left")

    def _write(self, key: str, content: bytes) -> None:
        self.store.set(key, content)  # type: ignore[arg-type]  # bytes, too

    def _read(self, key: str, peer: int) -> Any:
        end, pause = time.monotonic() + self._timeout.total_seconds(), SHORTEST_PAUSE
        while not self.store.check([key]):
            if self.store.check([f"{_LEFT}/{peer}"]) and not self.store.check([key]):
                raise PeerLost(peer, "meeting it", "it has ended")
            if time.monotonic() > end:
                raise PeerLost(peer, "meeting it", f"no answer in {self._timeout.total_seconds():g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        return decode(self.store.get(key))
