"""Devices: figures that are checked, rates that follow, presets that are whole."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from polylane.cluster.catalogue import device_presets
from polylane.cluster.device import ACHIEVED, Device
from polylane.errors import PolylaneError

PLAIN: dict[str, Any] = {"memory": 16 * 10**9, "flops": {"float32": 1e12, "bfloat16": 8e12}, "bandwidth": 1e11}


def preset(name: str) -> Device:
    return Device.model_validate(device_presets()[name])


def test_what_was_not_measured_is_a_share_of_the_peak() -> None:
    device = Device(**PLAIN, achieved={"float32": 0.5e12})
    assert device.achieved == {"float32": 0.5e12, "bfloat16": pytest.approx(ACHIEVED * 8e12)}
    assert (device.peak("float32"), device.rate("float32")) == (1e12, 0.5e12)


def test_a_straggler_is_slower_in_everything() -> None:
    device, slow = Device(**PLAIN), Device(**PLAIN, speed=0.8)
    assert slow.rate("bfloat16") == pytest.approx(0.8 * device.rate("bfloat16"))
    assert slow.stream == pytest.approx(0.8 * device.stream)
    assert slow.peak("bfloat16") == device.peak("bfloat16")


def test_shares_multiply() -> None:
    device = Device(**PLAIN, achieved={"float32": 0.9e12}, sustained=0.5, streaming=0.25)
    assert device.rate("float32") == pytest.approx(0.45e12)
    assert device.stream == pytest.approx(0.25e11)


def test_an_unknown_dtype_is_named_with_the_known_ones() -> None:
    with pytest.raises(PolylaneError, match=r"device device: flops\.float8 is missing, known are float32, bfloat16"):
        Device(**PLAIN).rate("float8")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"memory": 0}, "memory"),
        ({"memory": -1}, "memory"),
        ({"memory": 1.5}, "memory"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"bandwidth": float("nan")}, "bandwidth"),
        ({"flops": {}}, "at least one dtype"),
        ({"flops": {"float32": -1.0}}, "flops"),
        ({"achieved": {"float32": 2e12}}, "at most flops.float32"),
        ({"price": -1.0}, "price"),
        ({"overhead": -1e-6}, "overhead"),
        ({"speed": 0.0}, "speed"),
        ({"sustained": 1.5}, "sustained"),
        ({"streaming": 0.0}, "streaming"),
        ({"tiles": ()}, "tiles"),
        ({"tiles": ((0, 64),)}, "tiles"),
        ({"waves": 1.1}, "waves"),
        ({"memroy": 1}, "memroy"),
    ],
)
def test_figures_that_cannot_be_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=said):
        Device(**{**PLAIN, **changed})


def test_it_comes_back_from_its_own_figures() -> None:
    for name in device_presets():
        device = preset(name)
        assert Device.model_validate(device.model_dump(mode="json", exclude_defaults=True)) == device
        assert device.kind == name


@pytest.mark.parametrize(
    ("name", "memory", "peak", "achieved"),
    [
        ("a100-40g", 40 * 2**30, 312e12, 271.2e12),
        ("a100-80g", 80 * 2**30, 312e12, 271.2e12),
        ("h100-80g", 80 * 2**30, 989e12, 794.5e12),
        ("h100-96g-500w", 96 * 2**30, 989e12, 794.5e12),
        ("h200", 141 * 10**9, 989e12, 794.5e12),
        ("b200", 180 * 10**9, 2250e12, 1745e12),
        ("gb200", 186 * 10**9, 2500e12, 1822e12),
        ("mi300x", 192 * 2**30, 1307.4e12, 668.4e12),
    ],
)
def test_anchors(name: str, memory: int, peak: float, achieved: float) -> None:
    device = preset(name)
    assert device.memory == memory
    assert (device.peak("bfloat16"), device.achieved["bfloat16"]) == (peak, achieved)


def test_presets_have_what_plans_ask_for() -> None:
    for name in device_presets():
        device = preset(name)
        assert {"float32", "float64", "bfloat16", "float16"} <= set(device.flops)
        assert device.price > 0
        assert device.type == ("cpu" if name == "cpu" else "cuda")


def test_less_power_is_slower() -> None:
    assert preset("h100-96g-500w").rate("bfloat16") < preset("h100-80g").rate("bfloat16")
