"""What the noise scale says of batches agrees with the progress of steps of gradient descent, and with its limits."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from polylane.efficiency.batch_rules import (
    ScalingRule,
    adascale_gain,
    learning_goodput,
    learning_rate_factor,
    statistical_efficiency,
)


def test_limits() -> None:
    """Far below the noise scale a sample is worth the same in any batch; far above it, a step is."""
    assert statistical_efficiency(1e9, 64, 32) == pytest.approx(1, rel=1e-6)
    assert adascale_gain(1e9, 64, 32) == pytest.approx(2, rel=1e-6)
    assert adascale_gain(1e-9, 64, 32) == pytest.approx(1, rel=1e-6)
    assert statistical_efficiency(100, 32, 32) == adascale_gain(100, 32, 32) == 1
    assert statistical_efficiency(100, 100, 1e-12) == pytest.approx(0.5)


def test_learning_rates() -> None:
    factors = {rule: learning_rate_factor(rule, 32, 64, 16) for rule in get_args(ScalingRule)}
    assert factors == pytest.approx({"linear": 4, "sqrt": 2, "adascale": 2, "adascale-sqrt": 2**0.5})


def test_the_gain_is_the_ratio_of_the_best_steps_decreases() -> None:
    """On a quadratic with curvature I, one best step decreases the loss by |E g|⁴ / (2 E|G|²)."""
    square, spread = 3.0, 120.0

    def decrease(batch: float) -> float:
        rates = np.linspace(0, 1, 100_001)
        return float(np.max(rates * square - rates**2 / 2 * (square + spread / batch)))

    assert adascale_gain(spread / square, 64, 16) == pytest.approx(decrease(64) / decrease(16), rel=1e-6)


def test_learning_goodput() -> None:
    assert learning_goodput(500.0, 100, 300, 100) == pytest.approx(500 * 0.5)
