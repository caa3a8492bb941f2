"""Gradient flow: the pieces of memory in which a backward pass holds gradients, and the steps that touch each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from polylane.cost.memory.operator_trial import TensorForm
from polylane.cost.memory.saved_tensors import Key, SavedByOperator


@dataclass
class Step:
    """A moment of a backward pass: an operator runs, or two gradients are added up.

    Attributes:
        pieces: pieces of memory of gradients that it touches.
        runs: whether an operator runs.
        added_to: piece to which a gradient is added in place; None where nothing is.
    """

    pieces: list[int] = field(default_factory=list)
    runs: bool = False
    added_to: int | None = None


class GradientFlow:
    """Pieces of memory of a backward pass's gradients, as autograd passes and accumulates them, node by node.

    An operator's backward pass reads the gradients of its outputs and makes those of its inputs. When it is over and
    what it read is free, autograd adds these to what other readers of the inputs have sent. It adds in place to the
    gradient that came first (``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp) if nobody else uses
    its memory, and if it fills that memory and is no view; else the sum takes new memory.

    Args:
        later: by name of an operator the inputs whose gradients are computed at a later time, for which the gradients
            of its results are kept: nothing is added to these in place.

    Attributes:
        sizes: bytes of every piece of memory that holds gradients.
        is_parameter_gradient: whether the piece is a parameter's gradient, which no node reads.
        steps: node position -> the steps of its operators, in their order, each operator's sums after it.
        result_pieces: node position -> pieces of the gradients of its results, which its backward pass reads.
    """

    def __init__(self, later: Mapping[str, Collection[Key]] | None = None) -> None:
        self.sizes: list[int] = []
        self.is_parameter_gradient: list[bool] = []
        self.steps: dict[int, list[Step]] = {}
        self.result_pieces: dict[int, list[int]] = {}
        self._later = later or {}
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
        output_pieces = {j: self._of[key] for j, key in enumerate(saved.output_keys) if key in self._of}
        fixed = {j for j, key in enumerate(saved.output_keys) if key in self._not_addable}
        if not output_pieces:
            return
        steps, call = self.steps.setdefault(saved.at, []), Step(list(output_pieces.values()), runs=True)
        steps.append(call)
        self.result_pieces.setdefault(saved.at, []).extend(output_pieces.values())
        for key in saved.output_keys:
            self._drop_gradient(key)
        later = self._later.get(name, ())
        if later:
            for piece in output_pieces.values():
                self._users[piece] += 1
        finished = list[int]()  # gradients of parameters
        for key, origin in zip(saved.input_keys, saved.trial.gradient_origins, strict=False):
            if origin is None or key in later:
                continue
            # The operator passes an output's gradient on (a view, an addition), or allocates one.
            if origin.output in output_pieces:
                gradient = output_pieces[origin.output]
            else:
                size = origin.new_bytes if origin.output is None else forms[key].bytes
                gradient = self._new_piece(size, forms[key].is_parameter)
            call.pieces.append(gradient)
            total = self._accumulate(key, gradient, forms[key], origin.is_addable and origin.output not in fixed, steps)
            if forms[key].is_parameter:
                finished.append(total)
        # All that an operator has made is alive until its sums are made.
        steps[-1].pieces += finished

    def _accumulate(self, key: Key, piece: int, form: TensorForm, is_addable: bool, steps: list[Step]) -> int:
        """Accumulate a tensor's gradient, in a step of its own if it is not the first; return the piece of the sum."""
        old_piece = self._of.get(key)
        if old_piece is None:
            self._set_gradient(key, piece, is_addable)
            return piece
        if self._users[old_piece] == 1 and key not in self._not_addable:
            steps.append(Step([old_piece, piece], added_to=old_piece))
            return old_piece
        self._drop_gradient(key)
        total = self._new_piece(form.bytes, form.is_parameter)
        self._set_gradient(key, total)
        steps.append(Step([old_piece, piece, total]))
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
