"""Noise reading: what a step's vector says of the gradients of its parts, summed over all workers.

The numbers are, for K parts in P pools: what the loss counts of each part, K; squared norms of the parts' gradients, K,
and of the pools', P; the same two preconditioned; number of workers, seconds of measuring, and seconds of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polylane.efficiency.noise_estimates import NoiseEstimate, combine_estimates, estimate_noise
from polylane.runtime.telemetry.part_layout import PartLayout

TAIL = 3  # numbers behind those of parts and pools


@dataclass(frozen=True)
class NoiseReading:
    """Squared norms of the gradients of one batch's parts, and of their sums.

    Attributes:
        layout: the parts of the batch.
        numbers: sums over all workers, in the order that the module gives.
        pool_samples: number of samples of each pool.
        averages_pools: whether gradients are means over the samples of their pool, and not of the whole batch.
        is_preconditioned: whether the optimizer divides gradients, so that there is a second estimate.
    """

    layout: PartLayout
    numbers: Sequence[float]
    pool_samples: Sequence[int]
    averages_pools: bool
    is_preconditioned: bool = False

    @staticmethod
    def size(layout: PartLayout) -> int:
        """Return how many numbers there are."""
        return 3 * layout.parts + 2 * layout.pools + TAIL

    @property
    def costs(self) -> tuple[float, float]:
        """Seconds of measuring and of a step, means over the workers; the seconds of a step are 0 before the second."""
        workers, cost, seconds = self.numbers[-TAIL:]
        return cost / workers, seconds / workers

    @property
    def parts(self) -> int:
        """Number of parts that have samples."""
        return sum(count > 0 for count in self.numbers[: self.layout.parts])

    def estimate(self, population: int | None = None, preconditioned: bool = False) -> NoiseEstimate | None:
        """Return the estimates of the batch; None where no pool has two parts, or a number is not known.

        Args:
            population: number of samples from which the batch is drawn without replacement; None: with replacement.
            preconditioned: of gradients as the optimizer divides them.
        """
        if preconditioned and not self.is_preconditioned:
            return None
        parts, pools = self.layout.parts, self.layout.pools
        counts, at = self.numbers[:parts], parts + (parts + pools) * preconditioned
        squares, totals = self.numbers[at : at + parts], self.numbers[at + parts : at + parts + pools]
        estimates, sizes, samples = list[NoiseEstimate](), list[int](), list[float]()
        for pool, pool_samples in enumerate(self.pool_samples):
            members = [part for part in range(parts) if counts[part] > 0 and self.layout.pool_of(part) == pool]
            if len(members) < 2:
                continue
            pool_count = sum(counts[part] for part in members)
            # Gradients were taken of totals over this number of samples; each part's mean is over what it counts.
            averaged = pool_samples if self.averages_pools else sum(self.pool_samples)
            part_squares = [squares[part] * (averaged / counts[part]) ** 2 for part in members]
            # A sample counts for as much as the mean one does; of a plain mean each counts 1.
            part_samples = [pool_samples * counts[part] / pool_count for part in members]
            total = totals[pool] * (averaged / pool_count) ** 2
            estimates.append(estimate_noise(part_squares, part_samples, total, population))
            sizes.append(len(members))
            samples.append(pool_samples)
        if not estimates:
            return None
        estimate = combine_estimates(estimates, sizes, samples)
        return estimate if math.isfinite(estimate.gradient) and math.isfinite(estimate.spread) else None
