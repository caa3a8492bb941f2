"""Which samples of a batch each microbatch and each replica gets, and batches of which a worker holds only its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polylane.graph.batch import bounds, flatten, sample_count, take


@dataclass(frozen=True)
class Share:
    """One replica's samples of one microbatch, as positions in the whole batch.

    ``weight`` is 0 for a replica that got none: it computes on the microbatch's first sample and counts for nothing.
    """

    microbatch: int
    start: int
    stop: int
    weight: int

    @property
    def samples(self) -> int:
        """How many samples are computed on."""
        return self.stop - self.start


def shares(batch: int, microbatches: int, replicas: int, replica: int) -> tuple[Share, ...]:
    """What ``replica`` computes of a batch: one share for each microbatch that has samples at all."""
    result = []
    for microbatch, (begin, end) in enumerate(bounds(batch, microbatches)):
        if begin == end:
            continue
        start, stop = (begin + b for b in bounds(end - begin, replicas)[replica])
        empty = start == stop
        result.append(Share(microbatch, begin if empty else start, begin + 1 if empty else stop, int(not empty)))
    return tuple(result)


class Batch:
    """A batch of which this worker may hold only the samples that it computes on."""

    def __init__(self, samples: int, leaves: Sequence[Any], offsets: dict[int, int] | None = None) -> None:
        """
        Args:
            samples: in the whole batch.
            leaves: flat leaves; of the whole batch, or of this worker's samples in the order of its shares.
            offsets: where in ``leaves`` each microbatch's share begins; None when they hold the whole batch.
        """
        self.samples = samples
        self.leaves = leaves
        self._offsets = offsets

    @classmethod
    def whole(cls, batch: Any) -> Batch:
        """A batch that is here entirely, the same on every worker."""
        leaves, _ = flatten(batch)
        return cls(sample_count(leaves), leaves)

    def of(self, share: Share) -> list[Any]:
        """The leaves of one share."""
        start = share.start if self._offsets is None else self._offsets[share.microbatch]
        return take(self.leaves, start, start + share.samples)

    def __len__(self) -> int:
        return self.samples


def offsets(own: Sequence[Share]) -> dict[int, int]:
    """Where each share begins when a worker's shares lie one behind the other."""
    result, at = {}, 0
    for share in own:
        result[share.microbatch] = at
        at += share.samples
    return result
