"""Benchmark sweep: operators of many shapes, from tall and thin to square, with which a device is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.cost.operators.operation import Operation, operation
from polylane.placement.strategy import OperatorCall, TensorValue

# Roles of tensors: an activation; a parameter, whose gradient is accumulated; a buffer, which has no gradient; integers
# below a bound.
ACTIVATION, WEIGHT, BUFFER, INDEX = "activation", "weight", "buffer", "index"


@dataclass(frozen=True)
class CaseTensor:
    """A tensor argument of a measured operator.

    Attributes:
        shape: sizes of its dimensions.
        role: :data:`ACTIVATION`, :data:`WEIGHT`, :data:`BUFFER` or :data:`INDEX`.
        bound: exclusive upper bound of the integers, for :data:`INDEX`.
    """

    shape: tuple[int, ...]
    role: str = ACTIVATION
    bound: int = 1

    @property
    def requires_grad(self) -> bool:
        """Whether it has a gradient."""
        return self.role in (ACTIVATION, WEIGHT)

    def make_tensor(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return a tensor of this shape and role with random values."""
        if self.role == INDEX:
            return torch.randint(self.bound, self.shape, device=device)
        return torch.randn(self.shape, device=device).to(dtype).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class OperatorCase:
    """A measured operator on tensors of given shapes.

    Attributes:
        family: resource that it measures: "matmul", "convolution", "attention" or "memory".
        op: name of the operator as in a graph ("aten.linear.default").
        arguments: arguments in the order of torch's schema, tensors as :class:`CaseTensor`.
    """

    family: str
    op: str
    arguments: tuple[Any, ...]

    @property
    def target(self) -> Any:
        """The operator overload to call."""
        _, name, overload = self.op.split(".")
        return getattr(getattr(torch.ops.aten, name), overload)

    @property
    def name(self) -> str:
        """Readable name: "linear 32x512 2048x512"."""
        shapes = ("x".join(map(str, arg.shape)) for arg in self.arguments if isinstance(arg, CaseTensor))
        return f"{self.op.split('.')[1]} {' '.join(shapes)}"

    def make_arguments(self, dtype: torch.dtype, device: torch.device | str) -> list[Any]:
        """Return arguments to call it with, tensors filled with random values."""
        return [arg.make_tensor(dtype, device) if isinstance(arg, CaseTensor) else arg for arg in self.arguments]

    def describe_operation(self, dtype: torch.dtype) -> Operation:
        """Return its demand, by which the device model prices it."""
        call = self._call(dtype)
        return operation(call, [v.shape for v in call.inputs], [v.shape for v in call.outputs])

    def _call(self, dtype: torch.dtype) -> OperatorCall:
        inputs: list[TensorValue] = []
        arguments: dict[str, Any] = {}
        for index, slot in enumerate(self.target._schema.arguments):
            value = self.arguments[index] if index < len(self.arguments) else slot.default_value
            if isinstance(value, CaseTensor):
                value = TensorValue(
                    value.shape, torch.int64 if value.role == INDEX else dtype, value.requires_grad, len(inputs)
                )
                inputs.append(value)
            arguments[slot.name] = value
        # A run on the meta device gives the output shapes without computing.
        result = self.target(*self.make_arguments(dtype, "meta"))
        shapes = [tuple(output.shape) for output in (result if isinstance(result, (list, tuple)) else [result])]
        outputs = tuple(TensorValue(shape, dtype, True, index, "out") for index, shape in enumerate(shapes))
        return OperatorCall(self.op, arguments, tuple(inputs), outputs, 1)


def _linear(rows: int, terms: int, columns: int) -> OperatorCase:
    return OperatorCase(
        "matmul", "aten.linear.default", (CaseTensor((rows, terms)), _weight(columns, terms), _weight(columns))
    )


def _weight(*shape: int) -> CaseTensor:
    return CaseTensor(shape, WEIGHT)


def _bmm(batch: int, m: int, n: int, k: int) -> OperatorCase:
    return OperatorCase("matmul", "aten.bmm.default", (CaseTensor((batch, m, k)), CaseTensor((batch, k, n))))


def _convolution(images: int, channels: int, side: int, filters: int, window: int, stride: int = 1) -> OperatorCase:
    weights = (_weight(filters, channels, window, window), _weight(filters))
    arguments = (CaseTensor((images, channels, side, side)), *weights, [stride, stride], [window // 2, window // 2])
    return OperatorCase("convolution", "aten.conv2d.default", arguments)


def _attention(batch: int, heads: int, length: int, features: int, causal: bool) -> OperatorCase:
    tensor = CaseTensor((batch, heads, length, features))
    op = "aten.scaled_dot_product_attention.default"
    return OperatorCase("attention", op, (tensor, tensor, tensor, None, 0.0, causal))


def _moving(elements: int) -> list[OperatorCase]:
    rows = CaseTensor((elements // 256, 256))
    return [
        OperatorCase("memory", "aten.relu.default", (rows,)),
        OperatorCase("memory", "aten.gelu.default", (rows,)),
        OperatorCase("memory", "aten.mul.Tensor", (rows, rows)),
        OperatorCase("memory", "aten.layer_norm.default", (rows, [256], _weight(256), _weight(256))),
        OperatorCase("memory", "aten.softmax.int", (rows, -1)),
        OperatorCase("memory", "aten.dropout.default", (rows, 0.1, True)),
    ]


def _normalized(images: int, channels: int, side: int) -> OperatorCase:
    """Return a batch normalization in training mode."""
    weight, buffer = _weight(channels), CaseTensor((channels,), BUFFER)
    arguments = (CaseTensor((images, channels, side, side)), weight, weight, buffer, buffer, True, 0.1, 1e-5, False)
    return OperatorCase("memory", "aten.batch_norm.default", arguments)


def _pooled(images: int, channels: int, side: int) -> OperatorCase:
    """Return a max pooling over windows of 3 x 3."""
    arguments = (CaseTensor((images, channels, side, side)), [3, 3], [1, 1], [1, 1])
    return OperatorCase("memory", "aten.max_pool2d.default", arguments)


def _embedding(rows: int, columns: int, picked: int) -> OperatorCase:
    return OperatorCase(
        "memory", "aten.embedding.default", (_weight(rows, columns), CaseTensor((picked,), INDEX, rows))
    )


def _cross_entropy(rows: int, classes: int) -> OperatorCase:
    return OperatorCase(
        "memory", "aten.cross_entropy_loss.default", (CaseTensor((rows, classes)), CaseTensor((rows,), INDEX, classes))
    )


def cpu_cases() -> list[OperatorCase]:
    """Return the sweep for a CPU core: at most a few GFLOP each."""
    # Square, then tall and thin as in training: tile quantization and bandwidth limits show only in odd shapes.
    cases = [_linear(n, n, n) for n in (32, 64, 128, 256, 512, 1024)]
    cases += [_linear(8, 64, 64), _linear(64, 64, 256), _linear(64, 256, 64), _linear(4096, 64, 64)]
    cases += [_linear(1024, 64, 256), _linear(1, 1024, 1024), _linear(16, 512, 2048), _linear(16, 2048, 512)]
    cases += [_linear(256, 128, 8192), _linear(512, 256, 768), _linear(512, 1024, 256), _linear(2048, 2048, 10)]
    cases += [_linear(1024, 128, 384), _linear(256, 384, 1536)]
    cases += [_bmm(16, 64, 64, 32), _bmm(64, 64, 32, 64), _bmm(8, 256, 64, 256), _bmm(32, 128, 128, 64)]
    cases += [_convolution(8, 3, 32, 16, 3), _convolution(8, 32, 16, 64, 3), _convolution(4, 64, 28, 64, 3)]
    cases += [_convolution(8, 128, 14, 256, 1), _convolution(2, 16, 64, 32, 3), _convolution(4, 64, 32, 128, 3, 2)]
    cases += [_convolution(4, 16, 8, 16, 3), _convolution(16, 16, 16, 8, 1)]
    cases += [_attention(4, 4, 64, 32, True), _attention(2, 4, 256, 64, True), _attention(1, 8, 512, 64, False)]
    for elements in (1 << 12, 1 << 16, 1 << 20):
        cases += _moving(elements)
    cases += [_normalized(16, 16, 8), _normalized(8, 64, 28), _pooled(16, 16, 8), _pooled(8, 64, 28)]
    return [*cases, _embedding(8192, 128, 512), _cross_entropy(512, 8192), _cross_entropy(64, 10)]


def gpu_cases() -> list[OperatorCase]:
    """Return the sweep for a GPU: up to a TFLOP each."""
    # Square, then the shapes of transformer layers and vocabularies.
    cases = [_linear(n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
    cases += [_linear(65536, 128, 128), _linear(16384, 1024, 4096), _linear(16384, 4096, 1024)]
    cases += [_linear(16, 4096, 16384), _linear(2048, 12288, 1536), _linear(4096, 1600, 6400)]
    cases += [_linear(8192, 2048, 50304), _linear(512, 768, 3072)]
    cases += [_bmm(128, 512, 512, 64), _bmm(64, 2048, 64, 2048), _bmm(256, 128, 128, 128)]
    cases += [_convolution(64, 3, 224, 64, 7, 2), _convolution(64, 64, 56, 64, 3)]
    cases += [_convolution(64, 256, 14, 1024, 1), _attention(8, 12, 1024, 64, False)]
    cases += [_attention(8, 16, 512, 64, True), _attention(4, 16, 2048, 128, True)]
    for elements in (1 << 16, 1 << 22, 1 << 26):
        cases += _moving(elements)
    cases += [_normalized(64, 64, 56), _pooled(64, 64, 56)]
    return [*cases, _embedding(50304, 2048, 8192), _cross_entropy(4096, 50304)]
