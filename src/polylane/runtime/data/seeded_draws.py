"""Reproducible data augmentation: a dataset's random draws depend on seed, epoch and sample, not on the worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from polylane.graph.python_state.random_generators import (
    generator_states,
    restore_generators,
    seed_generators,
    states_equal,
)


class SeededDataset(Dataset[Any]):
    """A map-style dataset that seeds the random generators per sample.

    The first batch that draws random numbers is detected by the generators' states; it is loaded again, and from then
    on each sample is seeded. A dataset that never draws costs one comparison of the states for each batch.

    Args:
        dataset: the user's map-style dataset of samples.
        key: integers that seed each sample together with its index, such as (seed, epoch).
    """

    def __init__(self, dataset: Any, *key: int) -> None:
        self._dataset = dataset
        self._key = key
        self._draws = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples; the generators are left as they were."""
        states = generator_states()
        try:
            if not self._draws:
                # Unseeded and in one call, which may be batched: right as long as no generator moves.
                samples = self._load_samples(indices)
                if states_equal(states, generator_states()):
                    return samples
                self._draws = True
            return [self._load_seeded(index) for index in indices]
        finally:
            if self._draws:
                restore_generators(states)

    def _load_samples(self, indices: Sequence[int]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(list(indices)))
        return [self._dataset[index] for index in indices]

    def _load_seeded(self, index: int) -> Any:
        # The sample's index is part of the key: it draws the same numbers in any batch, worker or loading process.
        seed_generators(*self._key, index)
        return self._load_samples([index])[0]


class SeededStream:
    """Context manager that installs an iterable dataset's own random states, and saves them at its end.

    Entered once for each batch: the dataset's random sequence goes on where it stopped, and draws of the user's other
    code do not shift it.

    Args:
        key: integers that seed the stream, such as (seed, epoch).

    Attributes:
        states: the dataset's own states of the generators, while it does not run.
    """

    def __init__(self, *key: int) -> None:
        states = generator_states()
        seed_generators(*key)
        self.states = generator_states()
        restore_generators(states)

    def __enter__(self) -> None:
        self._before = generator_states()
        restore_generators(self.states)

    def __exit__(self, *_: object) -> None:
        self.states = generator_states()
        restore_generators(self._before)
