"""Gradient noise of one batch: unbiased estimates of |E g|² and of the trace of the samples' covariance, from parts.

A batch of B samples is divided into k parts (the microbatches of all replicas), of b_i samples with the mean gradient
g_i; the batch's gradient is the mean over its samples, G = Σ (b_i / B) g_i. With S the trace of the covariance of one
sample's gradient, and 𝒢² the squared norm of the expected one, E|g_i|² = 𝒢² + S / b_i and E|G|² = 𝒢² + S / B, so that

    S  = B (Q - |G|²) / (k - 1),  Q = Σ (b_i / B) |g_i|²          𝒢² = |G|² - S / B

are unbiased whatever the sizes; B (Q - |G|²) is Σ b_i |g_i - G|², the sum of squares between groups of an analysis of
variance. For equal parts these are the equations of McCandlish et al. (arXiv 1812.06162, appendix A.1).

An epoch draws its samples without replacement from N, of whose gradients S is the trace of the covariance, with the
divisor N. Two of them then have the covariance -S / (N - 1), which every pair of the batch adds alike, so that

    S  = (N - 1) / N · B (Q - |G|²) / (k - 1)             𝒢² = |G|² - (S / B) (N - B) / (N - 1)

are unbiased: a batch of all N samples has no noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NoiseEstimate:
    """Unbiased estimates from the gradients of one batch; either may be negative, only their means are of use.

    Attributes:
        gradient: estimate of the squared norm of the expected gradient, 𝒢².
        spread: estimate of the trace of the covariance of one sample's gradient, S; of N samples with the divisor N.
    """

    gradient: float
    spread: float


def estimate_noise(
    part_squares: Sequence[float], part_samples: Sequence[float], total_square: float, population: int | None = None
) -> NoiseEstimate:
    """Estimate 𝒢² and S from one batch.

    Args:
        part_squares: squared norm of each part's mean gradient, |g_i|²; at least two parts.
        part_samples: number of samples of each part, b_i; of a weighted mean, the part's share of the weights times B.
        total_square: squared norm of the batch's gradient, |G|², the mean of the parts' by their numbers of samples.
        population: number N of samples from which the batch is drawn without replacement; None: each sample is drawn
            by itself (with replacement, or from a stream).
    """
    samples, parts = sum(part_samples), len(part_squares)
    mean_square = sum(b * square for b, square in zip(part_samples, part_squares, strict=True)) / samples
    spread = samples * (mean_square - total_square) / (parts - 1)
    if population is None:
        return NoiseEstimate(total_square - spread / samples, spread)
    # Here S N / (N - 1) is known, of which 𝒢² has the part (N - B) / N.
    remaining = max(1 - samples / population, 0.0)
    return NoiseEstimate(total_square - spread / samples * remaining, spread * (population - 1) / population)


def combine_estimates(
    estimates: Sequence[NoiseEstimate], parts: Sequence[int], samples: Sequence[float]
) -> NoiseEstimate:
    """Combine estimates from batches whose gradients are never summed, as those of replicas that step by themselves.

    Args:
        estimates: those of each batch.
        parts: number of parts of each batch: S is known by parts - 1 degrees of freedom.
        samples: number of samples of each batch, by which their 𝒢² are weighted.
    """
    freedom, total = sum(parts) - len(parts), sum(samples)
    spread = sum((k - 1) * estimate.spread for k, estimate in zip(parts, estimates, strict=True)) / freedom
    gradient = sum(b * estimate.gradient for b, estimate in zip(samples, estimates, strict=True)) / total
    return NoiseEstimate(gradient, spread)
