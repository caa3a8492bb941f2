"""What every transport offers, whatever carries the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A transfer under way. Every one must be waited for: until then a sent tensor must not be written to."""

    def wait(self) -> Tensor:
        """Wait until it is done, and return the tensor: the received, the summed, or the sent one.

        On accelerators the current stream waits, not this thread. A second call returns the same tensor at once.

        Raises:
            PeerLost: the worker at the other end is gone, or did not answer in time.
        """
        ...


class Transport(Protocol):
    """Tensors and small objects between the workers of one world.

    Each directed channel is first in, first out: receives are matched to sends in the order in which they were asked
    for, not waited for. Collectives are asked for in the same order by all their ranks. Shapes and dtypes must agree at
    both ends: gloo aborts the process where they do not.
    """

    rank: int
    size: int
    counters: Counters

    def send(self, tensor: Tensor, peer: int) -> Pending:
        """Start to send a tensor, of any dtype, strides and size, to a peer; it is kept alive until it has left."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending:
        """Start to receive what a peer sends next, into a new contiguous tensor on this worker's device."""
        ...

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> Pending:
        """Start to sum a tensor over the ranks of a declared group, in place; not to be read before the wait."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable value, by rank."""
        ...

    def gather_object(self, value: Any, destination: int) -> list[Any] | None:
        """Every rank's picklable value, by rank, at the destination; None elsewhere."""
        ...

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The source's picklable value, at every rank."""
        ...

    def barrier(self) -> None:
        """Wait until every rank is here."""
        ...

    def close(self) -> None:
        """Wait for what is still being sent, and end this worker's side; the world's own process group stays."""
        ...


@dataclass(slots=True)
class Counters:
    """What one worker has handed to its transport, by kind: ``"send"``, ``"receive"``, ``"all_reduce"``, ``"object"``.

    Bytes are those of the tensors handed over, not what an algorithm makes of them on the wire; objects have none.
    Empty tensors and groups of one rank send nothing and are not counted at all.
    """

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, tensor: Tensor | None = None) -> None:
        """Count one message."""
        self.messages[kind] += 1
        if tensor is not None:
            self.bytes[kind] += tensor.numel() * tensor.element_size()

    @property
    def given(self) -> int:
        """Bytes that were handed over for others, to receive or to sum."""
        return self.bytes["send"] + self.bytes["all_reduce"]


@dataclass(frozen=True, slots=True)
class Done:
    """A transfer that had nothing to do."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """The tensor, at once."""
        return self.tensor


# Floats and whole numbers that gloo and NCCL both sum. bool is left out: its sum is no bool.
SUMMABLE = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)


def require_summable(tensor: Tensor) -> None:
    """Refuse what no backend sums.

    Raises:
        TypeError: the dtype is not one of ``SUMMABLE``.
    """
    if tensor.dtype not in SUMMABLE:
        raise TypeError(f"all_reduce cannot sum {tensor.dtype}: convert the tensor first, to int32 or float32 say")


def as_sent(tensor: Tensor) -> Tensor:
    """The tensor's values in one plain piece of memory; itself where it is one already."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().contiguous()


def normalised(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """A group's name: its ranks in order.

    Raises:
        ValueError: a rank that is not in the world.
    """
    group = tuple(sorted(set(ranks)))
    if not group or group[0] < 0 or group[-1] >= size:
        raise ValueError(f"the group {group} is not one of ranks 0 to {size - 1}")
    return group
