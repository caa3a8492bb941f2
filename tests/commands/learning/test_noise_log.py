"""A training writes the gradient noise of the steps in which it was measured, and what it amounts to so far."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import nn

from polylane.commands.learning.noise_option import check_noise
from polylane.compile.objectives import build_objectives
from polylane.efficiency.noise_estimates import NoiseEstimate, estimate_noise
from polylane.efficiency.noise_window import NoiseWindow
from polylane.errors import PolylaneError
from polylane.runtime.telemetry.noise_log import NoiseLog
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.part_layout import PartLayout
from tests.support.workers.training import batch_of, classify, compiled, mlp, sgd


@dataclass
class Step:
    noise: NoiseReading | None


def reading(squares: tuple[float, float], total: float, scaled: float | None = None) -> NoiseReading:
    """Of a batch of two halves, of 8 samples each, whose gradients are means over all 16."""
    layout = PartLayout(microbatches=2, replicas=1, divides_microbatches=True, has_pools=False, is_joint=False)
    second = [0.0, 0.0, 0.0] if scaled is None else [scaled / 4, scaled / 4, scaled / 2]
    numbers = [8.0, 8.0, *(square / 4 for square in squares), total, *second, 1.0, 0.0, 0.0]
    return NoiseReading(layout, numbers, (16,), False, scaled is not None)


def test_lines_say_what_the_window_says() -> None:
    log, window = NoiseLog(), NoiseWindow()
    for i in range(12):
        squares, total = (3.0 + i % 3, 5.0), 2.5 + i % 2
        expected = estimate_noise(squares, (8, 8), total)
        window.add(expected)
        columns = log.add(Step(reading(squares, total)))["noise"]
        assert (columns["step_g2"], columns["step_s"]) == pytest.approx((expected.gradient, expected.spread), rel=1e-12)
        assert columns["parts"] == 2 and "adam" not in columns
        assert {name: columns[name] for name in window.measure().to_dict()} == pytest.approx(
            window.measure().to_dict(), nan_ok=True
        )
    assert log.add(Step(None)) == {} and log.scales.plain.batches == 11


def test_samples_of_an_epoch_are_drawn_without_replacement() -> None:
    """Of 16 of 16 samples the gradient is exact; and S has the divisor of all samples."""
    columns = NoiseLog(population=16).add(Step(reading((3.0, 5.0), 2.5)))["noise"]
    plain = NoiseLog().add(Step(reading((3.0, 5.0), 2.5)))["noise"]
    assert columns["step_g2"] == 2.5 and plain["step_g2"] == pytest.approx(2.5 - plain["step_s"] / 16)
    assert columns["step_s"] == pytest.approx(plain["step_s"] * 15 / 16)


def test_a_line_says_from_how_many_samples_batches_are_drawn() -> None:
    """With a sampler, whose samples may come again, and of a stream: from none that are counted."""
    for population in (16, None):
        columns = NoiseLog(population).add(Step(reading((3.0, 5.0), 2.5)))["noise"]
        remaining = 1.0 if population is None else (population - 16) / (population - 1)
        assert columns["population"] == population
        assert columns["step_g2"] == pytest.approx(2.5 - columns["step_s"] / 16 * remaining)


def test_adam_has_a_column_of_its_own() -> None:
    log = NoiseLog()
    columns = log.add(Step(reading((3.0, 5.0), 2.5, scaled=40.0)))["noise"]["adam"]
    assert NoiseEstimate(columns["step_g2"], columns["step_s"]) == estimate_noise((40.0, 40.0), (8, 8), 20.0)
    log.add(Step(reading((3.0, 5.0), 2.5, scaled=40.0)))
    assert log.scales.adam.batches == 1


def test_what_cannot_be_measured_is_refused_where_it_is_asked_for() -> None:
    batch = batch_of(8)
    objectives = build_objectives(classify, sgd, None)
    prepared = compiled(mlp(6, 8, 4), objectives, batch, "data=1")
    check_noise("auto", prepared)
    with pytest.raises(PolylaneError, match="--noise on: the batch's gradient is computed as one"):
        check_noise("on", prepared)
    normalized = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    with pytest.raises(PolylaneError, match="a batch normalization, couples the samples of replicas"):
        check_noise("on", compiled(normalized, objectives, batch, "data=2"))
    check_noise("on", compiled(normalized, objectives, batch, "data=2,microbatches=2"))
