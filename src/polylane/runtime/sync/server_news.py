"""What the workers that train tell those that only serve: what all of them call, and what came of it."""

from __future__ import annotations

from typing import Any

import torch

from polylane.runtime.sync.server_host import Host
from polylane.values import decode, encode

_LENGTH = 1


def announce(host: Host, workers: int, what: str, value: Any) -> None:
    """Tell all ranks from ``workers`` on; rank 0 does it for all that train."""
    for pending in host.announced:
        pending.wait()
    host.announced.clear()
    content = torch.frombuffer(bytearray(encode((what, value))), dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    for rank in range(workers, host.world.size):
        host.announced += [host.transport.send(each, rank) for each in (length, content)]


def heard(host: Host) -> tuple[str, Any]:
    """What is told next, at a rank that only serves.

    Raises:
        PeerLost: rank 0 is gone.
    """
    length = int(host.transport.receive((_LENGTH,), torch.int64, 0).wait())
    content = host.transport.receive((length,), torch.uint8, 0).wait()
    what, value = decode(content.numpy().tobytes())
    return what, value
