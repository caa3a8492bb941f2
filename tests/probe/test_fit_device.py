"""Fits of a device: known figures are found again, and errors are what they are said to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polylane.cluster.device import Device
from polylane.cost.operators.operation import PassDemand
from polylane.probe.fit_device import fit_device, fit_errors
from tests.support.known_measurements import operators

BANDWIDTH = 2e10
BASE = Device(kind="core", type="cpu", memory=1 << 30, flops={"float32": 1.0}, bandwidth=1.0, price=0.5)
CORE = Device(
    type="cpu",
    memory=1 << 30,
    flops={"float32": 8e10},
    achieved={"float32": 8e10},
    bandwidth=BANDWIDTH,
    streaming=0.6,
    overhead=7e-6,
    attention=0.8,
    attention_length=90.0,
)


# The least depth that is looked at is a thousandth of a term, which the shortest sums of a hundred terms feel.
DEPTH = 1e-3 / 100


def test_a_known_device_is_found_again() -> None:
    found = fit_device(BASE, operators(CORE), BANDWIDTH)
    assert found.achieved["float32"] == pytest.approx(8e10, rel=DEPTH)
    assert found.stream == pytest.approx(0.6 * BANDWIDTH, rel=DEPTH)
    assert found.overhead == pytest.approx(7e-6, rel=DEPTH)
    assert found.attention == pytest.approx(0.8, rel=DEPTH)
    assert found.attention_length == pytest.approx(90, rel=10 * DEPTH)
    assert fit_errors(found, operators(CORE)).worst < 10 * DEPTH


def test_what_is_not_fitted_stays() -> None:
    found = fit_device(BASE, operators(CORE), BANDWIDTH)
    assert (found.kind, found.type, found.memory, found.price, found.bandwidth) == ("core", "cpu", 1 << 30, 0.5, 2e10)


def test_the_peak_is_at_least_what_was_reached() -> None:
    timed = operators(CORE)
    quick = replace(timed[5], forward=timed[5].forward / 2)  # one matmul, twice as fast as all others
    found = fit_device(BASE, [*timed[:5], quick, *timed[6:]], BANDWIDTH)
    assert found.flops["float32"] == pytest.approx(
        sum(p.flops for p in quick.operation.forward.products) / quick.forward
    )
    assert found.achieved["float32"] < found.flops["float32"]


def test_a_further_dtype_has_a_rate_of_its_own() -> None:
    both = CORE.model_copy(update={"achieved": {"float32": 8e10, "bfloat16": 2e11}})
    timed = [*operators(both), *operators(both, "bfloat16", ["matmul"])]
    found = fit_device(BASE, timed, BANDWIDTH)
    assert set(found.achieved) == {"float32", "bfloat16"}
    assert found.achieved["bfloat16"] == pytest.approx(2e11, rel=1e-5)
    assert fit_errors(found, timed).worst < 1e-4


def test_one_operator_that_is_slow_for_reasons_of_its_own_spoils_little() -> None:
    timed = operators(CORE)
    odd = [replace(each, forward=20 * each.forward) if each.name.startswith("dropout") else each for each in timed]
    found = fit_device(BASE, odd, BANDWIDTH)
    assert found.achieved["float32"] == pytest.approx(8e10, rel=0.02)
    assert found.overhead == pytest.approx(7e-6, rel=0.2)


def test_nothing_streams_faster_than_the_memory() -> None:
    found = fit_device(BASE, operators(CORE), bandwidth=5e9)
    assert found.bandwidth == 5e9 and found.streaming == pytest.approx(1.0)


def test_errors_are_relative_by_family_and_name_the_worst() -> None:
    timed = operators(CORE)
    slow = [replace(each, forward=each.forward * 2) if each.name == timed[3].name else each for each in timed]
    off = fit_errors(CORE, slow)
    assert off.worst == pytest.approx(0.5) and timed[3].name in off.worst_case and "float32" in off.worst_case
    assert off.median == pytest.approx(0.0, abs=1e-9)
    assert set(off.families) == {"matmul", "convolution", "attention", "memory"}


def test_a_pass_that_there_is_not_counts_for_nothing() -> None:
    first, *rest = operators(CORE)
    forward_only = replace(first, operation=replace(first.operation, backward=PassDemand()), backward=0.0)
    assert fit_errors(CORE, [forward_only, *rest]).worst < 1e-9
