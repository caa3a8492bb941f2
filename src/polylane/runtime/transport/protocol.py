"""Transport interface: messages and collectives between workers, whatever carries the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class PendingResult(Protocol[R_co]):
    """Something under way that ends in a result; every one must be waited for."""

    def wait(self) -> R_co:
        """Wait until it is done, and return the result; a second call returns the same one at once.

        Raises:
            PeerLost: the worker at the other end is gone, or did not answer in time.
        """
        ...


class PendingTransfer(Protocol):
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
    for, not waited for. Collectives are asked for in the same order by all their ranks. Every channel, and every group
    that a collective runs over, is declared when the transport is made; a group is a set of ranks, in whatever order
    they are named.

    Methods raise ValueError for a channel or group that was not declared, for a group without this rank, and for
    arguments that do not fit one another; sums raise TypeError for a dtype that no backend sums; a message to a peer
    that is known to be gone raises PeerLost. Shapes and dtypes must agree at all ranks: where they do not, a wait over
    shared memory raises ValueError, and gloo aborts the process.

    Attributes:
        rank: of this worker in the world.
        size: number of workers of the world.
        counters: what was handed over, and what left, since the transport was made.
    """

    rank: int
    size: int
    counters: TransportCounters

    def send(self, tensor: Tensor, peer: int) -> PendingTransfer:
        """Start to send a tensor, of any dtype, strides and size, to a peer; it is kept alive until it has left."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> PendingTransfer:
        """Start to receive what a peer sends next, into a new contiguous tensor on this worker's device."""
        ...

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> PendingTransfer:
        """Start to sum a tensor over the ranks of a declared group, in place; not to be read before the wait."""
        ...

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> PendingTransfer:
        """Start to join every rank's tensor, of one dimension and any dtype, into a new one, in the order of ``ranks``.

        Args:
            tensor: this rank's part, of one dimension.
            ranks: of a declared group.
            sizes: elements of the part of each of ``ranks``, where they differ; some may be 0.
        """
        ...

    def reduce_scatter(
        self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None
    ) -> PendingTransfer:
        """Start to sum a tensor of one dimension over ``ranks``, of which each gets its own part, as a new tensor.

        Args:
            tensor: of the same length everywhere; left as it is.
            ranks: of a declared group; the parts follow one another in their order.
            sizes: elements of the part of each of ``ranks``; equal parts by default.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int, ranks: Iterable[int]) -> PendingTransfer:
        """Start to overwrite a tensor of any dtype, in place, by the source's, at the ranks of a declared group."""
        ...

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> PendingResult[list[Tensor]]:
        """Start to give each rank of a declared group a piece and to get one from each.

        Args:
            pieces: one for each of ``ranks``, in their order, all of one dtype; empty ones do not travel.
            shapes: of what each of ``ranks`` gives this one.
            ranks: all members of the group, in the order of the pieces.

        Returns:
            One tensor from each of ``ranks``; this rank's own piece is itself.
        """
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's plain value, by rank; see :mod:`polylane.runtime.transport.serialization` for what is plain."""
        ...

    def gather_object(self, value: Any, destination: int) -> list[Any] | None:
        """Every rank's plain value, by rank, at the destination; None elsewhere."""
        ...

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The source's plain value, at every rank."""
        ...

    def barrier(self) -> None:
        """Wait until every rank is here."""
        ...

    def close(self) -> None:
        """Wait for what is still being sent, and end this worker's side; the world's own process group stays."""
        ...


@dataclass(slots=True)
class TransportCounters:
    """What one worker has handed to its transport, and what left it for others.

    The kinds are the methods: ``"send"``, ``"receive"``, ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``,
    ``"broadcast"``, ``"all_to_all"``, and ``"object"``. Empty tensors and groups of one rank send nothing and are not
    counted at all.

    Attributes:
        messages: calls of the method.
        bytes: of the tensors handed over, not what an algorithm makes of them; objects have none.
        wire: bytes that left this worker, once for each worker that they went to; ``"header"``: control messages and
            objects, as far as the transport knows them.
    """

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    wire: Counter[str] = field(default_factory=Counter)

    def count_local(self, kind: str, tensor: Tensor | None = None) -> None:
        """Count one message."""
        self.messages[kind] += 1
        if tensor is not None:
            self.bytes[kind] += tensor.numel() * tensor.element_size()

    def count_sent(self, kind: str, tensor: Tensor, wire: int) -> None:
        """Count one message of which ``wire`` bytes leave this worker."""
        self.messages[kind] += 1
        self.bytes[kind] += tensor.nbytes
        self.wire[kind] += wire

    @property
    def given(self) -> int:
        """Bytes that were handed over for others, to receive or to sum."""
        return self.bytes.total() - self.bytes["receive"]

    @property
    def sent(self) -> int:
        """Bytes of tensors that left this worker, once for each worker that they went to; without headers."""
        return self.wire.total() - self.wire["header"]


def all_reduce_bytes(tensor: Tensor, ranks: int) -> int:
    """Bytes that each of ``ranks`` ranks sends in an all-reduce: reduce-scatter and all-gather, ring or direct.

    Each of the two sends every part but one: 2 n (p - 1) / p bytes of n (Patarasuk and Yuan 2009, section 3).
    """
    return 2 * tensor.nbytes * (ranks - 1) // ranks


def part_sizes(elements: int, ranks: Sequence[int], sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The elements of each rank's part of a whole: ``sizes``, or by default equal parts.

    Raises:
        ValueError: they do not make up the whole.
    """
    if sizes is None:
        if elements % len(ranks):
            raise ValueError(f"{elements} elements are no {len(ranks)} equal parts: say how many each rank has (sizes)")
        return (elements // len(ranks),) * len(ranks)
    if len(sizes) != len(ranks) or sum(sizes) != elements or min(sizes) < 0:
        raise ValueError(f"sizes {list(sizes)} are no parts of {elements} elements for the ranks {list(ranks)}")
    return tuple(sizes)


def gathered_sizes(tensor: Tensor, index: int, ranks: Sequence[int], sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The elements of each rank's part, of which a tensor is this rank's.

    Raises:
        ValueError: the tensor is not of one dimension, or not as long as ``sizes`` say.
    """
    require_flat(tensor)
    if sizes is None:
        return (tensor.numel(),) * len(ranks)
    if len(sizes) != len(ranks) or sizes[index] != tensor.numel():
        raise ValueError(f"a part of {tensor.numel()} elements does not fit sizes {list(sizes)} of ranks {list(ranks)}")
    return tuple(sizes)


def require_flat(tensor: Tensor) -> None:
    """Refuse a tensor that is not of one dimension.

    Raises:
        ValueError: it is not.
    """
    if tensor.dim() != 1:
        raise ValueError(f"parts are of one dimension, not of shape {tuple(tensor.shape)}: flatten the tensor first")


@dataclass(frozen=True, slots=True)
class FinishedTransfer(Generic[R]):
    """An operation that had nothing to do.

    Attributes:
        result: what its wait returns, at once.
    """

    result: R

    def wait(self) -> R:
        return self.result


class Deferred(Generic[R]):
    """An operation whose result is made by the first wait, and returned again by every later one."""

    __slots__ = ("_result",)

    def __init__(self) -> None:
        self._result: R | None = None

    def _finish(self) -> R:
        """Wait for the other workers, and make the result."""
        raise NotImplementedError

    def wait(self) -> R:
        if self._result is None:
            self._result = self._finish()
        return self._result


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
        raise TypeError(f"no transport sums {tensor.dtype}: convert the tensor first, to int32 or float32 say")


def make_contiguous(tensor: Tensor) -> Tensor:
    """The tensor's values in one plain piece of memory; itself where it is one already."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().contiguous()


def copy_back(wire: Tensor, target: Tensor) -> Tensor:
    """The caller's tensor, with the values of the plain memory that stood for it (see :func:`make_contiguous`).

    Args:
        wire: contiguous, with the result of the operation in it.
        target: of as many elements; the same memory, or overwritten.
    """
    if target.data_ptr() != wire.data_ptr():
        target.copy_(wire.view(target.shape))
    return target


def require_channel(sender: int, receiver: int, size: int) -> None:
    """Refuse a channel that does not join two ranks of a world of ``size`` workers.

    Raises:
        ValueError: it does not.
    """
    if sender == receiver or not {sender, receiver} <= set(range(size)):
        raise ValueError(f"({sender}, {receiver}) is no channel between two of {size} workers")


def require_pieces(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Refuse an exchange that has not a piece and a shape for each of its ranks.

    Raises:
        ValueError: it has not.
    """
    if not len(pieces) == len(shapes) == len(ranks):
        raise ValueError(f"{len(pieces)} pieces and {len(shapes)} shapes for the {len(ranks)} ranks {tuple(ranks)}")


def require_source(source: int, members: Sequence[int]) -> None:
    """Refuse a broadcast from a rank that is not in its group.

    Raises:
        ValueError: the source is none of the members.
    """
    if source not in members:
        raise ValueError(f"rank {source} cannot be the source for ranks {members}: it is none of them")


def undeclared(rank: int, what: str) -> ValueError:
    """The error for a channel or group that a transport was not made with.

    Args:
        rank: of the worker that asks for it.
        what: the channel or group in words, as ``"group (0, 1)"``.
    """
    return ValueError(f"rank {rank} has no {what}: declare it when the transport is made")


def normalize_group(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """A group's name: its ranks in order.

    Raises:
        ValueError: a rank that is not in the world.
    """
    group = tuple(sorted(set(ranks)))
    if not group or group[0] < 0 or group[-1] >= size:
        raise ValueError(f"the group {group} is not one of ranks 0 to {size - 1}")
    return group
