"""Flow: in which memory the gradients of a backward pass lie, as autograd hands them on and adds them up."""

from __future__ import annotations

from collections.abc import Mapping

from polylane.graph.keeping import Key, Saved
from polylane.graph.trial import Form


class Flow:
    """A backward pass, node by node from the last.

    Attributes:
        sizes: bytes of every piece of memory that gradients lie in.
        ends: whether it is a parameter's gradient, which goes nowhere from here.
        touched: the pieces that every node of the graph touches, by its position.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ends: list[bool] = []  # whether it is a parameter's
        self.touched: dict[int, list[int]] = {}
        self._of: dict[Key, int] = {}
        self._users: dict[int, int] = {}

    def start(self, loss: Key) -> None:
        """The gradient of the loss."""
        self._set(loss, self._new(0, False))

    def step(self, saved: Saved, forms: Mapping[Key, Form]) -> None:
        """The backward pass of one operator."""
        given = {j: self._of[key] for j, key in enumerate(saved.gives) if key in self._of}
        if not given:
            return
        touched = self.touched.setdefault(saved.at, [])
        touched += given.values()
        for key in saved.gives:
            self._drop(key)
        for key, spec in zip(saved.reads, saved.gradients, strict=False):
            if spec is None:
                continue
            kind, number = spec
            if kind == "output" and number in given:
                found = given[number]
            else:
                found = self._new(forms[key].bytes if kind == "output" else number, forms[key].leaf)
            touched += [found, *self._add(key, found, forms[key])]

    def _add(self, key: Key, found: int, form: Form) -> list[int]:
        """A gradient on top of what has come from later readers: in place, where nobody else holds that memory."""
        before = self._of.get(key)
        if before is None:
            self._set(key, found)
            return []
        if self._users[before] == 1:
            return [before]
        self._drop(key)
        total = self._new(form.bytes, form.leaf)
        self._set(key, total)
        return [before, total]

    def _new(self, size: int, ends: bool) -> int:
        self.sizes.append(size)
        self.ends.append(ends)
        return len(self.sizes) - 1

    def _set(self, key: Key, gradient: int) -> None:
        self._of[key] = gradient
        self._users[gradient] = self._users.get(gradient, 0) + 1

    def _drop(self, key: Key) -> None:
        gradient = self._of.pop(key, None)
        if gradient is not None:
            self._users[gradient] -= 1
