"""Seconds that an operation takes on a device: the roofline, with what small and misshapen matmuls lose.

The roofline: Williams, Waterman, Patterson, "Roofline", CACM 2009. Tiles and waves: NVIDIA, "Matrix Multiplication
Background", Deep Learning Performance documentation, sections "Tile Quantization" and "Wave Quantization".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from polylane.cluster.device import Device
from polylane.cost.cost_table import OperatorWork
from polylane.cost.operators.operation import Operation, PassDemand, Product, operation

# Into how many parts a long sum may be cut so that more units have something to do, and the terms each must have.
_SPLITS = (1, 2, 4, 8)
_LEAST_TERMS = 512
_ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


def pass_seconds(op: Operation, device: Device, dtype: str) -> tuple[float, float]:
    """Of the forward and of the backward pass, on a device that has nothing else to do.

    Args:
        op: what is computed.
        device: on which.
        dtype: of the passes: "float32", "bfloat16", "float16", "float64" or "float8".

    Raises:
        PolylaneError: the device does not say how fast it is with that dtype.
    """
    return _direction_seconds(op, op.forward, device, dtype), _direction_seconds(op, op.backward, device, dtype)


def host_seconds(op: Operation, device: Device) -> tuple[float, float]:
    """Seconds of the host that it takes to issue the forward and the backward pass."""
    each = device.dispatch / device.speed
    return op.forward.kernels * each, op.backward.kernels * each


def matmul_seconds(product: Product, device: Device, dtype: str, item: int | None = None) -> float:
    """Seconds of a matrix product, without the start of an operator.

    Its result is cut into tiles; each unit makes one at a time, which takes as long as its terms and its start need.
    The best of the device's tiles is taken, and of long sums cut into parts; or the plain arithmetic units, which know
    no tiles; and never less than its matrices need to be moved.
    """
    width = _ITEM.get(dtype, 4) if item is None else item
    taken = min(_tiled_seconds(product, device, dtype, width, parts) for parts in _split_k_counts(product))
    if device.type == "cuda" and "float32" in device.achieved:  # a GPU has other units for plain arithmetic
        taken = min(taken, product.flops / device.rate("float32"))
    return max(taken, product.elements * width / device.stream)


def _split_k_counts(product: Product) -> Iterable[int]:
    return (parts for parts in _SPLITS if parts == 1 or product.k >= _LEAST_TERMS * parts)


def _tiled_seconds(product: Product, device: Device, dtype: str, width: int, parts: int) -> float:
    """With every sum cut into so many parts."""
    rows, columns = device.tiles[0]
    least = 1 / rows + 1 / columns
    aligned = _row_alignment(product.row_elements * width, device.aligned) if product.row_elements else device.aligned
    rate = device.rate(dtype) / device.units * (aligned / device.aligned) ** device.misaligned
    terms = math.ceil(product.k / parts) + device.depth
    best = math.inf
    for rows, columns in device.tiles:
        count = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns) * parts / device.units
        waves = device.waves * math.ceil(count) + (1 - device.waves) * max(count, 1.0 / device.units)
        dearer = 1 + device.edge * ((1 / rows + 1 / columns) / least - 1)
        best = min(best, waves * 2 * rows * columns * terms * dearer / rate)
    summed = 2 * 4 * parts * product.batch * product.m * product.n / device.stream if parts > 1 else 0.0
    return product.repeats * (best + summed + device.overhead * (parts > 1))


def _row_alignment(row: int, most: int) -> int:
    """Bytes, a power of two, to which rows of so many bytes are aligned."""
    return min(row & -row, most)


def _direction_seconds(op: Operation, each: PassDemand, device: Device, dtype: str) -> float:
    if each == PassDemand():
        return 0.0
    taken = sum(matmul_seconds(product, device, dtype, op.itemsize) for product in each.products)
    moved = each.bytes / device.stream
    if each.flops:
        ramp = 1 + device.attention_length / max(op.key_length, 1)
        moved = max(moved, each.flops * ramp / (device.attention * device.rate(dtype)))
    return taken + moved + device.overhead / device.speed * max(1.0, len(each.products))


@dataclass
class Roofline:
    """A clock for :meth:`polylane.cost.cost_table.ShardedGraphCost.table`: the model of a device, with passes of one
    dtype.
    """

    device: Device
    dtype: str
    float_itemsize: int | None = None
    _operations: dict[object, Operation] = field(default_factory=dict, repr=False)

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        """Seconds of its forward and of its backward pass."""
        return pass_seconds(self.operation_of(work), self.device, self.dtype)

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        """Seconds of the host for the same passes."""
        return host_seconds(self.operation_of(work), self.device)

    def operation_of(self, work: OperatorWork) -> Operation:
        """What a rank does of an operator.

        With all of the work on a part of the tensors (rows of a table that are looked up), its own shapes say it.
        """
        found = operation(work.operator.call, work.inputs, work.outputs, self.float_itemsize)
        if work.work_share is None or work.work_share == 1.0:
            return found
        whole = operation(work.operator.call, work.whole_inputs, work.whole_outputs, self.float_itemsize)
        return whole.scaled(work.work_share)
