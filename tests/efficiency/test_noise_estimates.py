"""Estimates of gradient noise are unbiased: for parts of any sizes, with and without replacement, to rounding."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from polylane.efficiency.noise_estimates import NoiseEstimate, combine_estimates, estimate_noise

Array = NDArray[np.float64]


def estimate(gradients: Array, sizes: Sequence[int], population: int | None = None) -> NoiseEstimate:
    """Return the estimate from the gradients of a batch's samples, divided into parts of these sizes."""
    parts = np.split(gradients, np.cumsum(sizes)[:-1])
    squares = [float(np.square(part.mean(axis=0)).sum()) for part in parts]
    return estimate_noise(squares, sizes, float(np.square(gradients.mean(axis=0)).sum()), population)


def mean_of(estimates: Iterable[NoiseEstimate]) -> tuple[float, float]:
    pairs = np.array([(e.gradient, e.spread) for e in estimates])
    return float(pairs[:, 0].mean()), float(pairs[:, 1].mean())


def truth_of(gradients: Array) -> tuple[float, float]:
    """Return |E g|² and the trace of the covariance, with divisor N, of a population."""
    return float(np.square(gradients.mean(axis=0)).sum()), float(gradients.var(axis=0).sum())


@pytest.fixture
def population() -> Array:
    return np.random.default_rng(0).normal(0.3, 1.0, (6, 3))


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (1, 1, 2), (1, 1, 1, 1)])
def test_unbiased_with_replacement(population: Array, sizes: tuple[int, ...]) -> None:
    batches = itertools.product(range(6), repeat=sum(sizes))
    means = mean_of(estimate(population[list(batch)], sizes) for batch in batches)
    assert means == pytest.approx(truth_of(population), rel=1e-12)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (1, 1, 2), (2, 1, 2), (3, 3)])
def test_unbiased_without_replacement(population: Array, sizes: tuple[int, ...]) -> None:
    batches = itertools.permutations(range(6), sum(sizes))
    means = mean_of(estimate(population[list(batch)], sizes, len(population)) for batch in batches)
    assert means == pytest.approx(truth_of(population), rel=1e-12)


def test_both_are_by_the_one_form_that_the_docs_have(population: Array) -> None:
    """𝒢² = |G|² - S / B (N - B) / (N - 1), with the S that is returned."""
    batch = population[:4]
    found = estimate(batch, (1, 3), 6)
    square = float(np.square(batch.mean(axis=0)).sum())
    assert found.gradient == pytest.approx(square - found.spread / 4 * (6 - 4) / (6 - 1), rel=1e-12)


def test_without_the_factor_the_gradient_is_too_small(population: Array) -> None:
    """By S / N, whatever the batch: of a batch of all samples the estimate is exact only with the factor."""
    batches = [list(batch) for batch in itertools.permutations(range(6), 4)]
    exact, trace = truth_of(population)
    gradient, _ = mean_of(estimate(population[batch], (2, 2)) for batch in batches)
    assert gradient == pytest.approx(exact - trace * 6 / 5 / 6, rel=1e-12)
    assert estimate(population, (1, 5), 6).gradient == pytest.approx(exact, rel=1e-12)


def test_equal_parts_are_the_published_equations() -> None:
    small, large = [3.0, 5.0, 4.0, 6.0], 2.5
    b, batch = 8, 32
    found = estimate_noise(small, [b] * 4, large)
    mean = sum(small) / 4
    assert found.gradient == pytest.approx((batch * large - b * mean) / (batch - b), rel=1e-14)
    assert found.spread == pytest.approx((mean - large) / (1 / b - 1 / batch), rel=1e-14)


def test_batches_that_are_never_summed_together(population: Array) -> None:
    draws = list(itertools.product(range(6), repeat=3))
    firsts = [estimate(population[list(draw)], (1, 2)) for draw in draws]
    seconds = [estimate(population[list(draw)], (1, 1, 1)) for draw in draws]
    pairs = zip(firsts, np.random.default_rng(1).permutation(len(seconds)), strict=True)
    means = mean_of(combine_estimates([first, seconds[i]], [2, 3], [3, 3]) for first, i in pairs)
    assert means == pytest.approx(truth_of(population), rel=1e-12)


# A model whose gradients of single samples are one product of matrices: softmax regression on images of digits.


@cache
def digits() -> tuple[Array, NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images / 16.0, labels


def softmax_gradients(weights: Array) -> Array:
    """Return the gradient of every sample's cross entropy: [samples, pixels · classes]."""
    images, labels = digits()
    scores = images @ weights
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    return np.einsum("np,nc->npc", images, shares).reshape(len(images), -1)


@pytest.mark.parametrize(("batch", "parts"), [(64, 4), (896, 7), (1600, 3)])
def test_softmax_regression_on_digits(batch: int, parts: int) -> None:
    """Within 4 standard errors of the exact noise scale, at a tenth, a half and nine tenths of the data per step."""
    generator = np.random.default_rng(batch)
    gradients = softmax_gradients(generator.normal(0, 0.05, (64, 10)))
    exact, trace = truth_of(gradients)
    sizes = [len(part) for part in np.array_split(range(batch), parts)]
    count = len(gradients)
    draws = [generator.permutation(count)[:batch] for _ in range(300)]
    estimates = [estimate(gradients[draw], sizes, count) for draw in draws]
    for values, truth in (
        ([e.gradient for e in estimates], exact),
        ([e.spread for e in estimates], trace),
    ):
        error = np.std(values) / np.sqrt(len(values))
        assert abs(np.mean(values) - truth) < 4 * error and error < 0.03 * truth
