"""Open sizes: the sizes of a batch, other than its number of samples, that one captured graph leaves open.

A graph that was captured with a text's length open holds for other lengths too, as far as export's guards say. All that
is decided ahead (placements, proofs, prices) looks at it at its *nominal* sizes, those of the batch that it was
captured from: ``meta["val"]`` of a node has these as numbers, and only the number of samples as a symbol.
``meta["open"]`` has both as symbols, where a value depends on an open size. A step passes its batch's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# A size as a function of the number of samples and of the open sizes, in the order of their symbols.
SizeFunction = Callable[..., Any]

# Export reasons about open sizes as if they were at least two, and records no guard for that.
FEWEST = 2

# Numbers of samples at which a guard on open sizes is tried: it must not depend on how a batch is divided.
SAMPLES_TRIED = (1, 2, 3, 4, 5, 7, 8, 16, 31, 64)


@dataclass(frozen=True)
class OpenSizes:
    """The open sizes of a graph, and for which values of them it holds.

    Attributes:
        places: for each open size, the leaf of the batch that has it, and the leaf's dimension.
        nominal: the sizes of the batch from which the graph was captured.
        shapes: for each leaf, the size of each of its dimensions; None for dimension 0 of a leaf that is divided with
            the samples. Empty for a leaf that is no tensor.
        guards: conditions under which the captured code is what the user's code does; all that export assumed.
    """

    places: tuple[tuple[int, int], ...]
    nominal: tuple[int, ...]
    shapes: tuple[tuple[SizeFunction | None, ...], ...]
    guards: tuple[SizeFunction, ...]

    def find(self, leaves: Sequence[Any]) -> tuple[int, ...] | None:
        """Return the open sizes of a batch; None if the graph does not hold for it.

        Args:
            leaves: flat leaves of a batch that is nested as the example was, with tensors of the same dtypes.
        """
        sizes = tuple(leaves[leaf].shape[dim] for leaf, dim in self.places)
        return sizes if self._fit(leaves, sizes) and self.admit(sizes) else None

    def admit(self, sizes: Sequence[int]) -> bool:
        """Return whether all that export assumed is true of these sizes, however many samples there are."""
        if min(sizes) < FEWEST:
            return False
        try:
            return all(guard(samples, *sizes) for guard in self.guards for samples in SAMPLES_TRIED)
        except Exception:  # a condition that cannot be computed at these sizes (a division by zero, say)
            return False

    def _fit(self, leaves: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Return whether all other sizes of a batch are those that the code was captured for, or follow from these."""
        for leaf, shape in zip(leaves, self.shapes, strict=True):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.dim() != len(shape):
                return False
            if any(size is not None and size(1, *sizes) != n for size, n in zip(shape, leaf.shape, strict=True)):
                return False
        return True
