"""Flat packing: tensors concatenated into one vector per dtype, sent as one message, and viewed as tensors again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements as one detached vector; a single contiguous tensor is viewed, not copied.

    Args:
        tensors: one or more tensors of one dtype and device.
    """
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].detach().view(-1)
    with torch.no_grad():
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split_views(vector: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return views of consecutive tensors in a vector.

    Args:
        vector: 1-D, with exactly as many elements as all shapes.
        shapes: shape of each tensor, in their order in the vector.
    """
    pieces = vector.split([prod(shape) for shape in shapes])
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


@dataclass(frozen=True)
class PackedTensor:
    """Name, shape and dtype of one tensor of a packing.

    Attributes:
        name: name of the tensor, unique in its packing.
        shape: shape of the tensor, or of the shard of it that is sent.
        dtype: dtype of the tensor, which decides its row.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class FlatPacking:
    """Layout of named tensors in vectors ("rows"), one for each dtype.

        tensors     a: float32 [2, 2]    b: int64 [3]    c: float32 [1]
        rows        float32: a a a a c   int64: b b b

    Both ends of a message build the same packing from names, shapes and dtypes, so that only the rows are sent.

    Args:
        slots: the tensors in their order; rows are in the order of the first tensor of each dtype.

    Attributes:
        rows: the tensors of each row, by dtype.
        sizes: (number of elements, dtype) of each row.
        names: names of all tensors, row by row.
    """

    def __init__(self, slots: Iterable[PackedTensor]) -> None:
        self.rows: dict[torch.dtype, list[PackedTensor]] = {}
        for slot in slots:
            self.rows.setdefault(slot.dtype, []).append(slot)
        self.sizes = tuple((sum(slot.numel for slot in row), dtype) for dtype, row in self.rows.items())
        self.names = tuple(slot.name for row in self.rows.values() for slot in row)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(numel * dtype.itemsize for numel, dtype in self.sizes)

    def pack(self, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> list[Tensor]:
        """Return the rows, always in new memory, with zeros for missing tensors.

        Args:
            tensors: tensors by name, in the shapes of their slots; all on one device.
            device: device of the rows; default: that of the tensors.
        """
        source_device = next((tensors[name].device for name in self.names if name in tensors), torch.device("cpu"))
        # torch.cat copies also a single tensor: the caller may overwrite rows and send them without waiting.
        rows = []
        for dtype, slots in self.rows.items():
            flat = [tensors[slot.name].detach().reshape(-1) if slot.name in tensors else None for slot in slots]
            zeros = (torch.zeros(slot.numel, dtype=dtype, device=source_device) for slot in slots)
            rows.append(
                torch.cat([z if f is None else f for f, z in zip(flat, zeros, strict=True)]).to(device or source_device)
            )
        return rows

    def unpack(self, rows: Sequence[Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
        """Return the tensors by name, as views of the rows.

        Args:
            rows: one vector for each dtype, as :meth:`pack` returns them.
            device: device of the tensors; default: that of the rows.
        """
        tensors: dict[str, Tensor] = {}
        for row, slots in zip(rows, self.rows.values(), strict=True):
            views = split_views(row.to(device or row.device), [slot.shape for slot in slots])
            tensors |= {slot.name: view for slot, view in zip(slots, views, strict=True)}
        return tensors
