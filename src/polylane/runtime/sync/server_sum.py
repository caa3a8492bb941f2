"""Gradient aggregation on a parameter server: sums in the order of the ranks, whichever gradients come first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from polylane.runtime.pieces import Pieces


class Arriving:
    """The sum of what several workers give, added up in the order of their ranks, whichever comes first.

    Args:
        ranks: of the workers, and which parts they hold.
    """

    def __init__(self, ranks: Mapping[int, Pieces]) -> None:
        self._pieces = dict(sorted(ranks.items()))
        self._waiting: dict[int, Mapping[str, Tensor]] = {}
        self._next = iter(self._pieces)
        self._expected: int | None = next(self._next, None)
        self.gradients: dict[str, Tensor] = {}
        self._had: set[str] = set()

    def add(self, rank: int, parts: Mapping[str, Tensor], had: Iterable[str]) -> bool:
        """One worker's part has come. Whether all have.

        Args:
            rank: of the worker that sent it.
            parts: of gradients; kept, and added to.
            had: those of them that are gradients at all: another one is zeros, for there was none.
        """
        self._waiting[rank] = parts
        self._had.update(had)
        while self._expected is not None and self._expected in self._waiting:
            self._fold(self._waiting.pop(self._expected), self._pieces[self._expected])
            self._expected = next(self._next, None)
        return self._expected is None

    def _fold(self, parts: Mapping[str, Tensor], pieces: Pieces) -> None:
        for name, part in parts.items():
            whole = pieces.placed("parameter", name, part) if pieces.is_cut("parameter", name) else part
            self.gradients[name] = self.gradients[name].add_(whole) if name in self.gradients else whole

    def taken(self) -> dict[str, Tensor]:
        """The sums, of the parameters of which any worker had a gradient."""
        return {name: gradient for name, gradient in self.gradients.items() if name in self._had}
