"""Laws of the roofline: more work never takes less time, and nothing is faster than the device."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.cluster.catalogue import device_presets
from polylane.cluster.device import Device
from polylane.cost.operators.operation import Operation, PassDemand, Product
from polylane.cost.operators.roofline import matmul_seconds, pass_seconds
from tests.support import subsets

brief = settings(max_examples=subsets.examples(60), deadline=None)
devices = st.sampled_from([Device.model_validate(figures) for figures in device_presets().values()])
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
sizes = st.integers(1, 20_000)
batches = st.integers(1, 64)


@brief
@given(devices, dtypes, sizes, sizes, sizes, batches)
def test_nothing_is_faster_than_the_device(device: Device, dtype: str, m: int, n: int, k: int, batch: int) -> None:
    product = Product(m, n, k, batch=batch)
    best = max(device.rate(dtype), device.rate("float32"))
    taken = matmul_seconds(product, device, dtype)
    assert taken >= product.flops / best * (1 - 1e-9)
    item = 4 if dtype == "float32" else 2
    assert taken >= product.elements * item / device.stream * (1 - 1e-9)


@brief
@given(devices, dtypes, sizes, sizes, sizes, st.sampled_from(["m", "n", "batch"]), st.integers(1, 500))
def test_more_results_never_take_less(
    device: Device, dtype: str, m: int, n: int, k: int, which: str, more: int
) -> None:
    small = Product(m, n, k)
    large = Product(m + more * (which == "m"), n + more * (which == "n"), k, batch=1 + more * (which == "batch"))
    assert matmul_seconds(large, device, dtype) >= matmul_seconds(small, device, dtype) * (1 - 1e-9)


@brief
@given(devices, dtypes, sizes, sizes, sizes)
def test_twice_the_batch_is_at_most_twice_the_time(device: Device, dtype: str, m: int, n: int, k: int) -> None:
    once, twice = (matmul_seconds(Product(m, n, k, batch=b), device, dtype) for b in (1, 2))
    assert once * (1 - 1e-9) <= twice <= 2 * once * (1 + 1e-9)


@brief
@given(devices, dtypes, st.floats(0, 1e12), st.floats(0, 1e15), st.floats(0.05, 1.0))
def test_time_goes_by_speed(device: Device, dtype: str, moved: float, flops: float, speed: float) -> None:
    op = Operation(
        "attention",
        PassDemand((Product(64, 64, 64),), bytes=moved, flops=flops),
        PassDemand(bytes=moved),
        key_length=2048,
    )
    slow = device.model_copy(update={"speed": device.speed * speed})
    for fast_pass, slow_pass in zip(pass_seconds(op, device, dtype), pass_seconds(op, slow, dtype), strict=True):
        assert slow_pass == pytest.approx(fast_pass / speed)
