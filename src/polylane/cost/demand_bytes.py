"""What operators ask for that compute little: bytes."""

from __future__ import annotations

import math

from polylane.cost.demand import NOTHING, Local, Operation, Pass


def moving(local: Local, forward: float, backward: float, kernels: tuple[float, float] = (1, 1)) -> Operation:
    back = Pass(bytes=backward, kernels=kernels[1]) if local.learns else NOTHING
    return Operation("memory", Pass(bytes=forward, kernels=kernels[0]), back, item=local.element)


def memory(local: Local) -> Operation:
    """Reads all that goes in and writes all that comes out; the backward pass reads both and the gradient as well."""
    forward = local.read + local.written
    return moving(local, forward, local.returned + local.written + local.read)


def linear_combination(local: Local) -> Operation:
    """Gradients of sums are the gradient itself; where two inputs have one, a fork before it adds them up."""
    forward = local.read + local.written
    if not local.learns:
        return moving(local, forward, 0.0)
    whole = [s for s, v in zip(local.inputs, local.call.inputs, strict=True) if v.gradient]
    forks = sum(math.prod(s) == math.prod(local.outputs[0]) for s in whole) > 1
    smaller = any(math.prod(s) < math.prod(local.outputs[0]) for s in whole)
    moved = 3 * local.written * forks + local.written * smaller
    return moving(local, forward, moved, (1, float(forks + smaller)))


def dropout(local: Local) -> Operation:
    if not _training(local):
        return view(local)
    kept = float(math.prod(local.outputs[0]))  # a byte for each element says whether it was kept
    moved = local.read + local.written + kept
    return moving(local, moved, moved)


def _training(local: Local) -> bool:
    flag = local.call.arguments.get("train", local.call.arguments.get("training", True))
    return bool(flag) and local.call.arguments.get("p", 0.5) != 0


def output_kept(local: Local) -> Operation:
    """The backward pass reads what the forward pass gave and the gradient, and writes one."""
    return moving(local, local.read + local.written, 2 * local.written + local.returned)


def normalization(local: Local) -> Operation:
    """The backward pass reads inputs and gradient once for its input's gradient, and once for its parameters'."""
    parameters = any(v.gradient for v in local.call.inputs[1:])
    moved = 2 * local.written + local.returned + 2 * local.written * parameters
    return moving(local, local.read + local.written, moved, (1, 1 + parameters))


def loss(local: Local) -> Operation:
    """The logarithm of a softmax, picked at the targets, in float32: what comes in 16 bits is converted, both ways."""
    value = local.call.inputs[0]
    elements, item = math.prod(local.inputs[0]), local.width(value)
    converted = (item + 4) * (item < 4)
    wide = max(item, 4)
    return moving(local, elements * (2 * wide + converted), elements * (4 * wide + converted), (3, 4))


def embedding(local: Local) -> Operation | None:
    weight = local.shape("weight")
    if weight is None:
        return None
    table = math.prod(weight) * local.element
    return moving(local, 2 * local.written + local.read - table, 4 * table + 3 * local.written, (1, 3))


def view(local: Local) -> Operation:
    return Operation("view", NOTHING, NOTHING, item=local.element)


def parts(local: Local) -> Operation:
    """Views of parts that adjoin: their gradients are put together again."""
    back = Pass(bytes=2 * local.returned, kernels=1) if local.learns else NOTHING
    return Operation("view", NOTHING, back, item=local.element)


def piece(local: Local) -> Operation:
    """A view of one part: its gradient is written among zeros."""
    back = Pass(bytes=local.returned + 2 * local.written, kernels=2) if local.learns else NOTHING
    return Operation("view", NOTHING, back, item=local.element)


def expanded(local: Local) -> Operation:
    """A view that repeats: gradients are summed."""
    grown = sum(math.prod(s) for s in local.outputs) > sum(math.prod(s) for s in local.inputs)
    back = Pass(bytes=local.written + local.returned, kernels=1) if local.learns and grown else NOTHING
    return Operation("view", NOTHING, back, item=local.element)


def made(local: Local) -> Operation:
    return moving(local, local.written, 0.0, (1, 0))


def copied(local: Local) -> Operation:
    return moving(local, local.read + local.written, local.returned + local.written)
