"""Random numbers that a dataset draws (augmentation): decided by seed, epoch and sample, not by who loads what when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from polylane.graph.generators import States, restore, same, seed_all, states


class Keyed(Dataset[Any]):
    """A map-style dataset whose samples draw by a key of their own.

    Whether they draw at all is seen at the first batch that does: it is loaded once more, and from then on each sample
    is seeded. Those that never draw cost a look at the generators for each batch.
    """

    def __init__(self, dataset: Any, *key: int) -> None:
        self._dataset = dataset
        self._key = key
        self._draws = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples; the generators are left as they were."""
        before = states()
        try:
            if not self._draws:
                samples = self._load(indices)
                if same(before, states()):
                    return samples
                self._draws = True
            return [self._seeded(index) for index in indices]
        finally:
            if self._draws:
                restore(before)

    def _load(self, indices: Sequence[int]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(list(indices)))
        return [self._dataset[index] for index in indices]

    def _seeded(self, index: int) -> Any:
        seed_all(*self._key, index)
        return self._load([index])[0]


def seeded(*key: int) -> States:
    """The states in which generators are that were seeded with ``key``."""
    before = states()
    seed_all(*key)
    try:
        return states()
    finally:
        restore(before)


class Stream:
    """Generators of an iterable dataset's own, that go on where they stopped and leave everybody else's alone."""

    def __init__(self, *key: int) -> None:
        self._states = seeded(*key)

    def __enter__(self) -> None:
        self._before = states()
        restore(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = states()
        restore(self._before)
