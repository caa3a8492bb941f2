"""Choice of a batch: throughput of every batch and plan times its statistical efficiency at a run's noise scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polylane.efficiency.batch_rules import adascale_gain, learning_goodput, statistical_efficiency
from polylane.efficiency.noise_window import NoiseScale

# Fewest steps of an epoch with a batch that is chosen: with fewer a batch is most of the data, whose noise scale says
# little of other data, and an epoch is hardly a training.
FEWEST_EPOCH_STEPS = 4


@dataclass(frozen=True)
class BatchOption:
    """A batch that a training could take, with a plan for it.

    Attributes:
        batch: number of samples of a step.
        samples_per_second: throughput, predicted or measured.
        plan: the plan, in one line.
        workers: number of devices that it takes.
        price: of these devices, per hour; 0 where the cluster has none.
    """

    batch: int
    samples_per_second: float
    plan: str = ""
    workers: int = 1
    price: float = 0.0


@dataclass(frozen=True)
class RatedBatch:
    """A batch with what it brings at a noise scale; low and high are its values at the ends of the scale's interval.

    Attributes:
        option: the batch and its plan.
        efficiency: progress of a sample, relative to one of the base batch.
        efficiency_low, efficiency_high: the least and the most that it may be.
        gain: progress of a step, relative to one with the base batch.
        goodput: samples of the base batch that a second is worth.
        price_of_progress: of as much progress as 1,000 steps with the base batch make; 0 without prices.
    """

    option: BatchOption
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    gain: float
    goodput: float
    price_of_progress: float


def rate_batches(options: Iterable[BatchOption], noise: NoiseScale, base: int) -> list[RatedBatch]:
    """Return batches with what they bring, the one with the most learning goodput first.

    Args:
        options: batches and plans with their throughput.
        noise: the run's noise scale; it has one.
        base: number of samples of the run's steps, in which progress is counted.
    """
    assert noise.scale is not None and noise.low is not None and noise.high is not None
    rated = []
    for option in options:
        ends = [statistical_efficiency(scale, option.batch, base) for scale in (noise.low, noise.high)]
        goodput = learning_goodput(option.samples_per_second, noise.scale, option.batch, base)
        rated.append(
            RatedBatch(
                option,
                statistical_efficiency(noise.scale, option.batch, base),
                min(ends),
                max(ends),
                adascale_gain(noise.scale, option.batch, base),
                goodput,
                option.price / 3600 / goodput * base * 1000 if goodput else 0.0,
            )
        )
    return sorted(rated, key=lambda row: -row.goodput)


def choose_batch(options: Sequence[BatchOption], scale: float, base: int) -> BatchOption:
    """Return the option with the most learning goodput at a noise scale.

    Args:
        options: batches and plans with their throughput; at least one.
        scale: noise scale, in samples.
        base: number of samples of the run's steps.
    """
    return max(options, key=lambda option: learning_goodput(option.samples_per_second, scale, option.batch, base))


def list_batches(base: int, largest: int, smallest: int = 1) -> list[int]:
    """Return the batches that are worth comparing: the base batch times powers of two, from a quarter to 32 times it.

    Args:
        base: number of samples of the run's steps.
        largest: most samples that a batch may have.
        smallest: fewest samples that a batch may have.
    """
    batches = {base, *(base // 2**i for i in (1, 2)), *(base * 2**i for i in range(1, 6))}
    return sorted(batch for batch in batches if smallest <= batch <= largest)
