"""Demand: what one operator asks of a device, as data, and the shapes that a rank has of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from polylane.placement.strategy import OperatorCall, TensorValue

Kind = Literal["matmul", "convolution", "attention", "recurrent", "memory", "view"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """A matrix product, (m, k) times (k, n).

    Attributes:
        m, n, k: rows, columns, and terms of each sum.
        batch: how many of them run as one.
        repeats: how many of those run one after another, each waiting for the one before.
        row_elements: elements in the shortest row of a matrix that lies in memory row by row.
    """

    m: float
    n: float
    k: float
    batch: float = 1
    repeats: int = 1
    row_elements: int = 0

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.repeats * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """Read and written."""
        return self.batch * self.repeats * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class PassDemand:
    """What one direction asks for.

    Attributes:
        products: matrix products.
        bytes: read and written besides by operators that compute little.
        flops: of a fused attention kernel.
        kernels: how many operators the host issues.
    """

    products: tuple[Product, ...] = ()
    bytes: float = 0.0
    flops: float = 0.0
    kernels: float = 0.0

    def scaled(self, share: float) -> PassDemand:
        """A share of it, by fewer rows."""
        products = tuple(replace(p, m=p.m * share) for p in self.products)
        return PassDemand(products, self.bytes * share, self.flops * share, self.kernels)


NOTHING = PassDemand()


@dataclass(frozen=True)
class Operation:
    """One operator on one rank.

    Attributes:
        kind: which limit it may hit.
        forward, backward: what its passes ask for; no gradient flows where the latter is empty.
        itemsize: bytes of an element of its matrices.
        key_length: keys that a query of attention looks at.
    """

    kind: Kind
    forward: PassDemand
    backward: PassDemand = field(default=NOTHING)
    itemsize: int = 4
    key_length: int = 0

    def scaled(self, share: float) -> Operation:
        """What a rank does that does a share of the work."""
        return replace(self, forward=self.forward.scaled(share), backward=self.backward.scaled(share))

    @property
    def flops(self) -> float:
        """Multiplications and additions of the forward pass."""
        return self.forward.flops + sum(product.flops for product in self.forward.products)


@dataclass(frozen=True)
class LocalCall:
    """A call with the shapes in hand.

    Attributes:
        call: the operator.
        inputs, outputs: shapes of what a rank has.
        float_itemsize: bytes of an element of a floating-point value at most; None: as it is.
    """

    call: OperatorCall
    inputs: Sequence[Shape]
    outputs: Sequence[Shape]
    float_itemsize: int | None

    def shape(self, name: str) -> Shape | None:
        """Of a tensor argument; None where there is none."""
        value = self.call.arguments.get(name)
        return tuple(self.inputs[value.index]) if isinstance(value, TensorValue) else None

    def has_gradient(self, name: str) -> bool:
        """Whether a gradient flows back to an argument."""
        value = self.call.arguments.get(name)
        return isinstance(value, TensorValue) and value.gradient

    def itemsize_of(self, value: TensorValue) -> int:
        """Bytes of an element."""
        own = value.dtype.itemsize
        return (
            min(own, self.float_itemsize) if self.float_itemsize is not None and value.dtype.is_floating_point else own
        )

    @property
    def bytes_read(self) -> float:
        """Bytes of all inputs."""
        return sum(math.prod(s) * self.itemsize_of(v) for s, v in zip(self.inputs, self.call.inputs, strict=True))

    @property
    def bytes_written(self) -> float:
        """Bytes of all outputs."""
        return sum(math.prod(s) * self.itemsize_of(v) for s, v in zip(self.outputs, self.call.outputs, strict=True))

    @property
    def input_gradient_bytes(self) -> float:
        """Bytes of the gradients of inputs."""
        pairs = zip(self.inputs, self.call.inputs, strict=True)
        return sum(math.prod(s) * self.itemsize_of(v) for s, v in pairs if v.gradient)

    @property
    def has_backward(self) -> bool:
        """Whether it has a backward pass."""
        return any(v.gradient for v in self.call.outputs)

    @property
    def first_itemsize(self) -> int:
        """Bytes of an element of its first tensor."""
        tensors = (*self.call.outputs, *self.call.inputs)
        return self.itemsize_of(tensors[0]) if tensors else 4
