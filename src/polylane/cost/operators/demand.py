"""Operator demand: matrix products, bytes and FLOPs of one operator, as data; and a call with its local shapes."""

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
        m, n, k: rows, columns, and contracted dimension.
        batch: number of products that run in one kernel.
        repeats: number of such kernels that depend on each other (steps of a recurrence).
        row_elements: elements of the shortest contiguous row of its matrices, which decides alignment; 0: unknown.
    """

    m: float
    n: float
    k: float
    batch: float = 1
    repeats: int = 1
    row_elements: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations: two for each multiplication and addition."""
        return 2.0 * self.batch * self.repeats * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """Elements of its matrices that are read and written."""
        return self.batch * self.repeats * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class PassDemand:
    """Demand of the forward or the backward pass of an operator.

    Attributes:
        products: matrix products of the pass.
        bytes: bytes read and written besides by bandwidth-bound kernels.
        flops: floating-point operations of a fused attention kernel.
        kernels: number of kernels that the host issues.
    """

    products: tuple[Product, ...] = ()
    bytes: float = 0.0
    flops: float = 0.0
    kernels: float = 0.0

    def scaled(self, share: float) -> PassDemand:
        """Return the demand with a fraction of the rows; the kernels to issue stay the same."""
        products = tuple(replace(p, m=p.m * share) for p in self.products)
        return PassDemand(products, self.bytes * share, self.flops * share, self.kernels)


NOTHING = PassDemand()


@dataclass(frozen=True)
class Operation:
    """Demand of one operator on one rank.

    Attributes:
        kind: kind of operator, which decides how it is priced.
        forward, backward: demand of the two passes; ``backward`` is empty where no gradient flows.
        itemsize: bytes per element of its matrices.
        key_length: keys per query of attention; 0 for other kinds.
    """

    kind: Kind
    forward: PassDemand
    backward: PassDemand = field(default=NOTHING)
    itemsize: int = 4
    key_length: int = 0

    def scaled(self, share: float) -> Operation:
        """Return the demand on a rank that does a fraction of the work."""
        return replace(self, forward=self.forward.scaled(share), backward=self.backward.scaled(share))


@dataclass(frozen=True)
class LocalCall:
    """An operator call with the local shapes of one rank.

    Attributes:
        call: the unsharded call: operator, arguments and dtypes.
        inputs, outputs: local shapes on the rank, in the call's order.
        float_itemsize: upper limit of the bytes per floating-point element; None: no limit.
    """

    call: OperatorCall
    inputs: Sequence[Shape]
    outputs: Sequence[Shape]
    float_itemsize: int | None

    def operation(self, kind: Kind, forward: PassDemand, backward: PassDemand, key_length: int = 0) -> Operation:
        """Return the operation with this demand; without its backward pass where no gradient flows."""
        return Operation(kind, forward, backward if self.has_backward else NOTHING, self.first_itemsize, key_length)

    def shape(self, name: str) -> Shape | None:
        """Return the local shape of a tensor argument; None if it is absent or no tensor."""
        value = self.call.arguments.get(name)
        return tuple(self.inputs[value.index]) if isinstance(value, TensorValue) else None

    def has_gradient(self, name: str) -> bool:
        """Return whether a gradient flows back to an argument."""
        value = self.call.arguments.get(name)
        return isinstance(value, TensorValue) and value.gradient

    def itemsize_of(self, value: TensorValue) -> int:
        """Return the bytes per element of a value in the precision of the passes."""
        size = value.dtype.itemsize
        return (
            min(size, self.float_itemsize)
            if self.float_itemsize is not None and value.dtype.is_floating_point
            else size
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
        """Bytes of the gradients of all inputs that have one."""
        pairs = zip(self.inputs, self.call.inputs, strict=True)
        return sum(math.prod(s) * self.itemsize_of(v) for s, v in pairs if v.gradient)

    @property
    def has_backward(self) -> bool:
        """Whether it has a backward pass."""
        return any(v.gradient for v in self.call.outputs)

    @property
    def first_itemsize(self) -> int:
        """Bytes per element of the first output, or the first input; 4 without tensors."""
        tensors = (*self.call.outputs, *self.call.inputs)
        return self.itemsize_of(tensors[0]) if tensors else 4
