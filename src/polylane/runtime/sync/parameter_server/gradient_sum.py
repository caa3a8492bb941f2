"""Gradient aggregation on a parameter server: sums in the order of the ranks, whichever gradients come first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from polylane.runtime.parameters.shards import ShardSpec


class GradientSum:
    """The sum of what several workers give, added up in the order of their ranks, whichever comes first.

    Args:
        ranks: of the workers, and which parts they hold.
    """

    def __init__(self, ranks: Mapping[int, ShardSpec]) -> None:
        self._shard_specs = dict(sorted(ranks.items()))
        self._waiting: dict[int, Mapping[str, Tensor]] = {}
        self._next = iter(self._shard_specs)
        self._expected: int | None = next(self._next, None)
        self.gradients: dict[str, Tensor] = {}
        self._with_gradient: set[str] = set()

    def add_part(self, rank: int, parts: Mapping[str, Tensor], had: Iterable[str]) -> bool:
        """One worker's part has come. Whether all have.

        Args:
            rank: of the worker that sent it.
            parts: of gradients; kept, and added to.
            had: those of them that are gradients at all: another one is zeros, for there was none.
        """
        self._waiting[rank] = parts
        self._with_gradient.update(had)
        while self._expected is not None and self._expected in self._waiting:
            self._add_to_sum(self._waiting.pop(self._expected), self._shard_specs[self._expected])
            self._expected = next(self._next, None)
        return self._expected is None

    def _add_to_sum(self, parts: Mapping[str, Tensor], pieces: ShardSpec) -> None:
        for name, part in parts.items():
            whole = pieces.pad_to_full("parameter", name, part) if pieces.is_sharded("parameter", name) else part
            self.gradients[name] = self.gradients[name].add_(whole) if name in self.gradients else whole

    def take_sums(self) -> dict[str, Tensor]:
        """The sums, of the parameters of which any worker had a gradient."""
        return {name: gradient for name, gradient in self.gradients.items() if name in self._with_gradient}
