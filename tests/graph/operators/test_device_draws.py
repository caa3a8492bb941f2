"""Draws on a device: by the kernel only where it draws the operators' bits, and by operators everywhere else."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polylane.cost.memory.allocation_meter import AllocationMeter
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators import device_draws
from polylane.graph.operators.counter_mixer import Counters, mix_counters
from polylane.graph.operators.counter_rng import keep_mask, random_bits
from polylane.graph.operators.keyed_random import dropout

CPU = torch.device("cpu")


class Stub(ModuleType):
    """A kernel's module that draws as the operators do, and notes what it drew; ``wrong`` spoils one of its draws."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__("stub")
        self.wrong, self.calls = wrong, list[str]()

    def draw_bits(self, counters: Counters, device: torch.device) -> Tensor:
        self.calls.append("bits")
        return mix_counters(counters, device) + (self.wrong == "bits")

    def draw_mask(self, counters: Counters, threshold: int, device: torch.device) -> Tensor:
        self.calls.append("mask")
        if self.wrong == "raises":
            raise RuntimeError("no compiler here\nand a second line")
        return mix_counters(counters, device) >= threshold + (self.wrong == "mask") * 10**7

    def drop(self, x: Tensor, dropped: Tensor, counters: Counters, threshold: int, scale: float) -> Tensor:
        self.calls.append("drop")
        assert x.is_contiguous()
        mask = mix_counters(counters, x.device) >= threshold
        dropped.copy_(x * mask * scale if self.wrong != "drop" else x * scale)
        return mask


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    device_draws._tried_kernel.cache_clear()
    yield
    device_draws._tried_kernel.cache_clear()


def offer(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> None:
    """Let a stub be the kernel's module, and Triton be installed."""
    monkeypatch.setitem(sys.modules, device_draws.KERNEL, stub)
    monkeypatch.setattr(device_draws.importlib.util, "find_spec", lambda name: name == "triton" or None)


def test_a_kernel_that_draws_the_operators_bits_is_taken_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    offer(monkeypatch, stub)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_draws._tried_kernel(CPU) is stub
    assert {*stub.calls} == {"bits", "mask", "drop"}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("bits", "its bits differ"),
        ("mask", "its bits differ"),
        ("drop", "its bits differ"),
        ("raises", "RuntimeError: no compiler here"),
    ],
)
def test_any_other_is_left_with_one_line(monkeypatch: pytest.MonkeyPatch, wrong: str, reason: str) -> None:
    offer(monkeypatch, Stub(wrong))
    with pytest.warns(UserWarning) as told:
        assert device_draws._tried_kernel(CPU) is None
        assert device_draws._tried_kernel(CPU) is None
    (line,) = [str(warning.message) for warning in told]
    assert line.startswith("On cpu random numbers are drawn by many kernels") and line.endswith(reason)
    assert "the same numbers" in line


def test_without_triton_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_draws.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(device_draws.importlib, "import_module", lambda name: pytest.fail("imported"))
    assert device_draws._tried_kernel(CPU) is None


def test_only_gpus_have_one_and_only_where_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_draws, "_tried_kernel", lambda device: "kernel")
    gpu = torch.device("cuda", 0)
    assert device_draws.find_kernel(gpu) == "kernel"
    assert device_draws.find_kernel(CPU) is device_draws.find_kernel(torch.device("meta")) is None
    with FakeTensorMode():
        assert device_draws.find_kernel(gpu) is None
    with AllocationMeter():
        assert device_draws.find_kernel(gpu) is None


LAYOUTS = {
    "samples first": (0, lambda x: x),
    "samples second, contiguous": (1, lambda x: x),
    "samples second in their order": (1, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "every second": (0, lambda x: x.repeat_interleave(2, 2)[..., ::2]),
    "no samples": (None, lambda x: x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_by_a_kernel_is_that_by_operators(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Its numbers, gradients and layout in memory; one launch where memory is in the order of the counters."""
    batch_dim, lay_out = LAYOUTS[layout]
    part, results = SampleSlice(4, first=3, batch=9, seed=1), list[list[Tensor]]()
    stub = Stub()
    for kernel in (None, stub):
        monkeypatch.setattr(device_draws, "find_kernel", lambda device, kernel=kernel: kernel)
        x = lay_out(torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(0))).requires_grad_()
        y = dropout(part, 7, batch_dim, x, 0.3, True)
        results.append([y.detach(), *torch.autograd.grad(y, x, torch.ones(4, 4, 6))])
        drawn: list[Any] = [
            random_bits(part, 7, (4, 4), batch_dim, CPU),
            keep_mask(part, 7, 0.3, (4, 4), batch_dim, CPU),
        ]
        results[-1] += drawn
        y.add_(1.0)  # in place, as a model may
    for operators, by_kernel in zip(*results, strict=True):
        assert torch.equal(operators, by_kernel)
        assert operators.stride() == by_kernel.stride()
    ordered = layout not in ("samples second, contiguous", "every second")
    assert stub.calls == ["drop" if ordered else "mask", "bits", "mask"]
