"""Estimates of schedules in closed form: seconds of a step, and live microbatches, by which a search rates them.

1F1B's is that of Huang et al., GPipe, 2019, section 2.3, for unequal stages, with the messages that a forward of the
steady state waits for. The others' follow from their bubbles for equal stages (docs/explanation), where what one stage
adds to the bubble is what it takes itself; a microbatch's way there and back, over the microbatches that are live,
bounds the period from below.

In all functions ``m`` is the number of microbatches of a step, and ``k`` that of the workers of the pipeline. Arrays
have one element for each worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy is imported by those who have arrays: the command line reads the names of schedules alone
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on every worker of a pipeline, all its stages together.

    Attributes:
        forward, backward: seconds of a pass, by worker.
        weight: of ``backward``, seconds of the half that makes gradients of weights.
        halving: seconds by which both halves of a backward pass take longer than the whole, by worker.
        hops: seconds of all messages of a microbatch, there and back, where every worker has one stage.
        overhead: seconds of the host for every pass of a stage, in both passes once; each further pass adds it.
    """

    forward: Array
    backward: Array
    weight: Array
    halving: Array | float = 0.0
    hops: float = 0.0
    overhead: float = 0.0

    @property
    def hop(self) -> float:
        """Seconds of a value from one worker to the next, and of its gradient back."""
        return self.hops / (len(self.forward) - 1) if len(self.forward) > 1 else 0.0

    @property
    def passes(self) -> Array:
        """Seconds of both passes, by worker."""
        return self.forward + self.backward

    @property
    def slowest(self) -> float:
        """Seconds of both passes on the worker that takes longest."""
        return float(self.passes.max())

    @property
    def total(self) -> float:
        """Seconds of both passes on all workers."""
        return float(self.passes.sum())

    @property
    def awaited(self) -> float:
        """Seconds of the passes that other stages wait for: forward, and the half that makes input gradients."""
        return float((self.forward + self.backward - self.weight).sum())

    def in_halves(self) -> StageSeconds:
        """Return the seconds where backward passes are in two halves."""
        longer = self.halving
        return replace(self, backward=self.backward + longer, weight=self.weight + longer, halving=0 * longer)

    def without_slowest(self) -> tuple[Array, Array, Array]:
        """Return seconds of forward, input and weight halves of all workers but the one that takes longest."""
        faster = [worker for worker in range(len(self.forward)) if worker != int(self.passes.argmax())]
        return self.forward[faster], (self.backward - self.weight)[faster], self.weight[faster]

    def shortest(self, m: int, chunks: int) -> float:
        """Return the seconds in which the last microbatch goes there and back behind all others."""
        slowest_awaited = float((self.forward + self.backward - self.weight).max())
        return self.awaited + self.hops + (m - 1) * slowest_awaited + float(self.weight.min()) / chunks


# ---- seconds of a step: (seconds of one microbatch, chunks of a worker, microbatches of a step) -> seconds -----------


def naive_seconds(times: StageSeconds, chunks: int, m: int) -> float:
    return m * (times.total + times.hops)


def one_f_one_b_seconds(times: StageSeconds, chunks: int, m: int) -> float:
    return times.total + times.hops + (m - 1) * (times.slowest + times.hop)


def all_forward_seconds(times: StageSeconds, chunks: int, m: int) -> float:
    return times.total + times.hops + (m - 1) * float(times.forward.max() + times.backward.max())


def asynchronous_seconds(times: StageSeconds, chunks: int, m: int) -> float:
    return m * max(times.slowest, (times.total + times.hops) / len(times.forward))


def interleaved_seconds(times: StageSeconds, chunks: int, m: int) -> float:
    k = len(times.forward)
    # Each pass of a chunk has a launch of its own. One more message leads from the last worker to the first.
    busy = times.slowest + 2 * (chunks - 1) * times.overhead
    round_trip = times.total + chunks * times.hops * k / max(1, k - 1)
    period = max(busy, round_trip / (k + (k - 1) / chunks))
    hidden = times.total - times.slowest
    fill = hidden / chunks if m >= k else hidden + (m - 1) * times.slowest * (1 / chunks - 1)
    return max(round_trip, m * period + fill + times.hops)


def zero_bubble_h1_seconds(times: StageSeconds, chunks: int, m: int) -> float:
    times = times.in_halves()
    f, i, w = times.without_slowest()
    period = max(times.slowest + times.overhead, (times.awaited + times.hops) / len(times.forward))
    bubble = float((i + (f - w).clip(0)).sum())
    return max(times.shortest(m, chunks), m * period + bubble + times.hops)


def zero_bubble_h2_seconds(times: StageSeconds, chunks: int, m: int) -> float:
    """A worker may begin the next step while others are at this one: what counts is how long it takes itself."""
    times = times.in_halves()
    f, i, w = times.without_slowest()
    # The first worker waits for its first gradient.
    first_input = float(times.backward[0] - times.weight[0])
    waiting = times.awaited - first_input + times.hops - m * float(times.forward[0])
    period = max(times.slowest + times.overhead, (times.awaited + times.hops) / (2 * len(times.forward) - 1))
    bubble = float((i - f).clip(0).clip(f + i - 2 * w).sum())
    return m * period + max(0.0, waiting, bubble)


def zero_bubble_v_seconds(times: StageSeconds, chunks: int, m: int) -> float:
    """As for ZB-H2, a worker may begin the next step while others are at this one."""
    times = times.in_halves()
    f, i, w = times.without_slowest()
    # The first worker waits for its last chunk.
    waiting = float(times.forward.sum()) + times.hops - (m + 1) / 2 * float(times.forward[0])
    period = max(times.slowest + 4 * times.overhead, (times.awaited + 2 * times.hops) / len(times.forward))
    bubble = float((f + i - 2 * w).clip(0).sum()) / 2
    return max(times.shortest(m, chunks) + times.hops, m * period + max(0.0, waiting, bubble))


# ---- live microbatches: (index of every worker, workers, chunks) -> the most that each holds of any number ----------


def live_one(index: Array, workers: int, chunks: int) -> Any:
    return 1


def live_all(index: Array, workers: int, chunks: int) -> Any:
    return math.inf


def live_ahead(index: Array, workers: int, chunks: int) -> Any:
    return workers - index


def live_workers(index: Array, workers: int, chunks: int) -> Any:
    return workers


def live_twice(index: Array, workers: int, chunks: int) -> Any:
    return 2 * workers - 1


def live_interleaved(index: Array, workers: int, chunks: int) -> Any:
    return (2 * (workers - 1 - index) + (chunks - 1) * workers + 1) / chunks
