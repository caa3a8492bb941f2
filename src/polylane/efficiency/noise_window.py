"""Gradient noise scale with its interval: the ratio of two means over a sliding window of batches.

The noise scale is mean(S) / mean(𝒢²): averaged first, since the ratio of one batch's estimates has no mean (its
denominator may be near zero, or below). The interval is Fieller's (1954) for a ratio of correlated means, which stays
honest where the denominator is known badly; the variance of the means is inflated by the autocorrelation of the
estimates, since batches that follow each other see nearly the same weights.

Gradients of a training may shrink a hundredfold within a window, so that its first batches would decide alone. Each
batch is therefore divided by the level of S over the batches before it: a weight that does not know the batch itself
leaves its estimates unbiased, and the ratio as it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polylane.efficiency.noise_estimates import NoiseEstimate

# Batches that are averaged: enough for an interval of some percent, and few enough to follow a training, whose noise
# scale grows over thousands of steps.
WINDOW = 200
# With fewer, neither a variance nor an autocorrelation is known.
FEWEST = 8
COVERAGE = 0.95
# Share of the level of S that the batches before the last one keep: it follows over about ten batches.
LEVEL_MEMORY = 0.9


@dataclass(frozen=True)
class NoiseScale:
    """What the batches of a window say of the gradient noise scale.

    Attributes:
        gradient: mean estimate of the squared norm of the expected gradient, 𝒢²; NaN of no batches.
        spread: mean estimate of the trace of one sample's covariance, S; NaN of no batches.
        batches: number of batches that are averaged.
        effective: number of independent batches that would tell as much.
        scale: S / 𝒢², in samples; None: not enough data yet, 𝒢² is within two standard errors of 0.
        low, high: ends of its 95% interval; without a scale there is no high one, and a low one only if all that is
            known is that the scale is above it.
    """

    gradient: float
    spread: float
    batches: int
    effective: float
    scale: float | None = None
    low: float | None = None
    high: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as the plain object of a step's line in metrics.jsonl."""
        return {
            "g2": self.gradient,
            "s": self.spread,
            "scale": self.scale,
            "low": self.low,
            "high": self.high,
            "batches": self.batches,
            "effective": self.effective,
        }


class NoiseWindow:
    """The estimates of the last batches, as a sliding window.

    The first batch gives the level by which the next is divided, and is not averaged.

    Args:
        size: number of batches that it holds; an older one is dropped for each that comes.
    """

    def __init__(self, size: int = WINDOW) -> None:
        self._estimates = deque[NoiseEstimate](maxlen=size)
        self._level: float | None = None

    def add(self, estimate: NoiseEstimate) -> None:
        """Add the estimates of a batch; those that are not finite are left out, as its update often is."""
        if not (math.isfinite(estimate.gradient) and math.isfinite(estimate.spread)):
            return
        level = self._level
        if level:
            self._estimates.append(NoiseEstimate(estimate.gradient / level, estimate.spread / level))
        spread = abs(estimate.spread)
        self._level = LEVEL_MEMORY * level + (1 - LEVEL_MEMORY) * spread if level else spread

    def measure(self) -> NoiseScale:
        """Return what the batches of the window say, at the level of gradients behind the last of them."""
        scale, level = measure_noise_scale(self._estimates), self._level or 1.0
        return replace(scale, gradient=scale.gradient * level, spread=scale.spread * level)


@dataclass(frozen=True)
class NoiseScales:
    """The noise scales of a training: of gradients as they are, and as its optimizer divides them.

    Attributes:
        plain: of gradients as they are.
        adam: of gradients as Adam divides them; of no batches with other optimizers, and in the first steps.
    """

    plain: NoiseScale
    adam: NoiseScale

    @property
    def is_divided(self) -> bool:
        """Whether that of the divided gradients decides."""
        return bool(self.adam.batches)

    @property
    def deciding(self) -> NoiseScale:
        """The one by which a batch is chosen: of the gradients that the optimizer steps along."""
        return self.adam if self.is_divided else self.plain


class NoiseWindows:
    """The estimates of the last batches of a training, of both kinds of gradients."""

    def __init__(self) -> None:
        self._plain, self._adam = NoiseWindow(), NoiseWindow()

    def add(self, plain: NoiseEstimate, adam: NoiseEstimate | None) -> None:
        """Add the estimates of a batch.

        Args:
            plain: of gradients as they are.
            adam: of gradients as Adam divides them; None where that is not known.
        """
        self._plain.add(plain)
        if adam is not None:
            self._adam.add(adam)

    def measure(self) -> NoiseScales:
        """Return what the batches of both windows say."""
        return NoiseScales(self._plain.measure(), self._adam.measure())


def pick_deciding(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return which part of the object ``noise`` of a line of metrics.jsonl decides, as :class:`NoiseScales` does.

    Args:
        columns: those of gradients as they are, with those of divided ones under "adam".
    """
    adam = columns.get("adam")
    return adam if isinstance(adam, Mapping) and adam.get("batches") else columns


def measure_noise_scale(estimates: Iterable[NoiseEstimate]) -> NoiseScale:
    """Return the noise scale of some batches, in their order, with its 95% interval.

    Args:
        estimates: of each batch; the weights should not have changed much from the first to the last.
    """
    pairs = np.array([(estimate.spread, estimate.gradient) for estimate in estimates], dtype=np.float64).reshape(-1, 2)
    count = len(pairs)
    if count < FEWEST:
        spread, gradient = pairs.mean(axis=0) if count else (math.nan, math.nan)
        return NoiseScale(float(gradient), float(spread), count, float(count))
    spread, gradient = (float(mean) for mean in pairs.mean(axis=0))
    # What the ratio's error is made of, to first order: where it is correlated from batch to batch, so is the ratio's.
    ratio = spread / gradient if gradient else 0.0
    inflation = autocorrelation_time(pairs[:, 0] - ratio * pairs[:, 1])
    effective = count / inflation
    # Deviations from the batches' own mean lack the variance of that mean: divided by n - τ, and not by n - 1.
    covariance = np.cov(pairs, rowvar=False) * (count - 1) / (count - inflation) / effective
    low, high = fieller_interval((spread, gradient), covariance, _quantile(effective - 1))
    bounded = NoiseScale(
        gradient, max(spread, 0.0), count, effective, low=max(low, 0.0) if math.isfinite(low) else None
    )
    if gradient <= 2 * math.sqrt(covariance[1, 1]) or math.isinf(high):
        return bounded
    return replace(bounded, scale=max(ratio, 0.0), high=max(high, 0.0))


def fieller_interval(
    means: tuple[float, float], covariance: NDArray[np.float64], quantile: float
) -> tuple[float, float]:
    """Return Fieller's interval for the ratio of two means, a positive one over one that may be near 0.

    Those ratios r belong to it for which numerator - r · denominator is within ``quantile`` standard errors of 0. Where
    the denominator may be 0, they are all above some ratio (and negative ones): the upper end is infinite then; and the
    lower one as well where the numerator may be 0, too.

    Args:
        means: numerator and denominator of the ratio.
        covariance: [2, 2], of the two means.
        quantile: number of standard errors.
    """
    (numerator, denominator), square = means, quantile**2
    a = denominator**2 - square * covariance[1, 1]
    b = numerator * denominator - square * covariance[0, 1]
    c = numerator**2 - square * covariance[0, 0]
    if a <= 0 and c <= 0:
        return -math.inf, math.inf
    # Of both roots the one that does not cancel, and the other by their product.
    sum_ = b + math.copysign(math.sqrt(max(b * b - a * c, 0.0)), b)
    roots = sorted((c / sum_ if sum_ else 0.0, sum_ / a if a else math.inf))
    return (float(roots[0]), float(roots[1])) if a > 0 else (float(roots[1]), math.inf)


def autocorrelation_time(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return by what factor autocorrelation inflates the variance of a mean: 1 + 2 Σ ρ_k, at least 1.

    The sum ends before the first lag whose correlation is not above its own noise, 1 / √n. Of values that are
    independent few lags enter, so that their interval hardly gets wider; at most a quarter of the lags do.

    Args:
        values: in the order of time.
    """
    deviations = np.asarray(values, dtype=np.float64) - np.mean(values)
    count, variance = len(deviations), float(deviations @ deviations)
    if variance <= 0:
        return 1.0
    total = 1.0
    for lag in range(1, count // 4):
        # The mean was taken out of the values themselves, and with it the variance of a mean out of each product.
        correlation = float(deviations[lag:] @ deviations[:-lag]) / variance + total / count
        if correlation <= 1 / math.sqrt(count):
            break
        total += 2 * correlation
    return min(total, count / FEWEST) if count > FEWEST else 1.0


def _quantile(freedom: float) -> float:
    """Return the two-sided quantile of Student's t for the coverage of the interval."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(max(freedom, 1.0), (1 + COVERAGE) / 2))
