"""Flow: in which memory the gradients of a backward pass lie, as autograd hands them on and adds them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polylane.graph.saved import Key, Saved
from polylane.graph.trial import Form


class Flow:
    """A backward pass, node by node from the last.

    Attributes:
        sizes: bytes of every piece of memory that gradients lie in.
        ends: whether it is a parameter's gradient, which goes nowhere from here.
        touched: the pieces that every node touches.
    """

    def __init__(self) -> None:
        self.sizes: list[float] = []
        self.ends: list[bool] = []  # whether it is a parameter's
        self.touched: dict[int, list[int]] = {}
        self._of: dict[Key, int] = {}
        self._users: dict[int, int] = {}

    def start(self, key: Key, places: Mapping[Key, Key]) -> None:
        """The gradient of the loss."""
        if key in places:
            self._set(key, self._new(0.0, False))

    def step(self, node: int, saved: Saved, shares: Sequence[float], forms: Mapping[Key, Form]) -> None:
        """The backward pass of one node; ``shares``: the part of every tensor that it reads that a rank has."""
        given = {j: self._of[key] for j, key in enumerate(saved.gives) if key in self._of}
        if not given:
            return
        self.touched[node] = list(given.values())
        for key in saved.gives:
            self._drop(key)
        for key, spec, share in zip(saved.reads, saved.gradients, shares, strict=False):
            if spec is None:
                continue
            kind, number = spec
            if kind == "output" and number in given:
                found = given[number]
            else:
                size = forms[key].bytes if kind == "output" else number
                found = self._new(size, forms[key].leaf, share)
            self._add(node, key, found, forms[key], share)

    def _add(self, node: int, key: Key, found: int, form: Form, share: float) -> None:
        """A gradient on top of what has come from later readers: in place, where nobody else holds that memory."""
        self.touched[node].append(found)
        before = self._of.get(key)
        if before is None:
            self._set(key, found)
            return
        self.touched[node].append(before)
        if self._users[before] > 1:
            self._drop(key)
            total = self._new(form.bytes, form.leaf, share)
            self.touched[node].append(total)
            self._set(key, total)

    def _new(self, size: float, ends: bool, share: float = 1.0) -> int:
        self.sizes.append(size * share)
        self.ends.append(ends)
        return len(self.sizes) - 1

    def _set(self, key: Key, gradient: int) -> None:
        self._of[key] = gradient
        self._users[gradient] = self._users.get(gradient, 0) + 1

    def _drop(self, key: Key) -> None:
        gradient = self._of.pop(key, None)
        if gradient is not None:
            self._users[gradient] -= 1
