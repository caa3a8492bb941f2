"""A batch that grows ends where the goodput is largest, whatever the noise; it is stated, and the rate follows."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polylane.commands.learning.batch_follower import check_growth, describe_change
from polylane.commands.learning.growing_batch import PERIOD, BatchChange, GrowingBatch, fit_step_seconds
from polylane.commands.learning_rates import LearningRateOptions, NoiseMode, parse_batch
from polylane.efficiency.batch_rules import learning_rate_factor
from polylane.efficiency.noise_window import NoiseScale
from polylane.errors import PolylaneError
from polylane.plan.spec import parse


def scale_of(noise: float) -> NoiseScale:
    return NoiseScale(1.0, noise, 50, 50.0, noise, noise / 1.5, noise * 1.5)


def train(growing: GrowingBatch, noise: float, steps: int, fixed: float, each: float) -> list[BatchChange]:
    """Return the changes of a training whose steps take ``fixed + each * batch`` seconds, with some noise."""
    generator, changes, seconds = np.random.default_rng(0), list[BatchChange](), 0.0
    for _ in range(steps):
        growing.add_step(seconds)
        seconds = (fixed + each * growing.batch) * float(generator.normal(1, 0.02))
        if (change := growing.decide(scale_of(noise))) is not None:
            changes.append(change)
    return changes


@pytest.mark.parametrize(
    ("noise", "fixed", "each"), [(400, 0.01, 1e-4), (4000, 0.01, 1e-4), (2000, 0.002, 1e-3), (1e5, 0.1, 1e-3)]
)
def test_it_ends_at_the_largest_goodput(noise: float, fixed: float, each: float) -> None:
    growing = GrowingBatch(32, 1 << 20, "adascale")
    changes = train(growing, noise, 40 * PERIOD, fixed, each)
    best = math.sqrt(fixed * noise / each)
    goodput = lambda batch: batch / (fixed + each * batch) / (noise + batch)  # noqa: E731
    assert goodput(growing.batch) > 0.95 * goodput(max(best, 32)) and changes
    assert all(change.batch % 32 == 0 for change in changes)


def test_little_noise_keeps_the_batch() -> None:
    assert train(GrowingBatch(64, 4096, "linear"), 20.0, 100, 0.01, 1e-4) == []


def test_the_rate_follows_and_the_limit_holds() -> None:
    growing = GrowingBatch(32, 100, "adascale")
    changes = train(growing, 10_000.0, 200, 0.1, 1e-6)
    assert [change.batch for change in changes] == [64, 96]
    assert changes[-1].rate_factor == pytest.approx(learning_rate_factor("adascale", 10_000.0, 96, 32))
    assert changes[0].rate_change * changes[1].rate_change == pytest.approx(changes[1].rate_factor)
    resumed = GrowingBatch(32, 100, "adascale")
    resumed.resume(growing.state())
    assert resumed.batch == 96 and resumed.state() == growing.state()
    assert changes[0].gain is None and changes[1].to_dict()["gain"] == changes[1].gain


def test_nothing_is_decided_without_a_noise_scale() -> None:
    growing = GrowingBatch(32, 1024, "adascale")
    unknown = NoiseScale(0.1, 5.0, 50, 50.0)
    for _ in range(3 * PERIOD):
        growing.add_step(0.1)
        assert growing.decide(unknown) is None


@pytest.mark.parametrize(("scale", "words"), [(400.0, "at a noise scale of 400)"), (None, "of more than 300)")])
def test_a_bound_is_told_as_one(scale: float | None, words: str) -> None:
    growing, noise = GrowingBatch(32, 1024, "adascale"), NoiseScale(1.0, 1.0, 50, 50.0, scale, 300.0, None)
    changes = []
    for _ in range(2 * PERIOD):
        growing.add_step(0.1)
        changes += [change] if (change := growing.decide(noise)) is not None else []
    assert words in describe_change(12, changes[0]) and changes[0].noise == (scale or 300.0)


def test_a_line_through_times() -> None:
    assert fit_step_seconds({32: 0.0132, 64: 0.0164}) == pytest.approx((0.01, 1e-4))
    assert fit_step_seconds({32: 0.02, 64: 0.01}) == pytest.approx((0.015, 0.0))
    assert fit_step_seconds({32: 0.01, 64: 0.03}) == pytest.approx((0.0, 0.02 / 48))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("64", (64, None)), ("auto", (64, 0)), ("auto:16", (16, 0)), ("auto:16:128", (16, 128)), ("1", (1, None))],
)
def test_the_option(text: str, sizes: tuple[int, int | None]) -> None:
    assert parse_batch(text) == sizes


@pytest.mark.parametrize("text", ["0", "-3", "x", "auto:", "auto:0", "auto:8:4", "auto:8:16:32", "8:16", "1e3", "٣"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PolylaneError, match="--batch"):
        parse_batch(text)


@pytest.mark.parametrize(
    ("plan", "population", "noise", "reason"),
    [
        ("data=2", None, "auto", "needs data with a length and no sampler"),
        ("data=2", 64, "off", "leave out --noise off"),
        ("data=2,servers=1", 64, "on", "leave out servers= and every="),
        ("data=2,every=4", 64, "on", "leave out servers= and every="),
        ("data=2,pipeline=2,microbatches=2", 64, "auto", None),
    ],
)
def test_a_batch_that_may_not_grow_is_refused(
    plan: str, population: int | None, noise: NoiseMode, reason: str | None
) -> None:
    rates = LearningRateOptions(8, noise=noise, largest_batch=0)
    spec: Any = parse(plan)  # has of a plan what is asked
    check_growth(replace(rates, largest_batch=None), spec, population)  # a fixed batch is never refused
    with nullcontext() if reason is None else pytest.raises(PolylaneError, match=reason):
        check_growth(rates, spec, population)
