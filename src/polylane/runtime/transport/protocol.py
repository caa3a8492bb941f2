"""Transport interface: asynchronous point-to-point messages and collectives between workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor


class OperationsDiffer(ValueError):
    """Ranks began different operations, or with tensors of different forms, and all must take part in the same one."""


R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class PendingResult(Protocol[R_co]):
    """A pending operation with a result; every one must be waited for."""

    def wait(self) -> R_co:
        """Wait for the operation, and return its result; a second call returns the same one at once.

        Raises:
            PeerLost: a worker of the operation has closed its connection, or did not answer in time.
        """


# A pending transfer of a tensor: the received, the summed, or the sent one. Until its wait a sent tensor must not be
# written to. On accelerators the current stream waits, not this thread.
PendingTransfer = PendingResult[Tensor]

Channel = tuple[int, int]  # (sender, receiver)


class Transport(Protocol):
    """Tensors and small objects between the workers of one world.

    Each directed channel is FIFO: receives are matched to sends in the order of the calls, not of the waits. All ranks
    of a group call its collectives in the same order. Every channel, and every group of a collective, is declared when
    the transport is made; a group is a set of ranks, in any order.

    Methods raise ValueError for a channel or group that was not declared, for a group without this rank, and for
    arguments that do not fit one another; sums raise TypeError for a dtype that no backend sums; a message to a peer
    that is known to be lost raises PeerLost. Shapes and dtypes must be equal at all ranks: otherwise a wait over shared
    memory raises OperationsDiffer, and gloo aborts the process.

    Attributes:
        rank: rank of this worker in the world.
        size: number of workers of the world.
        is_ordered: whether an operation that was started may hold up all that this worker starts later, until its
            partners have started it too, as kernels of NCCL may; others go on beside each other.
        counters: messages and bytes since the transport was made.
    """

    rank: int
    size: int
    is_ordered: bool
    counters: TransportCounters

    def send(self, tensor: Tensor, peer: int) -> PendingTransfer:
        """Start to send a tensor of any dtype, strides and size to a peer; it is kept alive until it was sent."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> PendingTransfer:
        """Start to receive a peer's next tensor into a new contiguous tensor on this worker's device."""

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> PendingTransfer:
        """Start to sum a tensor over the ranks of a declared group, in place; it is undefined until the wait."""

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> PendingTransfer:
        """Start to concatenate every rank's part in a new tensor, in the order of ``ranks``.

        Args:
            tensor: this rank's part, 1-D, of any dtype.
            ranks: all ranks of a declared group, in any order.
            sizes: number of elements of each rank's part, if they differ; some may be 0.
        """

    def reduce_scatter(
        self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None
    ) -> PendingTransfer:
        """Start to sum a vector over ``ranks``; each rank gets its part of the sum as a new tensor.

        Args:
            tensor: 1-D, of the same length at all ranks; not written to.
            ranks: all ranks of a declared group; the parts are consecutive in this order.
            sizes: number of elements of each rank's part; default: equal parts.
        """

    def broadcast(self, tensor: Tensor, source: int, ranks: Iterable[int]) -> PendingTransfer:
        """Start to overwrite a tensor of any dtype in place by the source's, at all ranks of a declared group."""

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> PendingResult[list[Tensor]]:
        """Start to send each rank of a declared group a piece, and to receive one from each.

        Args:
            pieces: one tensor for each of ``ranks``, in their order, all of one dtype; empty ones are not sent.
            shapes: shape of the piece that each of ``ranks`` sends this one.
            ranks: all members of the group, in the order of the pieces.

        Returns:
            One tensor from each of ``ranks``; this rank's own piece is returned itself.
        """

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's plain value, by rank; ``transport.serialization`` defines what is plain."""

    def barrier(self) -> None:
        """Wait until every rank has called this method."""

    def close(self) -> None:
        """Wait for pending sends, and close this worker's side; the world's own process group stays."""


@dataclass(slots=True)
class TransportCounters:
    """Messages and bytes that one worker handed to its transport, and bytes that were sent.

    The kinds are the methods: ``"send"``, ``"receive"``, ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``,
    ``"broadcast"``, ``"all_to_all"``, and ``"object"``. Empty tensors and groups of one rank send nothing and are not
    counted at all.

    Attributes:
        messages: number of calls, by kind.
        bytes: bytes of the tensors in these calls, by kind, whatever an algorithm sends for them; 0 for objects.
        wire: bytes sent by this worker, by kind, once for each receiver; ``"header"``: control messages and objects, as
            far as the transport knows them.
    """

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    wire: Counter[str] = field(default_factory=Counter)

    def count_local(self, kind: str, tensor: Tensor | None = None) -> None:
        """Count one message of which nothing is sent by this worker."""
        self.messages[kind] += 1
        if tensor is not None:
            self.bytes[kind] += tensor.numel() * tensor.element_size()

    def count_sent(self, kind: str, tensor: Tensor, wire: int, headers: int = 0) -> None:
        """Count one message for which this worker sends ``wire`` bytes, and ``headers`` bytes of control messages."""
        self.messages[kind] += 1
        self.bytes[kind] += tensor.nbytes
        self.wire[kind] += wire
        self.wire["header"] += headers

    def move_sent(self, kind: str, other_kind: str, sent: int) -> None:
        """Count bytes that were sent by calls of one kind as those of another one."""
        self.wire[kind] -= sent
        self.wire[other_kind] += sent

    @property
    def given(self) -> int:
        """Bytes of tensors handed over to be sent or summed."""
        return self.bytes.total() - self.bytes["receive"]

    @property
    def sent(self) -> int:
        """Bytes of tensors that this worker sent, once for each receiver; without headers."""
        return self.wire.total() - self.wire["header"]


def all_reduce_bytes(tensor: Tensor, ranks: int) -> int:
    """Return the bytes that each of ``ranks`` ranks sends in an all-reduce by reduce-scatter and all-gather.

    Each of the two sends every part but one: 2 n (p - 1) / p bytes of n (Patarasuk and Yuan 2009, section 3).
    """
    return 2 * tensor.nbytes * (ranks - 1) // ranks


def part_sizes(elements: int, ranks: Sequence[int], sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the number of elements of each rank's part of a vector: ``sizes``, or by default equal parts.

    Raises:
        ValueError: the sizes do not add up to ``elements``, or there are no equal parts.
    """
    if sizes is None:
        if elements % len(ranks):
            raise ValueError(f"{elements} elements are no {len(ranks)} equal parts: say how many each rank has (sizes)")
        return (elements // len(ranks),) * len(ranks)
    if len(sizes) != len(ranks) or sum(sizes) != elements or min(sizes) < 0:
        raise ValueError(f"sizes {list(sizes)} are no parts of {elements} elements for the ranks {list(ranks)}")
    return tuple(sizes)


def gathered_sizes(tensor: Tensor, index: int, ranks: Sequence[int], sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the number of elements of each rank's part, checked against this rank's tensor.

    Args:
        tensor: this rank's part, 1-D.
        index: index of this rank in ``ranks``.
        ranks: all ranks of the group, in the order of the parts.
        sizes: number of elements of each part; None: all as long as ``tensor``.

    Raises:
        ValueError: the tensor is not 1-D, or its length differs from ``sizes``.
    """
    require_flat(tensor)
    if sizes is None:
        return (tensor.numel(),) * len(ranks)
    if len(sizes) != len(ranks) or sizes[index] != tensor.numel():
        raise ValueError(f"a part of {tensor.numel()} elements does not fit sizes {list(sizes)} of ranks {list(ranks)}")
    return tuple(sizes)


def require_flat(tensor: Tensor) -> None:
    """Refuse a tensor that is not 1-D.

    Raises:
        ValueError: the tensor has another number of dimensions.
    """
    if tensor.dim() != 1:
        raise ValueError(f"parts are of one dimension, not of shape {tuple(tensor.shape)}: flatten the tensor first")


@dataclass(frozen=True, slots=True)
class FinishedTransfer(Generic[R]):
    """An operation that is complete when it is started, such as a sum over one rank.

    Attributes:
        result: the value that ``wait`` returns at once.
    """

    result: R

    def wait(self) -> R:
        return self.result


class Deferred(Generic[R]):
    """A pending operation whose first wait computes the result; later waits return it again.

    Args:
        finish: waits for the other workers, and computes the result; freed afterwards, with the buffers it refers to.
        handle: the backend's handle of the operation; None where there is none, or several.
    """

    __slots__ = ("_finish", "_result", "handle")
    _result: R

    def __init__(self, finish: Callable[[], R], handle: Any = None) -> None:
        self._finish: Callable[[], R] | None = finish
        self.handle = handle

    def wait(self) -> R:
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


# Dtypes that both gloo and NCCL sum. bool is left out: a sum of bools is not a bool.
SUMMABLE = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)


def require_summable(tensor: Tensor) -> None:
    """Refuse a tensor of a dtype that not all backends sum.

    Raises:
        TypeError: the dtype is not one of ``SUMMABLE``.
    """
    if tensor.dtype not in SUMMABLE:
        raise TypeError(f"no transport sums {tensor.dtype}: convert the tensor first, to int32 or float32 say")


def make_contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a detached contiguous tensor; shares memory if the tensor is contiguous already."""
    # Lazy conjugation and negation are not in the memory, which is what a backend sends.
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach().contiguous()
    # One element is contiguous with any stride, but bytes of it can be seen only with a stride of 1.
    return tensor.as_strided(tensor.shape, [1] * tensor.dim()) if tensor.numel() == 1 else tensor


def copy_back(wire: Tensor, target: Tensor) -> Tensor:
    """Return the caller's tensor with the result that was computed in its contiguous copy (:func:`make_contiguous`).

    Args:
        wire: contiguous tensor with the result of the operation.
        target: the caller's tensor of as many elements; overwritten unless it has the same memory.
    """
    if target.data_ptr() != wire.data_ptr():
        target.copy_(wire.view(target.shape))
    return target


def require_channel(sender: int, receiver: int, size: int) -> None:
    """Refuse a channel that does not connect two ranks of a world of ``size`` workers.

    Raises:
        ValueError: both ranks are equal, or one is not in the world.
    """
    if sender == receiver or not {sender, receiver} <= set(range(size)):
        raise ValueError(f"({sender}, {receiver}) is no channel between two of {size} workers")


def require_pieces(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Refuse an exchange without exactly one piece and one shape for each of its ranks.

    Raises:
        ValueError: the numbers of pieces, shapes and ranks differ.
    """
    if not len(pieces) == len(shapes) == len(ranks):
        raise ValueError(f"{len(pieces)} pieces and {len(shapes)} shapes for the {len(ranks)} ranks {tuple(ranks)}")


def require_source(source: int, members: Sequence[int]) -> None:
    """Refuse a broadcast from a rank that is not in its group.

    Raises:
        ValueError: the source is not one of the members.
    """
    if source not in members:
        raise ValueError(f"rank {source} cannot be the source for ranks {members}: it is none of them")


def undeclared(rank: int, description: str) -> ValueError:
    """Return the error for a channel or group that was not declared when the transport was made.

    Args:
        rank: rank of the worker that uses it.
        description: the channel or group in words, as ``"group (0, 1)"``.
    """
    return ValueError(f"rank {rank} has no {description}: declare it when the transport is made")


def normalize_group(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """Return the key of a group: its ranks, ascending and unique.

    Raises:
        ValueError: the group is empty, or has a rank that is not in the world.
    """
    group = tuple(sorted(set(ranks)))
    if not group or group[0] < 0 or group[-1] >= size:
        raise ValueError(f"the group {group} is not one of ranks 0 to {size - 1}")
    return group
