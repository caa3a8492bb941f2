"""The noise scale of a window is near the closed form, and its interval covers it as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from polylane.efficiency.noise_estimates import NoiseEstimate, estimate_noise
from polylane.efficiency.noise_window import (
    NoiseScale,
    NoiseWindow,
    autocorrelation_time,
    fieller_interval,
    measure_noise_scale,
)

Array = NDArray[np.float64]


def regression_noise(scales: Array, error: Array, noise: float) -> float:
    """Return the noise scale of linear regression with x ~ N(0, H), H diagonal, and labels with Gaussian noise.

    The gradient of a sample is x (xᵀδ - σε), with the mean Hδ, and tr Σ = tr(H) (δᵀHδ + σ²) + δᵀH²δ.
    """
    trace = scales.sum() * (error @ (scales * error) + noise**2) + error @ (scales**2 * error)
    return float(trace / np.square(scales * error).sum())


def regression_estimates(
    generator: np.random.Generator,
    batches: int,
    scales: Array,
    error: Array,
    noise: float = 0.0,
    sizes: tuple[int, ...] = (8, 8, 8, 8),
) -> list[NoiseEstimate]:
    """Return the estimates of batches of a linear regression, whose parts have these sizes."""
    samples = sum(sizes)
    x = generator.normal(size=(batches, samples, len(scales))) * np.sqrt(scales)
    gradients = x * (x @ error - noise * generator.normal(size=(batches, samples)))[..., None]
    parts = np.split(gradients, np.cumsum(sizes)[:-1], axis=1)
    squares = np.stack([np.square(part.mean(axis=1)).sum(axis=1) for part in parts], axis=1)
    totals = np.square(gradients.mean(axis=1)).sum(axis=1)
    return [
        estimate_noise(square, sizes, total) for square, total in zip(squares.tolist(), totals.tolist(), strict=True)
    ]


def mean_scale(scales: list[NoiseScale]) -> float:
    return float(np.mean([scale.scale for scale in scales if scale.scale is not None]))


@pytest.mark.parametrize(
    ("dims", "condition", "noise", "sizes"),
    [(20, 1.0, 0.0, (8, 8, 8, 8)), (20, 30.0, 0.0, (16, 16)), (20, 30.0, 1.5, (20, 1, 7, 12)), (60, 5.0, 0.3, (8, 24))],
)
def test_closed_form(dims: int, condition: float, noise: float, sizes: tuple[int, ...]) -> None:
    """Within 3%, from 6,000 batches."""
    generator = np.random.default_rng(dims)
    scales, error = np.geomspace(1, condition, dims) / condition**0.5, generator.normal(size=dims)
    found = measure_noise_scale(regression_estimates(generator, 6000, scales, error, noise, sizes))
    truth = regression_noise(scales, error, noise)
    assert found.scale == pytest.approx(truth, rel=0.03)
    assert found.low is not None and found.high is not None and found.low < truth < found.high


def test_the_closed_form_is_one_more_than_the_dimensions() -> None:
    assert regression_noise(np.ones(20), np.arange(1.0, 21.0), 0.0) == pytest.approx(21)


@pytest.mark.parametrize(
    ("batches", "sizes", "noise"), [(25, (8, 8, 8, 8), 0.0), (60, (8, 8, 8, 8), 0.5), (200, (16, 16), 0.0)]
)
def test_the_interval_is_honest(batches: int, sizes: tuple[int, ...], noise: float) -> None:
    """95% intervals cover the truth for 93 to 97% of 300 seeds."""
    scales, error = np.geomspace(0.5, 2, 20), np.linspace(-1, 1, 20)
    truth, covered = regression_noise(scales, error, noise), 0
    for seed in range(300):
        estimates = regression_estimates(np.random.default_rng(seed), batches, scales, error, noise, sizes)
        scale = measure_noise_scale(estimates)
        assert scale.low is not None and scale.high is not None
        covered += scale.low <= truth <= scale.high
    assert 0.93 <= covered / 300 <= 0.97


def correlated(generator: np.random.Generator, count: int, memory: float) -> Array:
    """Return numbers of mean 0 and variance 1 of which each remembers the one before it."""
    steps = generator.normal(size=(count + 100, 2)) * math.sqrt(1 - memory**2)
    for i in range(1, len(steps)):
        steps[i] += memory * steps[i - 1]
    return steps[100:]


def test_the_interval_is_honest_where_batches_resemble_each_other() -> None:
    """Without the autocorrelation it would cover two thirds of them."""
    covered, plain = 0, 0
    for seed in range(300):
        draws = correlated(np.random.default_rng(seed), 200, 0.6)
        scale = measure_noise_scale(NoiseEstimate(4 + g, 40 + 10 * s) for g, s in draws)
        assert scale.low is not None and scale.high is not None
        assert scale.effective < 200
        covered += scale.low <= 10 <= scale.high
        means, covariance = draws.mean(axis=0), np.cov(draws, rowvar=False) / 200
        turned = np.array([[100, 10], [10, 1]]) * covariance[::-1, ::-1]
        interval = fieller_interval((40 + 10 * means[1], 4 + means[0]), turned, 1.96)
        plain += interval[0] <= 10 <= interval[1]
    assert 0.92 <= covered / 300 <= 0.97 and plain / 300 < 0.75


def test_the_mean_of_ratios_is_off() -> None:
    """By a quarter and more, where the ratio of means is not: why means come first."""
    scales, error = np.ones(20), np.ones(20)
    estimates = regression_estimates(np.random.default_rng(3), 4000, scales, error)
    ratios = np.mean([estimate.spread / estimate.gradient for estimate in estimates])
    assert abs(ratios / 21 - 1) > 0.25
    assert measure_noise_scale(estimates).scale == pytest.approx(21, rel=0.03)


def test_not_enough_data_yet() -> None:
    """While 𝒢² is within two standard errors of 0 there is no scale; nor from a few batches."""
    generator = np.random.default_rng(0)
    noisy = [NoiseEstimate(0.1 + float(g), 5.0) for g in generator.normal(size=50)]
    scale = measure_noise_scale(noisy)
    assert (scale.scale, scale.high) == (None, None) and scale.batches == 50
    assert scale.low is not None and 5 < scale.low < 50
    assert measure_noise_scale([]).scale is None and measure_noise_scale([]).batches == 0
    assert measure_noise_scale([NoiseEstimate(1.0, 5.0)] * 7).scale is None
    assert measure_noise_scale([NoiseEstimate(1.0, 5.0)] * 8).scale == 5.0


def test_the_window_slides() -> None:
    window = NoiseWindow(size=10)
    for spread in [100.0] * 10 + [7.0] * 11:
        window.add(NoiseEstimate(spread / 7, spread if spread == 7 else 3 * spread))
    window.add(NoiseEstimate(math.nan, math.inf))
    assert window.measure().scale == pytest.approx(7.0) and window.measure().batches == 10
    assert window.measure().to_dict()["scale"] == pytest.approx(7.0)


def test_a_window_in_which_gradients_shrink() -> None:
    """By a factor of 1,000: its interval is honest, and hardly more than half as wide as without levels."""
    scales, error = np.ones(20), np.ones(20)
    covered, widths = 0, list[float]()
    for seed in range(300):
        estimates = regression_estimates(np.random.default_rng(seed), 120, scales, error)
        shrinking = [
            NoiseEstimate(e.gradient * f, e.spread * f)
            for e, f in zip(estimates, np.geomspace(1, 1e-3, 120), strict=True)
        ]
        window = NoiseWindow()
        for estimate in shrinking:
            window.add(estimate)
        scale, plain = window.measure(), measure_noise_scale(shrinking)
        assert scale.low is not None and scale.high is not None
        covered += scale.low <= 21 <= scale.high
        if plain.low is not None and plain.high is not None:
            widths.append((scale.high - scale.low) / (plain.high - plain.low))
    assert 0.93 <= covered / 300 <= 0.97
    assert np.median(widths) < 0.6


def test_fieller_is_the_set_of_ratios_within_the_errors() -> None:
    means, covariance = (40.0, 4.0), np.array([[9.0, 0.5], [0.5, 0.25]])
    interval = fieller_interval(means, covariance, 1.96)
    for ratio in interval:
        error = math.sqrt(covariance[0, 0] - 2 * ratio * covariance[0, 1] + ratio**2 * covariance[1, 1])
        assert abs(means[0] - ratio * means[1]) == pytest.approx(1.96 * error)
    low, high = fieller_interval((40.0, 0.5), covariance, 1.96)
    error = math.sqrt(covariance[0, 0] - 2 * low * covariance[0, 1] + low**2 * covariance[1, 1])
    assert math.isinf(high) and 40 - low * 0.5 == pytest.approx(1.96 * error) and low > 0
    assert fieller_interval((0.5, 0.1), covariance, 1.96) == (-math.inf, math.inf)


def test_autocorrelation_time_of_an_autoregressive_process() -> None:
    times = [autocorrelation_time(correlated(np.random.default_rng(seed), 20_000, 0.6)[:, 0]) for seed in range(6)]
    assert np.mean(times) == pytest.approx(1.6 / 0.4, rel=0.05)
    assert autocorrelation_time(np.ones(10)) == 1.0
