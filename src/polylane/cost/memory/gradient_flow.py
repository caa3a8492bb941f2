"""Gradient flow: the pieces of memory in which a backward pass holds gradients, and the steps that touch each."""

from __future__ import annotations

from collections.abc import Container, Mapping

from polylane.cost.memory.operator_trial import TensorForm
from polylane.cost.memory.saved_tensors import Key, SavedByOperator

# The pieces that one step touches; and the steps of one operator or more: first its backward pass, then the sums.
Step = list[int]


class GradientFlow:
    """Pieces of memory of a backward pass's gradients, as autograd passes and accumulates them, node by node.

    An operator's backward pass reads the gradients of its outputs and makes those of its inputs. When it is over and
    what it read is free, autograd adds these to what other readers of the inputs have sent. It adds in place to the
    gradient that came first (``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp) if nobody else uses
    its memory, and if it fills that memory and is no view; else the sum is a step of its own, which takes new memory.

    Args:
        waiting: names of the operators whose weights get their gradients later, for which the gradients of their
            results are kept, so that nothing is added to these in place.

    Attributes:
        sizes: bytes of every piece of memory that holds gradients.
        is_parameter_gradient: whether the piece is a parameter's gradient, which no node reads.
        steps: node position -> its steps, in their order; the node's operators begin at ``operators``.
        operators: node position -> indices of those of its steps in which an operator runs.
        result_pieces: node position -> pieces of the gradients of its results, which its backward pass reads.
    """

    def __init__(self, waiting: Container[str] = ()) -> None:
        self.sizes: list[int] = []
        self.is_parameter_gradient: list[bool] = []
        self.steps: dict[int, list[Step]] = {}
        self.operators: dict[int, list[int]] = {}
        self.result_pieces: dict[int, list[int]] = {}
        self._waiting = waiting
        # Piece of each tensor's gradient, and how many tensors' gradients share a piece; tensors to whose gradient
        # autograd never adds in place.
        self._of: dict[Key, int] = {}
        self._users: dict[int, int] = {}
        self._not_addable: set[Key] = set()

    def start_from_loss(self, loss: Key) -> None:
        """Begin with the gradient of the loss, a scalar that counts as 0 bytes."""
        self._set_gradient(loss, self._new_piece(0, False))

    def run_backward_of(self, name: str, saved: SavedByOperator, forms: Mapping[Key, TensorForm]) -> None:
        """Run one operator's backward pass: consume its outputs' gradients, produce those of its inputs."""
        given = {j: self._of[key] for j, key in enumerate(saved.output_keys) if key in self._of}
        fixed = {j for j, key in enumerate(saved.output_keys) if key in self._not_addable}
        if not given:
            return
        steps = self.steps.setdefault(saved.at, [])
        self.operators.setdefault(saved.at, []).append(len(steps))
        call: Step = list(given.values())
        steps.append(call)
        self.result_pieces.setdefault(saved.at, []).extend(given.values())
        for key in saved.output_keys:
            self._drop_gradient(key)
        waits = name in self._waiting
        if waits:
            for piece in given.values():
                self._users[piece] += 1
        ends = list[int]()  # gradients of parameters
        for key, origin in zip(saved.input_keys, saved.trial.gradient_origins, strict=False):
            if origin is None or (waits and forms[key].is_parameter):
                continue
            # The operator passes an output's gradient on (a view, an addition), or allocates one.
            if origin.output in given:
                found = given[origin.output]
            else:
                size = origin.new_bytes if origin.output is None else forms[key].bytes
                found = self._new_piece(size, forms[key].is_parameter)
            call.append(found)
            total = self._accumulate(key, found, forms[key], origin.is_addable and origin.output not in fixed, steps)
            if forms[key].is_parameter:
                ends.append(total)
        # All that an operator has made is alive until the sums are made.
        steps[-1] += ends

    def _accumulate(self, key: Key, found: int, form: TensorForm, is_addable: bool, steps: list[Step]) -> int:
        """Accumulate a tensor's gradient, in a step of its own if that takes memory; return the piece of the sum."""
        before = self._of.get(key)
        if before is None:
            self._set_gradient(key, found, is_addable)
            return found
        if self._users[before] == 1 and key not in self._not_addable:
            return before
        self._drop_gradient(key)
        total = self._new_piece(form.bytes, form.is_parameter)
        self._set_gradient(key, total)
        steps.append([before, found, total])
        return total

    def _new_piece(self, size: int, ends: bool) -> int:
        self.sizes.append(size)
        self.is_parameter_gradient.append(ends)
        return len(self.sizes) - 1

    def _set_gradient(self, key: Key, gradient: int, is_addable: bool = True) -> None:
        self._of[key] = gradient
        if not is_addable:
            self._not_addable.add(key)
        self._users[gradient] = self._users.get(gradient, 0) + 1

    def _drop_gradient(self, key: Key) -> None:
        self._not_addable.discard(key)
        gradient = self._of.pop(key, None)
        if gradient is not None:
            self._users[gradient] -= 1
