"""Batches are ranked by throughput times statistical efficiency, and the best one is where a simple model has it."""

from __future__ import annotations

import pytest

from polylane.efficiency.batch_choice import BatchOption, choose_batch, list_batches, rate_batches
from polylane.efficiency.noise_window import NoiseScale

NOISE = NoiseScale(1.0, 400.0, 50, 50.0, 400.0, 200.0, 900.0)


def seconds(batch: float) -> float:
    """A step that takes 10 ms whatever the batch, and 0.1 ms for each sample."""
    return 0.01 + 1e-4 * batch


OPTIONS = [BatchOption(batch, batch / seconds(batch), price=3.6) for batch in range(10, 2000, 10)]


def test_the_best_batch_is_the_closed_form() -> None:
    """B / (a + bB) · 1 / (φ + B) is largest at B = √(aφ / b)."""
    rated = rate_batches(OPTIONS, NOISE, 64)
    assert rated[0].option.batch == choose_batch(OPTIONS, 400, 64).batch == 200
    assert choose_batch(OPTIONS, 100, 64).batch == 100 and choose_batch(OPTIONS, 900, 64).batch == 300


def test_rows() -> None:
    (row,) = rate_batches([BatchOption(128, 1000.0, "data=2", 2, 3.6)], NOISE, 64)
    assert row.efficiency == pytest.approx(464 / 528) and row.goodput == pytest.approx(1000 * 464 / 528)
    assert (row.efficiency_low, row.efficiency_high) == pytest.approx((264 / 328, 964 / 1028))
    assert row.gain == pytest.approx(2 * 464 / 528)
    assert row.price_of_progress == pytest.approx(0.001 * 64_000 / row.goodput)


def test_listed_batches() -> None:
    assert list_batches(64, 10_000) == [16, 32, 64, 128, 256, 512, 1024, 2048]
    assert list_batches(64, 300, 32) == [32, 64, 128, 256] and list_batches(1, 4) == [1, 2, 4]
