"""Gradient flow: the pieces of memory in which a backward pass holds gradients, and the nodes that touch each."""

from __future__ import annotations

from collections.abc import Mapping

from polylane.cost.memory.operator_trial import TensorForm
from polylane.cost.memory.saved_tensors import Key, SavedByOperator


class GradientFlow:
    """Pieces of memory of a backward pass's gradients, as autograd passes and accumulates them, node by node.

    Attributes:
        sizes: bytes of every piece of memory that holds gradients.
        is_parameter_gradient: whether the piece is a parameter's gradient, which no node reads.
        touched_pieces: node position -> pieces that its backward pass reads or writes.
        result_pieces: node position -> pieces of the gradients of its results, which its backward pass reads.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.is_parameter_gradient: list[bool] = []
        self.touched_pieces: dict[int, list[int]] = {}
        self.result_pieces: dict[int, list[int]] = {}
        # Piece of each tensor's gradient, and how many tensors' gradients share a piece.
        self._of: dict[Key, int] = {}
        self._users: dict[int, int] = {}

    def start_from_loss(self, loss: Key) -> None:
        """Begin with the gradient of the loss, a scalar that counts as 0 bytes."""
        self._set_gradient(loss, self._new_piece(0, False))

    def run_backward_of(self, saved: SavedByOperator, forms: Mapping[Key, TensorForm]) -> None:
        """Run one operator's backward pass: consume its outputs' gradients, produce those of its inputs."""
        given = {j: self._of[key] for j, key in enumerate(saved.output_keys) if key in self._of}
        if not given:
            return
        touched = self.touched_pieces.setdefault(saved.at, [])
        touched += given.values()
        self.result_pieces.setdefault(saved.at, []).extend(given.values())
        for key in saved.output_keys:
            self._drop_gradient(key)
        for key, spec in zip(saved.input_keys, saved.trial.gradient_origins, strict=False):
            if spec is None:
                continue
            # "output": the operator passes an output's gradient on (a view, an addition); "new": it
            # allocates one.
            kind, number = spec
            if kind == "output" and number in given:
                found = given[number]
            else:
                found = self._new_piece(forms[key].bytes if kind == "output" else number, forms[key].is_parameter)
            touched += [found, *self._accumulate(key, found, forms[key])]

    def _accumulate(self, key: Key, found: int, form: TensorForm) -> list[int]:
        """Accumulate a gradient, in place unless its memory is shared; return the pieces that this touches."""
        before = self._of.get(key)
        if before is None:
            self._set_gradient(key, found)
            return []
        if self._users[before] == 1:
            return [before]
        # The piece also holds another tensor's gradient (one that was passed on): the sum goes to new memory.
        self._drop_gradient(key)
        total = self._new_piece(form.bytes, form.is_parameter)
        self._set_gradient(key, total)
        return [before, total]

    def _new_piece(self, size: int, ends: bool) -> int:
        self.sizes.append(size)
        self.is_parameter_gradient.append(ends)
        return len(self.sizes) - 1

    def _set_gradient(self, key: Key, gradient: int) -> None:
        self._of[key] = gradient
        self._users[gradient] = self._users.get(gradient, 0) + 1

    def _drop_gradient(self, key: Key) -> None:
        gradient = self._of.pop(key, None)
        if gradient is not None:
            self._users[gradient] -= 1
