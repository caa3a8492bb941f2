"""Roofline model of a device, with tile and wave quantization for small and misshapen matmuls.

Roofline: Williams, Waterman, Patterson, "Roofline", CACM 2009. Tiles and waves: NVIDIA, "Matrix Multiplication
Background", Deep Learning Performance documentation, sections "Tile Quantization" and "Wave Quantization".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polylane.cluster.device import Device
from polylane.cost.cost_table import OperatorWork
from polylane.cost.operators.operation import Operation, PassDemand, Product, operation

# Split-K: parts into which a long contraction may be cut to occupy more units, and the least terms of each part.
_SPLITS = (1, 2, 4, 8)
_LEAST_TERMS = 512
_ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


def pass_seconds(op: Operation, device: Device, dtype: str) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass on an idle device.

    Args:
        op: demand of the operator's two passes.
        device: the device, with its fitted figures.
        dtype: dtype of the passes: "float32", "bfloat16", "float16", "float64" or "float8".

    Raises:
        PolylaneError: the device has no rate for that dtype.
    """
    return _direction_seconds(op, op.forward, device, dtype), _direction_seconds(op, op.backward, device, dtype)


def host_seconds(op: Operation, device: Device) -> tuple[float, float]:
    """Return the host's seconds to issue the forward and the backward pass."""
    kernel_seconds = device.dispatch / device.speed
    return op.forward.kernels * kernel_seconds, op.backward.kernels * kernel_seconds


def matmul_seconds(product: Product, device: Device, dtype: str, item: int | None = None) -> float:
    """Return the seconds of a matrix product, without the overhead of starting a kernel.

    The result is cut into tiles, of which each compute unit makes one at a time, in the time of its terms and a fixed
    start. The best of the device's tile sizes and of the split-K counts is taken, or a GPU's plain arithmetic units,
    which need no tiles; but never less than the time to move the matrices.
    """
    width = _ITEM.get(dtype, 4) if item is None else item
    splits = (parts for parts in _SPLITS if parts == 1 or product.k >= _LEAST_TERMS * parts)
    seconds = min(_tiled_seconds(product, device, dtype, width, parts) for parts in splits)
    if device.type == "cuda" and "float32" in device.achieved:  # a GPU has other units for plain arithmetic
        seconds = min(seconds, product.flops / device.rate("float32"))
    return max(seconds, product.elements * width / device.stream)


def _tiled_seconds(product: Product, device: Device, dtype: str, width: int, parts: int) -> float:
    """Return the seconds with the contraction split into ``parts`` (split-K), by the best tile."""
    rows, columns = device.tiles[0]
    least_edge = 1 / rows + 1 / columns
    # Rows that are not aligned to the widest load slow the product by a power of the missing alignment.
    aligned = _row_alignment(product.row_elements * width, device.aligned) if product.row_elements else device.aligned
    rate = device.rate(dtype) / device.units * (aligned / device.aligned) ** device.misaligned
    terms = math.ceil(product.k / parts) + device.depth
    best = math.inf
    for rows, columns in device.tiles:
        # Tiles per unit; whole waves in proportion to device.waves, fractional ones for the rest (units that
        # overlap waves).
        count = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns) * parts / device.units
        waves = device.waves * math.ceil(count) + (1 - device.waves) * max(count, 1.0 / device.units)
        # Small tiles have more edge per area: they load more for each product.
        dearer = 1 + device.edge * ((1 / rows + 1 / columns) / least_edge - 1)
        best = min(best, waves * 2 * rows * columns * terms * dearer / rate)
    # Split-K writes float32 partial results and reads them back, in one more kernel.
    summed = 2 * 4 * parts * product.batch * product.m * product.n / device.stream if parts > 1 else 0.0
    return product.repeats * (best + summed + device.overhead * (parts > 1))


def _row_alignment(row: int, limit: int) -> int:
    """Return the power of two, at most ``limit``, to which rows of ``row`` bytes are aligned."""
    return min(row & -row, limit)


def _direction_seconds(op: Operation, pass_demand: PassDemand, device: Device, dtype: str) -> float:
    if pass_demand == PassDemand():
        return 0.0
    seconds = sum(matmul_seconds(product, device, dtype, op.itemsize) for product in pass_demand.products)
    moved = pass_demand.bytes / device.stream
    if pass_demand.flops:
        # Short sequences do not fill a fused attention kernel.
        ramp = 1 + device.attention_length / max(op.key_length, 1)
        moved = max(moved, pass_demand.flops * ramp / (device.attention * device.rate(dtype)))
    return seconds + moved + device.overhead / device.speed * max(1.0, len(pass_demand.products))


@dataclass
class Roofline:
    """Prices operators by the model of a device, for passes in one dtype.

    Used as the clock of :meth:`polylane.cost.cost_table.ShardedGraphCost.table`.
    """

    device: Device
    dtype: str
    float_itemsize: int | None = None

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        """Return the seconds of the operator's forward and backward pass."""
        return pass_seconds(self.operation_of(work), self.device, self.dtype)

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        """Return the host's seconds to issue the same passes."""
        return host_seconds(self.operation_of(work), self.device)

    def operation_of(self, work: OperatorWork) -> Operation:
        """Return a rank's demand of an operator.

        A work share of 1 (an embedding whose table is sharded) means that the local shapes already tell the work.
        """
        demand = operation(work.operator.call, work.inputs, work.outputs, self.float_itemsize)
        if work.work_share is None or work.work_share == 1.0:
            return demand
        full_demand = operation(work.operator.call, work.whole_inputs, work.whole_outputs, self.float_itemsize)
        return full_demand.scaled(work.work_share)
