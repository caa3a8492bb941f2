"""Trial: one operator run alone, forward and backward, to see what memory it makes, hands on and keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from polylane.graph.ledger import Ledger, place


@dataclass(frozen=True)
class Form:
    """A tensor without its values.

    Attributes:
        shape, stride, dtype: as torch has them.
        gradient: whether a gradient flows back through it.
        leaf: whether it is a parameter, where that gradient is accumulated.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = False
    leaf: bool = False

    @property
    def bytes(self) -> int:
        """Of the memory that its elements span."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Given:
    """A tensor that an operator gives.

    Attributes:
        form: of it; None for what is no tensor.
        input: the number of the input in whose memory it lies, or None.
        output: the number of the first output in whose memory it lies: its own where it is in new memory.
        bytes: of that memory, where it is new.
    """

    form: Form | None
    input: int | None = None
    output: int | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Own:
    """Memory that autograd keeps and that is neither an input's nor an output's.

    Attributes:
        bytes: of it.
        shape: of the tensor in it; None where it was not seen as a tensor.
    """

    bytes: int
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trial:
    """What came of it.

    Attributes:
        outputs: what it gives; one for each place of its result.
        inputs_kept, outputs_kept: numbers of the inputs and outputs that are kept for the backward pass.
        own: what else is.
        forward: bytes alive at most while it ran, beyond its inputs, its outputs and what it keeps.
        gradients: for every input: None where it gets no gradient; the number of the output in the memory of whose
            gradient its own lies, as ("output", j); or ("new", bytes).
        backward: bytes alive at most during the backward pass, beyond the outputs' gradients and what was kept.
        several: whether it gives a list.
    """

    outputs: tuple[Given, ...]
    inputs_kept: tuple[int, ...] = ()
    outputs_kept: tuple[int, ...] = ()
    own: tuple[Own, ...] = ()
    forward: int = 0
    gradients: tuple[tuple[str, int] | None, ...] = ()
    backward: int = 0
    several: bool = False


class _Made(torch.autograd.Function):
    """A new tensor that looks as if some operator had made it: written in place it may be."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def trial(call: Callable[[Sequence[Tensor]], Any], inputs: Sequence[Form], make: Callable[[Form], Tensor]) -> Trial:
    """Run an operator on tensors of these forms.

    Args:
        call: the operator, of its tensors.
        inputs: their forms.
        make: a tensor of a form, without gradient.
    """
    tensors = [_tensor(form, make) for form in inputs]
    ledger = Ledger(tensors)
    packed: dict[int, tuple[int, ...]] = {}  # what is kept, by its memory

    def pack(tensor: Tensor) -> Tensor:
        packed[place(tensor)] = tuple(tensor.shape)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), ledger:
        result = call(tensors)
    every: list[Any] = list(result) if isinstance(result, (list, tuple)) else [result]
    of_input = {place(t): i for i, t in reversed(list(enumerate(tensors)))}
    of_output = {place(t): j for j, t in reversed(list(enumerate(every))) if isinstance(t, Tensor)}
    new = {at: j for at, j in of_output.items() if at not in of_input}
    alive, after = ledger.alive(), ledger.now
    more = max(ledger.peak - after, 0)
    gradients, back = _backward(every, tensors, ledger)
    return Trial(
        outputs=tuple(_given(value, of_input, new, alive) for value in every),
        inputs_kept=tuple(sorted(i for at, i in of_input.items() if at in packed)),
        outputs_kept=tuple(sorted(j for at, j in new.items() if at in packed)),
        own=tuple(Own(size, packed.get(at)) for at, size in alive.items() if at not in new),
        forward=more,
        gradients=gradients,
        backward=back,
        several=isinstance(result, (list, tuple)),
    )


def _tensor(form: Form, make: Callable[[Form], Tensor]) -> Tensor:
    if form.leaf or not form.gradient:
        return make(form).requires_grad_(form.gradient)
    seed = torch.empty((), requires_grad=True)
    made: Tensor = _Made.apply(seed, lambda: make(form))  # type: ignore[no-untyped-call]
    return made


def _given(value: Any, of_input: Mapping[int, int], new: Mapping[int, int], alive: Mapping[int, int]) -> Given:
    if not isinstance(value, Tensor):
        return Given(None)
    form, at = form_of(value), place(value)
    return Given(form, of_input.get(at), new.get(at), alive.get(at, 0))


def form_of(tensor: Tensor) -> Form:
    """The form of a tensor."""
    return Form(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


def _backward(
    results: Sequence[Any], tensors: Sequence[Tensor], ledger: Ledger
) -> tuple[tuple[tuple[str, int] | None, ...], int]:
    """Where every input's gradient lies, and the bytes that were alive at most beyond what was before."""
    outputs = {j: t for j, t in enumerate(results) if isinstance(t, Tensor) and t.requires_grad}
    wanted = [t for t in tensors if t.requires_grad]
    if not outputs or not wanted:
        return (None,) * len(tensors), 0
    seeds = {j: torch.empty_like(t) for j, t in outputs.items()}
    ledger.ignore(seeds.values())
    before = ledger.peak = ledger.now
    with ledger:
        found = torch.autograd.grad(list(outputs.values()), wanted, list(seeds.values()), allow_unused=True)
    origin = {place(seed): ("output", j) for j, seed in seeds.items()}
    each = iter(found)
    gradients = tuple(_origin(next(each), origin) if t.requires_grad else None for t in tensors)
    return gradients, max(ledger.peak - before, 0)


def _origin(gradient: Tensor | None, known: dict[int, tuple[str, int]]) -> tuple[str, int] | None:
    """Where a gradient lies; new memory counts with the first of the gradients that lie in it."""
    if gradient is None:
        return None
    at = place(gradient)
    if at not in known:
        known[at] = ("new", 0)
        return "new", gradient.untyped_storage().nbytes()
    return known[at]
