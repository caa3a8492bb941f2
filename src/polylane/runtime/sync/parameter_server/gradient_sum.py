"""Gradient aggregation on a parameter server: sums in the order of ranks, in whatever order gradients arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from polylane.runtime.parameters.shards import ShardSpec


class GradientSum:
    """Sum of several workers' gradients, in the order of their ranks: the same bits in every run.

        arrives     rank 2    rank 0    rank 1
        added                 0         1, 2

    Args:
        ranks: shards that each contributing worker holds, by its rank.

    Attributes:
        gradients: the partial sums so far, in full shapes, by canonical name.
    """

    def __init__(self, ranks: Mapping[int, ShardSpec]) -> None:
        self._shard_specs = dict(sorted(ranks.items()))
        self._waiting: dict[int, Mapping[str, Tensor]] = {}
        self._next = iter(self._shard_specs)
        self._expected: int | None = next(self._next, None)
        self.gradients: dict[str, Tensor] = {}
        self._with_gradient: set[str] = set()

    def add_part(self, rank: int, parts: Mapping[str, Tensor], had: Iterable[str]) -> bool:
        """Add one worker's gradients; return whether those of all workers have arrived.

        Args:
            rank: rank of the worker that sent them.
            parts: gradients, or shards of them, by name; kept, and overwritten by partial sums.
            had: names of parameters that have a gradient; the others are zeros.
        """
        self._waiting[rank] = parts
        self._with_gradient.update(had)
        while self._expected is not None and self._expected in self._waiting:
            self._add_to_sum(self._waiting.pop(self._expected), self._shard_specs[self._expected])
            self._expected = next(self._next, None)
        return self._expected is None

    def _add_to_sum(self, parts: Mapping[str, Tensor], pieces: ShardSpec) -> None:
        for name, part in parts.items():
            # Shards are padded with zeros to full shapes: the sum over a replica's workers joins them.
            whole = pieces.pad_to_full(name, part) if pieces.is_sharded(name) else part
            self.gradients[name] = self.gradients[name].add_(whole) if name in self.gradients else whole

    def take_sums(self) -> dict[str, Tensor]:
        """Return the sums of the parameters for which any worker had a gradient, by name."""
        return {name: gradient for name, gradient in self.gradients.items() if name in self._with_gradient}
