"""Trial: one operator run alone, forward and backward, to see what memory it makes, hands on and keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from polylane.cost.memory.allocation_meter import AllocationMeter, storage_id


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its values.

    Attributes:
        shape, stride, dtype: as torch has them.
        gradient: whether a gradient flows back through it.
        is_parameter: whether it is a parameter, where that gradient is accumulated.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = False
    is_parameter: bool = False

    @property
    def bytes(self) -> int:
        """Of the memory that its elements span."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class OutputMemory:
    """A tensor that an operator gives.

    Attributes:
        form: of it; None for what is no tensor.
        aliased_input: the number of the input in whose memory it lies, or None.
        aliased_output: the number of the first output in whose memory it lies: its own where it is in new memory.
        new_bytes: of that memory, where it is new.
    """

    form: TensorForm | None
    aliased_input: int | None = None
    aliased_output: int | None = None
    new_bytes: int = 0


@dataclass(frozen=True)
class SavedTensor:
    """Memory that autograd keeps and that is neither an input's nor an output's.

    Attributes:
        bytes: of it.
        shape: of the tensor in it; None where it was not seen as a tensor.
    """

    bytes: int
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class OperatorTrial:
    """What came of it.

    Attributes:
        outputs: what it gives; one for each place of its result.
        saved_inputs, saved_outputs: numbers of the inputs and outputs that are kept for the backward pass.
        own_tensors: what else is.
        forward_peak: bytes alive at most while it ran, beyond its inputs, its outputs and what it keeps.
        gradient_origins: for every input: None where it gets no gradient; the number of the output in the memory of
            whose gradient its own lies, as ("output", j); or ("new", bytes).
        backward: bytes alive at most during the backward pass, beyond the outputs' gradients and what was kept.
        returns_list: whether it gives a list.
    """

    outputs: tuple[OutputMemory, ...]
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    own_tensors: tuple[SavedTensor, ...] = ()
    forward_peak: int = 0
    gradient_origins: tuple[tuple[str, int] | None, ...] = ()
    backward: int = 0
    returns_list: bool = False


class _MadeTensor(torch.autograd.Function):
    """A new tensor that looks as if some operator had made it: written in place it may be."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def try_operator(
    call: Callable[[Sequence[Tensor]], Any], inputs: Sequence[TensorForm], make: Callable[[TensorForm], Tensor]
) -> OperatorTrial:
    """Run an operator on tensors of these forms.

    Args:
        call: the operator, of its tensors.
        inputs: their forms.
        make: a tensor of a form, without gradient.
    """
    tensors = [_make_tensor(form, make) for form in inputs]
    ledger = AllocationMeter(tensors)
    packed: dict[int, tuple[int, ...]] = {}  # what is kept, by its memory

    def pack(tensor: Tensor) -> Tensor:
        packed[storage_id(tensor)] = tuple(tensor.shape)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), ledger:
        result = call(tensors)
    every: list[Any] = list(result) if isinstance(result, (list, tuple)) else [result]
    of_input = {storage_id(t): i for i, t in reversed(list(enumerate(tensors)))}
    of_output = {storage_id(t): j for j, t in reversed(list(enumerate(every))) if isinstance(t, Tensor)}
    new = {at: j for at, j in of_output.items() if at not in of_input}
    alive, after = ledger.alive_bytes(), ledger.current_bytes
    more = max(ledger.peak_bytes - after, 0)
    gradients, back = _run_backward(every, tensors, ledger)
    return OperatorTrial(
        outputs=tuple(_output_memory(value, of_input, new, alive) for value in every),
        saved_inputs=tuple(sorted(i for at, i in of_input.items() if at in packed)),
        saved_outputs=tuple(sorted(j for at, j in new.items() if at in packed)),
        own_tensors=tuple(SavedTensor(size, packed.get(at)) for at, size in alive.items() if at not in new),
        forward_peak=more,
        gradient_origins=gradients,
        backward=back,
        returns_list=isinstance(result, (list, tuple)),
    )


def _make_tensor(form: TensorForm, make: Callable[[TensorForm], Tensor]) -> Tensor:
    if form.is_parameter or not form.gradient:
        return make(form).requires_grad_(form.gradient)
    seed = torch.empty((), requires_grad=True)
    made: Tensor = _MadeTensor.apply(seed, lambda: make(form))  # type: ignore[no-untyped-call]
    return made


def _output_memory(
    value: Any, of_input: Mapping[int, int], new: Mapping[int, int], alive: Mapping[int, int]
) -> OutputMemory:
    if not isinstance(value, Tensor):
        return OutputMemory(None)
    form, at = form_of(value), storage_id(value)
    return OutputMemory(form, of_input.get(at), new.get(at), alive.get(at, 0))


def form_of(tensor: Tensor) -> TensorForm:
    """The form of a tensor."""
    return TensorForm(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


def _run_backward(
    results: Sequence[Any], tensors: Sequence[Tensor], ledger: AllocationMeter
) -> tuple[tuple[tuple[str, int] | None, ...], int]:
    """Where every input's gradient lies, and the bytes that were alive at most beyond what was before."""
    outputs = {j: t for j, t in enumerate(results) if isinstance(t, Tensor) and t.requires_grad}
    wanted = [t for t in tensors if t.requires_grad]
    if not outputs or not wanted:
        return (None,) * len(tensors), 0
    seeds = {j: torch.empty_like(t) for j, t in outputs.items()}
    ledger.ignore_tensors(seeds.values())
    before = ledger.peak_bytes = ledger.current_bytes
    with ledger:
        found = torch.autograd.grad(list(outputs.values()), wanted, list(seeds.values()), allow_unused=True)
    origin = {storage_id(seed): ("output", j) for j, seed in seeds.items()}
    each = iter(found)
    gradients = tuple(_gradient_origin(next(each), origin) if t.requires_grad else None for t in tensors)
    return gradients, max(ledger.peak_bytes - before, 0)


def _gradient_origin(gradient: Tensor | None, known: dict[int, tuple[str, int]]) -> tuple[str, int] | None:
    """Where a gradient lies; new memory counts with the first of the gradients that lie in it."""
    if gradient is None:
        return None
    at = storage_id(gradient)
    if at not in known:
        known[at] = ("new", 0)
        return "new", gradient.untyped_storage().nbytes()
    return known[at]
