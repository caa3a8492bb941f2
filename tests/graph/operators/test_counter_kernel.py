"""The kernel of random numbers: the operators' bits under Triton's interpreter, on the CPU; and compiled for GPUs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators import device_draws, tiled_attention
from polylane.graph.operators.counter_mixer import Counters, mix_counters
from polylane.graph.operators.keyed_random import alpha_dropout, attention, dropout, feature_dropout

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
lawful = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load_kernel(interpret: bool) -> Any:
    """Import the kernel's module anew: Triton decides with the decorator whether it interprets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
        patch.delitem(sys.modules, device_draws.KERNEL, raising=False)
        return importlib.import_module(device_draws.KERNEL)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """The kernel's module, interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield load_kernel(True)


@st.composite
def counters(draw: st.DrawFn) -> Counters:
    """Counters of values and regions of up to four dimensions, on both sides of 2^32 and far beyond; empty ones too."""
    sizes = draw(st.lists(st.integers(0, 9), max_size=4))
    ranges = []
    for size in sizes:
        ends = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
        spans = tuple(zip(ends[::2], ends[1::2], strict=False))
        ranges.append(draw(st.sampled_from([((0, size),), spans or ((0, size),)])))
    offset = draw(st.sampled_from([0, 5, (1 << 31) - 7, (1 << 32) - 20, (1 << 32) + 9, (1 << 45) + 3]))
    keys = draw(st.integers(0, (1 << 32) - 1)), draw(st.integers(0, (1 << 32) - 1))
    return Counters(tuple(sizes), tuple(ranges), offset, keys)


@lawful
@given(counters(), st.integers(-(1 << 31), (1 << 31) - 1))
def test_bits_and_masks_are_those_of_the_operators(kernel: Any, drawn: Counters, threshold: int) -> None:
    bits = mix_counters(drawn, CPU)
    assert torch.equal(kernel.draw_bits(drawn, CPU), bits)
    assert torch.equal(kernel.draw_mask(drawn, threshold, CPU), bits >= threshold)


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_no_size_need_be_a_multiple_of_the_block(kernel: Any, count: int) -> None:
    drawn = Counters((count,), (((0, count),),), (1 << 32) - 1000, (1, 2))
    assert torch.equal(kernel.draw_bits(drawn, CPU), mix_counters(drawn, CPU))


# The interpreter cuts float32 off to bfloat16, where GPUs round: only a factor of 2 is the same.
@pytest.mark.parametrize(
    ("dtype", "p"), [(torch.float64, 0.3), (torch.float32, 0.3), (torch.float16, 0.3), (torch.bfloat16, 0.5)]
)
@pytest.mark.parametrize("batch_dim", [None, 0, 1, 2])
@pytest.mark.parametrize("function", [dropout, feature_dropout, alpha_dropout])
def test_dropout(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, function: Any, batch_dim: int | None, dtype: torch.dtype, p: float
) -> None:
    """Numbers and gradients, infinities and what is not a number too."""
    x = torch.randn(5, 5, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    x.requires_grad_()
    part, results = SampleSlice(5, first=1 << 27, batch=1 << 28, seed=1), []
    for found in (None, kernel):
        monkeypatch.setattr(device_draws, "find_kernel", lambda device, found=found: found)
        y = function(part, 7, batch_dim, x, p, True)
        results.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_attention_in_tiles(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    monkeypatch.setattr(tiled_attention, "LEAST_SCORES", 0)
    monkeypatch.setattr(tiled_attention, "_LEAST_ROWS", 3)
    q, k, v = (torch.randn(3, 2, 11, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    results = []
    for found in (None, kernel):
        monkeypatch.setattr(device_draws, "find_kernel", lambda device, found=found: found)
        out = attention(SampleSlice(3, batch=3), 5, 0, q, k, v, None, 0.3, True, tile=50)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)])
def test_the_kernel_compiles_for_gpus(monkeypatch: pytest.MonkeyPatch, target: tuple[str, Any, int]) -> None:
    """Without one: of every kind of draw, with and without divisions of the index."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    draw = load_kernel(False)._draw
    pointers: dict[str, dict[str, str]] = {
        "bits": {"bits": "*i32"},
        "mask": {"mask": "*i1"},
        **{kind: {"mask": "*i1", "x": f"*{kind}", "dropped": f"*{kind}"} for kind in ("fp16", "bf16", "fp32", "fp64")},
    }
    for given_pointers in pointers.values():
        for dims in (1, 3):
            signature: dict[str, Any] = dict.fromkeys(draw.arg_names, "i32")
            signature |= {"sizes": ("i32",) * dims, "strides": ("i32",) * dims, "scale_bits": "i64"}
            signature |= dict.fromkeys(("bits", "mask", "x", "dropped", "WIDE", "BLOCK"), "constexpr") | given_pointers
            constants = {name: None for name, kind in signature.items() if kind == "constexpr"}
            constants |= {"WIDE": dims == 3, "BLOCK": 1024}
            indices = {(draw.arg_names.index(name),): value for name, value in constants.items()}
            assert triton.compile(ASTSource(draw, signature, indices), target=GPUTarget(*target)).asm
