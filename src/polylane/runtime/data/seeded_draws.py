"""Random numbers that a dataset draws (augmentation): decided by seed, epoch and sample, not by who loads what when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from polylane.graph.python_state.random_generators import (
    States,
    generator_states,
    restore_generators,
    seed_generators,
    states_equal,
)


class SeededDataset(Dataset[Any]):
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
        before = generator_states()
        try:
            if not self._draws:
                samples = self._load_samples(indices)
                if states_equal(before, generator_states()):
                    return samples
                self._draws = True
            return [self._load_seeded(index) for index in indices]
        finally:
            if self._draws:
                restore_generators(before)

    def _load_samples(self, indices: Sequence[int]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(list(indices)))
        return [self._dataset[index] for index in indices]

    def _load_seeded(self, index: int) -> Any:
        seed_generators(*self._key, index)
        return self._load_samples([index])[0]


def seeded_states(*key: int) -> States:
    """The states in which generators are that were seeded with ``key``."""
    before = generator_states()
    seed_generators(*key)
    try:
        return generator_states()
    finally:
        restore_generators(before)


class SeededStream:
    """Generators of an iterable dataset's own, that go on where they stopped and leave everybody else's alone."""

    def __init__(self, *key: int) -> None:
        self._states = seeded_states(*key)

    def __enter__(self) -> None:
        self._before = generator_states()
        restore_generators(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = generator_states()
        restore_generators(self._before)
