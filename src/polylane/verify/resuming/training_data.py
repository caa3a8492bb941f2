"""Training data of a proof: batches in float64, read as a training reads them, from the job's position on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import default_collate

from polylane.runtime.job import Job
from polylane.verify.verify import batch_in_float64


@dataclass(frozen=True)
class TrainingData:
    """The data that a training reads, epoch after epoch.

    Attributes:
        example: the first whole batch, for its form.
        dataset: map-style or iterable dataset, or a list of samples, of which nothing is read yet.
        batch_size: samples of a batch, over all workers.
        steps: number of batches that are trained on; the last one of an epoch may be shorter.
        reopen: makes the dataset anew for each later epoch, if it is an iterator, which ends with the first one.
        collate: makes a batch of samples; None: torch's own.
    """

    example: Any
    dataset: Any
    batch_size: int
    steps: int
    reopen: Callable[[], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None

    def first_steps(self, steps: int) -> TrainingData:
        """Return the same data for fewer steps."""
        return replace(self, steps=steps)

    def batches_of(self, job: Job) -> Iterator[Any]:
        """Yield the batches that a job has still to train on, from its position on: :meth:`.Job.batches`."""
        start, steps_left = job.position, self.steps - job.position.step
        # A short last batch that no step reaches must not be refused.
        ends_before = isinstance(self.dataset, Sized) and self.steps <= len(self.dataset) // self.batch_size
        for epoch in itertools.count(start.epoch):
            # An iterator ends with its first epoch; other datasets are read again.
            is_reopened = epoch > 0 and isinstance(self.dataset, Iterator) and self.reopen is not None
            dataset = self.reopen() if is_reopened and self.reopen is not None else self.dataset
            options: dict[str, Any] = {"drop_last": ends_before, "first_epoch": epoch, "start": start}
            batches = job.batches(dataset, self.batch_size, collate=self._collate_in_float64, **options)
            for batch in itertools.islice(batches, steps_left):
                steps_left -= 1
                yield batch
            if not steps_left:
                return

    def _collate_in_float64(self, samples: list[Any]) -> Any:
        return batch_in_float64((self.collate or default_collate)(samples))
