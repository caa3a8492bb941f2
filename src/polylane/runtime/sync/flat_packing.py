"""Flattening: tensors laid end to end, so that they travel as one message, and the tensors as views of it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """All elements as one vector, without gradients; a single contiguous tensor is not copied but viewed.

    Args:
        tensors: one or more of one dtype and device.
    """
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].detach().view(-1)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split_views(vector: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors that follow one another in a vector, as views of it.

    Args:
        vector: 1-D, with as many elements as the shapes together.
        shapes: of the tensors, in their order in the vector.
    """
    pieces = vector.split([prod(shape) for shape in shapes])
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's place in a packing.

    Attributes:
        name: of the tensor, unique in its packing.
        shape: of the tensor, or of the part of it that travels.
        dtype: decides in which row of the packing it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class FlatPacking:
    """Named tensors laid end to end, one row (vector) for each dtype.

    Args:
        slots: the tensors in their order; rows follow the first tensor of each dtype.
    """

    def __init__(self, slots: Iterable[PackedTensor]) -> None:
        self.rows: dict[torch.dtype, list[PackedTensor]] = {}
        for slot in slots:
            self.rows.setdefault(slot.dtype, []).append(slot)
        self.sizes = tuple((sum(slot.numel for slot in row), dtype) for dtype, row in self.rows.items())
        self.names = tuple(slot.name for row in self.rows.values() for slot in row)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows together."""
        return sum(numel * dtype.itemsize for numel, dtype in self.sizes)

    def pack(self, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> list[Tensor]:
        """The rows, always in new memory, with zeros for tensors that are missing.

        Args:
            tensors: by name, in the shapes of their slots; all on one device.
            device: where the rows are to be; default: that of the tensors.
        """
        here = next((tensors[name].device for name in self.names if name in tensors), torch.device("cpu"))
        rows = []
        for dtype, slots in self.rows.items():
            flat = [tensors[slot.name].detach().reshape(-1) if slot.name in tensors else None for slot in slots]
            zeros = (torch.zeros(slot.numel, dtype=dtype, device=here) for slot in slots)
            rows.append(torch.cat([z if f is None else f for f, z in zip(flat, zeros, strict=True)]).to(device or here))
        return rows

    def unpack(self, rows: Sequence[Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
        """The tensors by name, as views of the rows.

        Args:
            rows: one vector for each dtype, as :meth:`packed` makes them.
            device: where the tensors are to be; default: that of the rows.
        """
        found: dict[str, Tensor] = {}
        for row, slots in zip(rows, self.rows.values(), strict=True):
            views = split_views(row.to(device or row.device), [slot.shape for slot in slots])
            found |= {slot.name: view for slot, view in zip(slots, views, strict=True)}
        return found
