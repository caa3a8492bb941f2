"""Held tensors: what one worker holds of a training's state, by names and shapes that do not depend on the plan.

    name                                              what
    model/layers.0.weight                             a parameter or buffer
    optimizer/loss/layers.0.weight/exp_avg            a state of its optimizer, of the parameter's shape: cut like it
    optimizer/loss/layers.0.weight/factors#0:4,0:8    one of another shape, of the part of the parameter that it is for
    anchor/loss/layers.0.weight                       the weights that DiLoCo's outer optimizer updates
    residual/loss/layers.0.weight@1                   what replica 1 has left out of its compressed gradients

Where replicas differ for some steps (local SGD), the number of the replica stands behind ``@``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polylane.checkpoint.regions import LocalPiece, Rectangle, Span, cut_pieces
from polylane.program.boxes import IndexBox, box_shape, whole_box


@dataclass(frozen=True)
class Region:
    """The part of a global tensor that one worker holds.

    Attributes:
        shape: shape of the global tensor.
        box: the indices that the worker holds.
        span: the elements of the box, in row-major order, that it holds as a vector; None: all, in the box's shape.
    """

    shape: tuple[int, ...]
    box: IndexBox
    span: Span | None = None

    @cached_property
    def pieces(self) -> list[LocalPiece]:
        """The part as rectangles of the global tensor."""
        # A tensor without elements has no rectangle, and would be in no file: its name has to be, for a resumed run.
        if not math.prod(self.shape):
            everywhere = tuple(slice(0, n) for n in self.shape)
            return [LocalPiece(Rectangle((0,) * len(self.shape), self.shape), None, self.shape, everywhere)]
        return cut_pieces(self.box, self.span)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the worker's local tensor."""
        return box_shape(self.box) if self.span is None else (self.span[1] - self.span[0],)

    @property
    def is_whole(self) -> bool:
        """Whether the worker holds all of the tensor, in its own shape."""
        return self.span is None and box_shape(self.box) == self.shape

    @property
    def label(self) -> str:
        """Text that identifies this part among those of one tensor; empty for the whole tensor."""
        if self.is_whole:
            return ""
        ranges = ",".join("+".join(f"{start}:{stop}" for start, stop in dim_ranges) for dim_ranges in self.box)
        return f"#{ranges}" + ("" if self.span is None else f";{self.span[0]}:{self.span[1]}")

    def with_last_dim(self, length: int) -> Region:
        """Return the region of a tensor with one more dimension at the end, of which all is held."""
        span = self.span and (self.span[0] * length, self.span[1] * length)
        return Region((*self.shape, length), (*self.box, ((0, length),)), span)


def whole_region(shape: torch.Size | tuple[int, ...]) -> Region:
    """Return the region of a worker that holds all of a tensor."""
    return Region(tuple(shape), whole_box(shape))


@dataclass(frozen=True)
class HeldTensor:
    """One worker's part of a global tensor of the training's state.

    Attributes:
        name: global name of the tensor.
        region: the part of it that the worker holds.
        local: the worker's tensor, of the region's local shape.
        is_complex: whether it has been complex, and these are its pairs of real numbers.
    """

    name: str
    region: Region
    local: Tensor
    is_complex: bool = False

    def as_real(self) -> HeldTensor:
        """Return it as real numbers: of complex ones, which files do not have, pairs in a last dimension."""
        if not self.local.is_complex():
            return self
        # A conjugate is a flag in torch, under which view_as_real is refused.
        pairs = torch.view_as_real(self.local.resolve_conj())
        return replace(self, region=self.region.with_last_dim(2), local=pairs, is_complex=True)


@dataclass
class WorkerState:
    """What one worker adds to a checkpoint.

    Attributes:
        tensors: the tensors that it may write; other workers may hold the same parts.
        plain: state that is no tensor, by a global path; where several workers have a path they have the same value.
    """

    tensors: list[HeldTensor] = field(default_factory=list)
    plain: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, region: Region, local: Tensor) -> None:
        """Add a tensor."""
        self.tensors.append(HeldTensor(name, region, local.detach()))

    def extend(self, state: WorkerState) -> None:
        """Add all of another state."""
        self.tensors += state.tensors
        self.plain |= state.plain
