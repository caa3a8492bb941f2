"""Backward passes in two halves: the gradients of a stage's weights are computed after those of its inputs.

A call that is linear in a weight reads the weight detached, so that autograd computes the gradient of its input alone,
by the operator's own formula. When the gradient of the result is there, a hook records it beside the input. The second
half computes the weights' gradients from these (weight_formulas.py) and hands them to autograd where they belong:

    forward        linear(x, w.detach())          hook: keep x
    first half     gradient of x                  hook: keep the gradient of the result, g
    second half    g^T x  ->  backward of w, through what w was made of, into the parameters' ``.grad``

What is kept between the halves: for every such call x and g (values that several calls share, once); gradients and
saved tensors of what is computed from parameters alone. All else that autograd saved is free after the first half.

A parameter gets all of its gradient in one half: where another operator reads it too, as in a weight that is both an
embedding and a mask, that reader's gradient waits for the second half. So each accumulation hook runs once per pass.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.placement.weight_formulas import Position, WeightFormula, operand_at

# The role of the placeholder by which a stage's code gets the :class:`DeferredGradients` of its pass.
DEFERRED = ("deferred", "gradients")


@dataclass(slots=True)
class _WeightRecord:
    """A call whose weight gradient is not computed yet: its kept input, its weight and the gradient of its result."""

    call: DeferredCall
    kept: Tensor
    weight: Tensor
    gradient: Tensor

    def compute(self) -> list[Tensor]:
        """Return the gradients of the call's weight, and of its bias if it has one."""
        gradients = self.call.formula.gradients(self.gradient, self.kept, self.weight)
        return [gradient for gradient in gradients if gradient is not None]


class DeferredGradients:
    """The gradients of one microbatch's weights, from the forward pass until the second half of its backward pass.

    Args:
        groups: for each weight value its group, see :func:`defer_weight_gradients`.
    """

    __slots__ = ("_cuts", "_records", "groups", "hold_dropped", "is_recording", "values")

    def __init__(self, groups: Sequence[int]) -> None:
        self.groups = groups
        self.values: list[Tensor | None] = [None] * len(groups)  # those that need a gradient, as autograd knows them
        self._records: deque[_WeightRecord] = deque()
        self._cuts: list[tuple[int, Tensor]] = []
        self.is_recording = False
        # Of a tensor that is dropped and recomputed: a function that returns it again; None for all others. Set while
        # a call reads or makes dropped values (recompute.py).
        self.hold_dropped: Callable[[Tensor], Callable[[], Tensor] | None] | None = None

    def detach(self, slot: int, value: Tensor) -> Tensor:
        """Return a weight value for the calls whose weight gradient is deferred."""
        if not value.requires_grad:
            return value
        self.values[slot] = value
        return value.detach()

    def cut(self, slot: int, value: Tensor) -> Tensor:
        """Return a weight value for all other readers: their gradient is computed now, and handed on later."""
        if not value.requires_grad:
            return value
        self.values[slot] = value
        leaf = value.detach().requires_grad_()
        self._cuts.append((slot, leaf))
        return leaf

    def record(self, record: _WeightRecord) -> None:
        """Keep what a weight gradient is computed from; called in the first half of the backward pass."""
        self._records.append(record)

    def accumulate(self) -> None:
        """Compute all gradients that were deferred, and add them to the ``.grad`` of their parameters.

        In the order of the backward pass, so that the reduction of a bucket starts as early as it can; each record is
        released once its gradients are computed.
        """
        cuts = [(slot, leaf.grad) for slot, leaf in self._cuts if leaf.grad is not None]
        self._cuts.clear()
        pending = Counter(self.groups[slot] for slot, _ in cuts)
        for record in self._records:
            pending.update(self.groups[slot] for slot in record.call.slots)
        sums: dict[int, dict[int, Tensor]] = {group: {} for group in pending}
        while cuts:
            slot, gradient = cuts.pop()
            self._add(slot, [gradient], sums, pending)
        while self._records:
            record = self._records.popleft()
            call = record.call
            into = self._accumulated(call, record, sums, pending)
            if into is not None:
                assert call.formula.add is not None
                of_bias = call.formula.add(record.gradient, record.kept, into)
                gradients = [] if of_bias is None else [of_bias]
            else:
                gradients = record.compute()
            for slot in call.slots[into is not None :]:
                self._add(slot, gradients, sums, pending)
        self.values.clear()

    def _accumulated(
        self, call: DeferredCall, record: _WeightRecord, sums: dict[int, dict[int, Tensor]], pending: Counter[int]
    ) -> Tensor | None:
        """Return the ``.grad`` to which a product may add a weight's gradient at once; None where autograd must do it.

        A product that adds to memory takes a quarter less time than one that is then added. It must be all of the
        parameter's gradient in this pass, and without hooks, which autograd alone runs.
        """
        slot = call.slots[0]
        value, group = self.values[slot], self.groups[slot]
        if call.formula.add is None or value is None or not value.is_leaf or value.grad is None:
            return None
        # The last of several readers finds the gradients of the others in their sum, which is sent on by autograd.
        alone = pending[group] == 1 and not sums[group] and self.groups.count(group) == 1
        hooked = value._backward_hooks or value._post_accumulate_grad_hooks
        kinds = {value.grad.dtype, record.kept.dtype, record.gradient.dtype}
        flat = value.dim() != 2 or record.kept.dim() < 2 or value.shape != record.weight.shape
        return None if flat or not alone or hooked or len(kinds) > 1 else value.grad

    def _add(
        self, slot: int, gradients: list[Tensor], sums: dict[int, dict[int, Tensor]], pending: Counter[int]
    ) -> None:
        """Add the first of some gradients, taken from their list, to its weight value's sum.

        The last one of a group sends the group's on; nobody else may refer to it then, or autograd would copy it.
        """
        group, value, gradient = self.groups[slot], self.values[slot], gradients.pop(0)
        if value is not None:  # else it is frozen
            gradient = gradient.sum_to_size(value.shape).to(value.dtype)
            group_sums = sums[group]
            group_sums[slot] = group_sums[slot] + gradient if slot in group_sums else gradient
        del gradient
        pending[group] -= 1
        if pending[group] == 0 and (complete := sums.pop(group)):
            self._send_on(complete)

    def _send_on(self, complete: dict[int, Tensor]) -> None:
        """Have autograd accumulate the gradients of a group: of parameters, or of what is computed from them."""
        slots = list(complete)
        values = [value for slot in slots if (value := self.values[slot]) is not None]
        (first_value, *other_values) = values
        if other_values or not first_value.is_leaf or first_value.grad is not None or first_value._backward_hooks:
            torch.autograd.backward(values, [complete.pop(slot) for slot in slots])
            return
        # autograd copies a first gradient that somebody else refers to: a hook gives it the only reference. The stub
        # takes no memory.
        gradient = complete.pop(slots[0])
        stub = gradient.new_zeros(()).expand_as(gradient)
        holder = [gradient]
        del gradient
        handle = first_value.register_hook(lambda _: holder.pop())
        try:
            torch.autograd.backward([first_value], [stub])
        finally:
            handle.remove()


class DeferredCall:
    """Wraps a call that is linear in a weight: ``call(deferred, *args)``, the weight and the bias among them detached.

    Attributes:
        target: the operator of the graph that is called later.
        formula: how the gradients of the weight and of the bias are computed.
        slots: the slots of the weight and, if it has one, of the bias.
        label: the user-facing name of the node, for errors.
    """

    __module__ = "polylane"

    def __init__(
        self, target: Callable[..., Tensor], formula: WeightFormula, slots: tuple[int, ...], label: str
    ) -> None:
        self.target, self.formula, self.slots, self.label = target, formula, slots, label
        self.__name__ = str(getattr(target, "__name__", target)).replace(".", "_")

    def without_effect(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments for a second run, which records nothing (:mod:`polylane.graph.capture.repeatable`)."""
        return (None, *args[1:])

    def __call__(self, deferred: DeferredGradients | None, *args: Any, **kwargs: Any) -> Tensor:
        if deferred is None or deferred.values[self.slots[0]] is None:
            return self.target(*args, **kwargs)
        operand = value = operand_at(args, self.formula.kept)
        if self.formula.is_product and torch.is_autocast_enabled(value.device.type) and value.dtype != torch.float64:
            # Cast here what autocast would cast in the operator, and keep the narrower tensor as autograd does.
            value = value.to(torch.get_autocast_dtype(value.device.type))
            args = _replace_operand(args, self.formula.kept, value)
        result = self.target(*args, **kwargs)
        if not result.requires_grad:
            result = _require_gradient(result)
        weight, getter = operand_at(args, self.formula.weight), None
        if deferred.hold_dropped is not None:
            getter = deferred.hold_dropped(operand)
        dtype, version = value.dtype, value._version
        saved_value = value.detach() if getter is None else None
        del value, operand, args  # the hook below must not hold what is dropped

        def record(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[0]
            # A gradient that the user's own Python takes of this value on the way is not one of the weights.
            if gradient is None or not deferred.is_recording:
                return
            if saved_value is None:
                assert getter is not None
                deferred.record(_WeightRecord(self, getter().to(dtype), weight, gradient))
                return
            if saved_value._version != version:
                raise RuntimeError(f"{self.label} needs its input for the gradient of its weight: it was written to")
            deferred.record(_WeightRecord(self, saved_value, weight, gradient))

        assert result.grad_fn is not None
        result.grad_fn.register_prehook(record)
        return result


def _replace_operand(args: tuple[Any, ...], position: Position, value: Tensor) -> tuple[Any, ...]:
    index, *inner_indices = position
    new = [*args[index][: inner_indices[0]], value, *args[index][inner_indices[0] + 1 :]] if inner_indices else value
    return (*args[:index], new, *args[index + 1 :])


def _require_gradient(result: Tensor) -> Tensor:
    """Return a result of inputs without gradient with a node of its own in autograd's graph, which costs nothing.

    Adding no rows of a tensor that needs a gradient does it, and the result may still be written in place, which the
    view that an autograd function returns may not.
    """
    if result._is_view():
        result = torch.ops.aten._unsafe_view.default(result, result.shape)
    rows = torch.empty(0, dtype=torch.int64, device=result.device)
    # Its empty tensors are none of the operator's own, which a second run of it would save again.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return result.index_add_(0, rows, result.new_empty((0, *result.shape[1:])).requires_grad_())


class WeightBoundary:
    """Reads a weight value for readers of one kind: ``boundary(deferred, value)``."""

    __module__ = "polylane"

    def __init__(self, slot: int, cuts: bool) -> None:
        self.slot, self.cuts = slot, cuts
        self.__name__ = "cut_weight" if cuts else "detach_weight"

    def __call__(self, deferred: DeferredGradients | None, value: Tensor) -> Tensor:
        if deferred is None:
            return value
        return deferred.cut(self.slot, value) if self.cuts else deferred.detach(self.slot, value)
