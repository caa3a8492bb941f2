"""Bandwidth-bound operators: demand of those whose time is that of the bytes they read and write."""

from __future__ import annotations

import math

from polylane.cost.operators.demand import NOTHING, LocalCall, Operation, PassDemand


def bandwidth_bound(
    local: LocalCall, forward: float, backward: float, kernels: tuple[float, float] = (1, 1)
) -> Operation:
    forward_kernels, back = kernels
    return local.operation(
        "memory", PassDemand(bytes=forward, kernels=forward_kernels), PassDemand(bytes=backward, kernels=back)
    )


def read_and_write(local: LocalCall) -> Operation:
    """Return the demand of the default: read all inputs and write all outputs; backward reads both and the gradient."""
    forward = local.bytes_read + local.bytes_written
    return bandwidth_bound(local, forward, local.input_gradient_bytes + local.bytes_written + local.bytes_read)


def linear_combination(local: LocalCall) -> Operation:
    """Return the demand of sums and differences, whose gradient is passed on without a kernel.

    If both inputs need it, their producers' gradients are accumulated where the branches forked (3 passes over the
    value); a broadcast input's gradient is summed.
    """
    forward = local.bytes_read + local.bytes_written
    shapes = [s for s, v in zip(local.inputs, local.call.inputs, strict=True) if v.gradient]
    forks = sum(math.prod(s) == math.prod(local.outputs[0]) for s in shapes) > 1
    smaller = any(math.prod(s) < math.prod(local.outputs[0]) for s in shapes)
    moved = 3 * local.bytes_written * forks + local.bytes_written * smaller
    return bandwidth_bound(local, forward, moved, (1, float(forks + smaller)))


def dropout(local: LocalCall) -> Operation:
    if not _is_training(local):
        return view(local)
    mask_bytes = float(math.prod(local.outputs[0]))  # a byte for each element says whether it was kept
    moved = local.bytes_read + local.bytes_written + mask_bytes
    return bandwidth_bound(local, moved, moved)


def _is_training(local: LocalCall) -> bool:
    flag = local.call.arguments.get("train", local.call.arguments.get("training", True))
    return bool(flag) and local.call.arguments.get("p", 0.5) != 0


def saves_output(local: LocalCall) -> Operation:
    """Return the demand of operators whose backward reads the saved output and the gradient, and writes one."""
    return bandwidth_bound(
        local, local.bytes_read + local.bytes_written, 2 * local.bytes_written + local.input_gradient_bytes
    )


def normalization(local: LocalCall) -> Operation:
    """Return the demand of normalizations; backward reads inputs and gradient once each for input and parameters."""
    parameters = any(v.gradient for v in local.call.inputs[1:])
    moved = 2 * local.bytes_written + local.input_gradient_bytes + 2 * local.bytes_written * parameters
    return bandwidth_bound(local, local.bytes_read + local.bytes_written, moved, (1, 1 + parameters))


def class_loss(local: LocalCall) -> Operation:
    """Return the demand of cross-entropy: log-softmax and NLL in float32; 16-bit scores are converted both ways."""
    value = local.call.inputs[0]
    elements, item = math.prod(local.inputs[0]), local.itemsize_of(value)
    converted = (item + 4) * (item < 4)
    wide = max(item, 4)
    return bandwidth_bound(local, elements * (2 * wide + converted), elements * (4 * wide + converted), (3, 4))


def embedding(local: LocalCall) -> Operation | None:
    weight = local.shape("weight")
    if weight is None:
        return None
    # Forward reads only the looked-up rows, not the table; backward makes a dense gradient of the table and adds
    # it to what earlier microbatches left.
    table = math.prod(weight) * local.first_itemsize
    return bandwidth_bound(
        local, 2 * local.bytes_written + local.bytes_read - table, 4 * table + 3 * local.bytes_written, (1, 3)
    )


def view(local: LocalCall) -> Operation:
    return local.operation("view", NOTHING, NOTHING)


def split(local: LocalCall) -> Operation:
    """Return the demand of split and chunk: adjoining views, whose gradients are concatenated."""
    return local.operation("view", NOTHING, PassDemand(bytes=2 * local.input_gradient_bytes, kernels=1))


def slice_view(local: LocalCall) -> Operation:
    """Return the demand of a view of one part, whose gradient is written into zeros."""
    moved = local.input_gradient_bytes + 2 * local.bytes_written
    return local.operation("view", NOTHING, PassDemand(bytes=moved, kernels=2))


def expand_view(local: LocalCall) -> Operation:
    """Return the demand of a broadcasting view, whose gradients are summed."""
    grown = sum(math.prod(s) for s in local.outputs) > sum(math.prod(s) for s in local.inputs)
    moved = local.bytes_written + local.input_gradient_bytes
    return local.operation("view", NOTHING, PassDemand(bytes=moved, kernels=1) if grown else NOTHING)


def fill_tensor(local: LocalCall) -> Operation:
    return bandwidth_bound(local, local.bytes_written, 0.0, (1, 0))


def copy_tensor(local: LocalCall) -> Operation:
    return bandwidth_bound(
        local, local.bytes_read + local.bytes_written, local.input_gradient_bytes + local.bytes_written
    )
