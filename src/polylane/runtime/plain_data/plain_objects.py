"""Object collectives over a process group, without pickle: plain values in the encoding of ``transport.serialization``.

torch's own object collectives unpickle what they receive, and gloo accepts any process that connects first.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.runtime.plain_data.serialization import decode, encode

FIRST_BYTES = 1016  # bytes of a value that travel together with its length
LONGEST = 1 << 40  # upper bound on bytes of an encoded value; a longer announced length is not from a worker
INTRODUCTION = timedelta(seconds=60)  # timeout of the authentication of a new group, whose members just connected
_PROOF_BYTES = 32  # of SHA-256, and of the random bytes that ask for a proof


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, by rank in the group; a collective of the group."""
    data = encode(value)
    # Most values are short: then one exchange does, in which each is behind its length.
    rows = _gather_rows(len(data).to_bytes(8, "little") + data[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0"), group)
    lengths = [_check_length(int.from_bytes(row[:8], "little", signed=True)) for row in rows]
    longest = max(lengths) - FIRST_BYTES
    rests = _gather_rows(data[FIRST_BYTES:].ljust(longest, b"\0"), group) if longest > 0 else [b""] * len(rows)
    return [decode((row[8:] + end)[:length]) for row, end, length in zip(rows, rests, lengths, strict=True)]


def _gather_rows(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the bytes of every rank of a group, equally many of each."""
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_group_device(group))
    table = row.new_empty(dist.get_world_size(group) * len(data))
    members = group or dist.group.WORLD
    assert members is not None
    members.all_gather_single(table, row).wait()
    content = table.cpu().numpy().tobytes()
    return [content[start : start + len(data)] for start in range(0, len(content), len(data))]


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of one rank of the group, at every rank; a collective of the group."""
    device = _group_device(group)
    if dist.get_rank(group) == source:
        content = _encode_value(value, device)
        length = torch.tensor([content.numel()], device=device)
    else:
        length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=source)
    if dist.get_rank(group) != source:
        content = torch.empty(_check_length(int(length)), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=source)
    return value if dist.get_rank(group) == source else decode(content.cpu().numpy().tobytes())


def authenticate_group(group: dist.ProcessGroup, secret: bytes, ranks: Sequence[int], rank: int) -> None:
    """Authenticate the members of a new group to one another; a collective of the group.

    A backend accepts any process that connects, as the rank that it claims. Each member sends each other one random
    bytes, and then an HMAC under the secret of the group's name, both ranks and the random bytes of both: of no use to
    a third process, nor in another group, nor later.

    Args:
        group: gloo group whose connections have just been made.
        secret: secret that only workers of this job know.
        ranks: ranks of all members of the group.
        rank: rank of this worker, one of ``ranks``.

    Raises:
        PolylaneError: the process in a rank's place does not know the secret.
    """
    peers = [peer for peer in ranks if peer != rank]
    # Another nonce for each peer: what is proved to one of them is proved to no other.
    own_nonces = {peer: secrets.token_bytes(_PROOF_BYTES) for peer in ranks}
    asks = _exchange(group, ranks, own_nonces)
    proofs = {peer: _compute_proof(secret, group, (rank, peer), (own_nonces[peer], asks[peer])) for peer in ranks}
    peer_proofs = _exchange(group, ranks, proofs)
    for peer in peers:
        expected = _compute_proof(secret, group, (peer, rank), (asks[peer], own_nonces[peer]))
        if not hmac.compare_digest(peer_proofs[peer], expected):
            raise PolylaneError(
                f"who connected as rank {peer} is not a worker of this job (it does not know the job's secret): "
                "another process has taken its place; start the job again, with the same POLYLANE_SECRET on all hosts "
                "if there are several"
            )


def _exchange(group: dist.ProcessGroup, ranks: Sequence[int], messages: Mapping[int, bytes]) -> dict[int, bytes]:
    """Send each rank its bytes, the same number to all, and return what each rank has sent."""
    payload = torch.frombuffer(bytearray(b"".join(messages[peer] for peer in ranks)), dtype=torch.uint8)
    got = torch.empty_like(payload)
    group.alltoall_base(got, payload, [], [], dist.AllToAllOptions()).wait(INTRODUCTION)
    return {peer: row.numpy().tobytes() for peer, row in zip(ranks, got.view(len(ranks), -1), strict=True)}


def _compute_proof(
    secret: bytes, group: dist.ProcessGroup, direction: tuple[int, int], nonces: tuple[bytes, bytes]
) -> bytes:
    """Return the proof for one direction.

    Args:
        secret: secret of the job's workers.
        group: group whose members prove themselves.
        direction: rank that proves itself, and the one to which it does.
        nonces: random bytes that the one and the other have sent, all of one length.
    """
    message = f"{group.group_name}: {direction[0]} to {direction[1]}: ".encode() + b"".join(nonces)
    return hmac.digest(secret, message, hashlib.sha256)


def _group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the group's backend carries bytes: the CPU if it can."""
    devices = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device(devices[0], torch.accelerator.current_device_index())


def _encode_value(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).to(device)


def _check_length(length: int) -> int:
    if not 0 < length <= LONGEST:
        raise PolylaneError(f"another worker wants to send {length} bytes of a value: it is no worker of this job")
    return length
