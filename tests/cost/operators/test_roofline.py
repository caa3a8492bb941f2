"""Seconds of operations on devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polylane.cluster.catalogue import device_presets
from polylane.cluster.device import Device
from polylane.cost.operators.operation import Operation, PassDemand, Product
from polylane.cost.operators.roofline import host_seconds, matmul_seconds, pass_seconds
from polylane.errors import PolylaneError

A100 = Device.model_validate(device_presets()["a100-80g"])
H100 = Device.model_validate(device_presets()["h100-80g"])
IDEAL: dict[str, Any] = {
    "memory": 1 << 30,
    "flops": {"float32": 1e12},
    "achieved": {"float32": 1e12},
    "bandwidth": 1e11,
}


def reached(m: float, n: float, k: float, device: Device = A100, **more: Any) -> float:
    """Operations per second."""
    product = Product(m, n, k, **more)
    return product.flops / matmul_seconds(product, device, "bfloat16")


def test_without_losses_it_is_the_roofline() -> None:
    device = Device(**IDEAL)
    assert matmul_seconds(Product(512, 512, 512), device, "float32") == pytest.approx(2 * 512**3 / 1e12)
    thin = Product(1, 4096, 4096)  # reads a matrix for one row
    assert matmul_seconds(thin, device, "float32") == pytest.approx(thin.elements * 4 / 1e11)
    moving = Operation("memory", PassDemand(bytes=1e9), PassDemand(bytes=3e9))
    assert pass_seconds(moving, device, "float32") == pytest.approx((0.01, 0.03))


@pytest.mark.parametrize(("device", "shape"), [(A100, (1024, 10240, 5120)), (H100, (2048, 2048, 13312))])
def test_the_best_shapes_reach_what_was_measured_but_for_clocks(device: Device, shape: tuple[int, int, int]) -> None:
    best = max(reached(x, y, 8192, device) for x in (2048, 4096, 8192) for y in (3072, 4096, 6912, 8192, 16384))
    cool = device.model_copy(update={"sustained": 1.0})
    assert 0.9 * device.achieved["bfloat16"] < best / device.sustained <= device.achieved["bfloat16"]
    assert 0.7 * device.achieved["bfloat16"] < reached(*shape, cool) <= device.achieved["bfloat16"]


def test_a_tile_too_many_costs_a_wave() -> None:
    full = Product(256 * 9, 128 * 12, 4096)  # 108 tiles for 108 units
    one_more = Product(256 * 9, 128 * 12 + 8, 4096)
    assert matmul_seconds(one_more, A100, "bfloat16") > 1.2 * matmul_seconds(full, A100, "bfloat16")


def test_ragged_edges_cost_whole_tiles() -> None:
    assert reached(4096, 4096, 4096) > reached(4100, 4104, 4096)


def test_misaligned_rows_are_slower() -> None:
    even, odd = Product(8192, 50256, 2048, row_elements=50256), Product(8192, 50257, 2048, row_elements=50257)
    assert matmul_seconds(odd, A100, "float16") > 1.3 * matmul_seconds(even, A100, "float16")
    four = Product(8192, 50252, 2048, row_elements=50252)
    assert (
        matmul_seconds(even, A100, "float16")
        < matmul_seconds(four, A100, "float16")
        < matmul_seconds(odd, A100, "float16")
    )


def test_long_sums_of_few_results_are_cut() -> None:
    assert reached(256, 256, 65536) > 2.5 * reached(256, 256, 512)


def test_a_matrix_of_one_column_needs_no_tiles() -> None:
    """What each channel does by itself runs on the plain units."""
    product = Product(100_000, 1, 9, batch=64)
    assert matmul_seconds(product, A100, "float16") == pytest.approx(product.elements * 2 / A100.stream, rel=0.01)


def test_steps_that_wait_for_each_other_add_up() -> None:
    once, often = Product(64, 512, 512), Product(64, 512, 512, repeats=10)
    assert matmul_seconds(often, A100, "float16") == pytest.approx(10 * matmul_seconds(once, A100, "float16"))


def test_fused_attention_goes_by_its_scores() -> None:
    def attention(length: int, device: Device) -> float:
        flops = 2.0 * 64 * length * length * 128
        op = Operation(
            "attention", PassDemand(bytes=8.0 * 32 * length * 64, flops=flops, kernels=1), itemsize=2, key_length=length
        )
        return flops / pass_seconds(op, device, "bfloat16")[0]

    assert attention(32768, A100) < attention(65536, A100) < A100.attention * A100.rate("bfloat16")
    assert attention(65536, A100) > 0.9 * A100.attention * A100.rate("bfloat16")
    assert attention(65536, H100) > attention(65536, A100)


def test_every_operator_has_a_start() -> None:
    tiny = Operation("memory", PassDemand(bytes=8.0, kernels=1), PassDemand(bytes=8.0, kernels=1))
    assert min(pass_seconds(tiny, A100, "float16")) >= A100.overhead
    assert pass_seconds(Operation("view", PassDemand()), A100, "float16") == (0.0, 0.0)


def test_the_host_issues_every_operator() -> None:
    op = Operation("matmul", PassDemand((Product(8, 8, 8),), kernels=1), PassDemand(kernels=3))
    assert host_seconds(op, A100) == (A100.dispatch, 3 * A100.dispatch)


def test_a_straggler_takes_longer_for_everything() -> None:
    slow = A100.model_copy(update={"speed": 0.8})
    for op in (
        Operation("matmul", PassDemand((Product(4096, 4096, 4096),), kernels=1)),
        Operation("memory", PassDemand(bytes=1e8, kernels=1)),
        Operation("attention", PassDemand(flops=1e12, bytes=1e6, kernels=1), key_length=4096),
    ):
        assert pass_seconds(op, slow, "float16")[0] == pytest.approx(pass_seconds(op, A100, "float16")[0] / 0.8)


def test_a_dtype_that_a_device_does_not_know_is_named() -> None:
    op = Operation("matmul", PassDemand((Product(8, 8, 8),)))
    with pytest.raises(PolylaneError, match=r"flops\.float8 is missing"):
        pass_seconds(op, A100, "float8")


def test_dtypes_have_their_own_rates() -> None:
    assert torch.float16.itemsize == 2
    product = Product(4096, 4096, 4096)
    assert matmul_seconds(product, A100, "float32") > 10 * matmul_seconds(product, A100, "bfloat16")
    assert matmul_seconds(product, A100, "float64") > matmul_seconds(product, A100, "bfloat16")
