"""Operator trial: run one operator alone, forward and backward, to see the memory that it allocates and saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from polylane.cost.memory.allocation_meter import AllocationMeter
from polylane.graph.nodes.memory import storage_id


@dataclass(frozen=True)
class TensorForm:
    """Shape, strides and dtype of a tensor, without data.

    Attributes:
        shape, stride, dtype: the tensor's own, strides in elements.
        gradient: whether a gradient flows back to it.
        is_parameter: whether it is a parameter, into which the gradient is accumulated.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = False
    is_parameter: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the memory that its elements span."""
        last_offset = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last_offset + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class OutputMemory:
    """Where one output of an operator is stored.

    Attributes:
        form: form of the output; None if it is no tensor.
        aliased_input: index of the input whose storage it shares, or None.
        aliased_output: index of the first output with the same storage: its own if it has a new one.
        new_bytes: bytes of the new storage; 0 if it shares an input's.
    """

    form: TensorForm | None
    aliased_input: int | None = None
    aliased_output: int | None = None
    new_bytes: int = 0


@dataclass(frozen=True)
class GradientOrigin:
    """Where the gradient of one input of an operator is stored.

    Attributes:
        output: index of the output whose gradient's storage it shares; None if it has a storage of its own.
        new_bytes: bytes of the storage of its own; 0 if it shares one.
        is_addable: whether autograd adds further gradients to it in place, once nobody else uses its memory: it fills
            its memory without holes or overlaps, and is no view of another tensor, which a view keeps alive.
    """

    output: int | None = None
    new_bytes: int = 0
    is_addable: bool = True


@dataclass(frozen=True)
class OperatorTrial:
    """Result of running one operator forward and backward.

    Attributes:
        outputs: storage of each output, in order.
        saved_inputs, saved_outputs: indices of the inputs and outputs that are saved for backward.
        own_tensors: bytes of each further piece of memory that is saved, such as masks and statistics.
        forward_peak: most bytes alive while it ran, beyond inputs, outputs and saved tensors.
        dropping_peak: most bytes alive while it runs if its own tensors are not saved, beyond inputs and outputs.
        gradient_origins: where the gradient of every input comes from; None for no gradient.
        backward: most bytes alive in the backward pass, beyond the outputs' gradients and saved tensors.
        returns_list: whether its result is a list or tuple.
        is_known: False if it could not be run, and all its inputs and outputs are assumed saved.
    """

    outputs: tuple[OutputMemory, ...]
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    own_tensors: tuple[int, ...] = ()
    forward_peak: int = 0
    dropping_peak: int = 0
    gradient_origins: tuple[GradientOrigin | None, ...] = ()
    backward: int = 0
    returns_list: bool = False
    is_known: bool = True


class _MadeTensor(torch.autograd.Function):
    """Makes a tensor that is no leaf of autograd, so that in-place operators may write it."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def try_operator(
    call: Callable[[Sequence[Tensor]], Any], inputs: Sequence[TensorForm], make: Callable[[TensorForm], Tensor]
) -> OperatorTrial:
    """Run an operator, forward and backward, on tensors of these forms.

    Args:
        call: runs the operator on a list of tensors.
        inputs: forms of the tensors that it reads.
        make: allocates a tensor of a form, without requires_grad.
    """
    tensors = [_make_tensor(form, make) for form in inputs]
    ledger = AllocationMeter(tensors)
    packed = set[int]()  # storages of saved tensors

    def pack(tensor: Tensor) -> Tensor:
        packed.add(storage_id(tensor))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), ledger:
        result = call(tensors)
    results: list[Any] = list(result) if isinstance(result, (list, tuple)) else [result]
    # Reversed, so that of several tensors with one storage the first wins.
    of_input = {storage_id(t): i for i, t in reversed(list(enumerate(tensors)))}
    of_output = {storage_id(t): j for j, t in reversed(list(enumerate(results))) if isinstance(t, Tensor)}
    new = {at: j for at, j in of_output.items() if at not in of_input}
    # Read before the backward pass, which allocates too. Storages alive now that belong to no output are saved by
    # autograd.
    alive, current_bytes = ledger.alive_bytes(), ledger.current_bytes
    forward_peak = max(ledger.peak_bytes - current_bytes, 0)
    gradients, back = _run_backward(results, tensors, ledger)
    own_tensors = tuple(size for at, size in alive.items() if at not in new)
    return OperatorTrial(
        outputs=tuple(_output_memory(value, of_input, new, alive) for value in results),
        saved_inputs=tuple(sorted(i for at, i in of_input.items() if at in packed)),
        saved_outputs=tuple(sorted(j for at, j in new.items() if at in packed)),
        own_tensors=own_tensors,
        forward_peak=forward_peak,
        dropping_peak=_run_dropping(call, inputs, make) if own_tensors else forward_peak,
        gradient_origins=gradients,
        backward=back,
        returns_list=isinstance(result, (list, tuple)),
    )


def _run_dropping(
    call: Callable[[Sequence[Tensor]], Any], inputs: Sequence[TensorForm], make: Callable[[TensorForm], Tensor]
) -> int:
    """Return the most bytes alive while an operator runs, beyond inputs and outputs, if nothing of it is saved."""
    tensors = [_make_tensor(form, make) for form in inputs]
    ledger = AllocationMeter(tensors)
    with saved_tensors_hooks(lambda tensor: None, _never_unpack), ledger:
        result = call(tensors)
    results: list[Any] = list(result) if isinstance(result, (list, tuple)) else [result]
    storages = {storage_id(t) for t in results if isinstance(t, Tensor)}
    return max(ledger.peak_bytes - sum(size for at, size in ledger.alive_bytes().items() if at in storages), 0)


def _never_unpack(saved_value: Any) -> Tensor:
    raise AssertionError("this run has no backward pass")


def _make_tensor(form: TensorForm, make: Callable[[TensorForm], Tensor]) -> Tensor:
    if form.is_parameter or not form.gradient:
        return make(form).requires_grad_(form.gradient)
    seed = torch.empty((), requires_grad=True)
    tensor: Tensor = _MadeTensor.apply(seed, lambda: make(form))  # type: ignore[no-untyped-call]
    return tensor


def _output_memory(
    value: Any, of_input: Mapping[int, int], new: Mapping[int, int], alive: Mapping[int, int]
) -> OutputMemory:
    if not isinstance(value, Tensor):
        return OutputMemory(None)
    form, at = form_of(value), storage_id(value)
    return OutputMemory(form, of_input.get(at), new.get(at), alive.get(at, 0))


def form_of(tensor: Tensor) -> TensorForm:
    """Return the form of a tensor."""
    return TensorForm(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


def _run_backward(
    results: Sequence[Any], tensors: Sequence[Tensor], ledger: AllocationMeter
) -> tuple[tuple[GradientOrigin | None, ...], int]:
    """Return the origin of every input's gradient, and the peak bytes of the backward pass beyond its start."""
    outputs = {j: t for j, t in enumerate(results) if isinstance(t, Tensor) and t.requires_grad}
    inputs = [t for t in tensors if t.requires_grad]
    if not outputs or not inputs:
        return (None,) * len(tensors), 0
    # The outputs' gradients exist before the pass and do not count.
    seeds = {j: torch.empty_like(t) for j, t in outputs.items()}
    ledger.ignore_tensors(seeds.values())
    start_bytes = ledger.peak_bytes = ledger.current_bytes
    with ledger:
        input_gradients = torch.autograd.grad(list(outputs.values()), inputs, list(seeds.values()), allow_unused=True)
    origins = {storage_id(seed): GradientOrigin(j) for j, seed in seeds.items()}
    iterator = iter(input_gradients)
    gradients = tuple(_gradient_origin(next(iterator), origins) if t.requires_grad else None for t in tensors)
    return gradients, max(ledger.peak_bytes - start_bytes, 0)


def _gradient_origin(gradient: Tensor | None, origins: dict[int, GradientOrigin]) -> GradientOrigin | None:
    """Return the origin of a gradient; a new storage counts with the first gradient in it, others count 0 bytes."""
    if gradient is None:
        return None
    at = storage_id(gradient)
    is_addable = torch.ops.aten.is_non_overlapping_and_dense(gradient) and not gradient._is_view()
    if at not in origins:
        origins[at] = GradientOrigin()
        return GradientOrigin(None, gradient.untyped_storage().nbytes(), is_addable)
    return replace(origins[at], is_addable=is_addable)
