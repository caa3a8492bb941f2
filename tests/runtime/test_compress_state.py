"""What codecs remember between steps, and what they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compressing import KINDS, Tensors, net, train, trained
from polylane.errors import PolylaneError
from polylane.runtime.sync.codec import Plain
from polylane.runtime.sync.compress import codec_of
from polylane.runtime.sync.powersgd import PowerSGD
from polylane.runtime.sync.top_k import TopK
from polylane.runtime.transport.local import LocalTransport, run_local


@pytest.mark.parametrize("kind", ["powersgd", "top_k"])
def test_a_training_goes_on_from_its_state_as_if_never_stopped(kind: str) -> None:
    codec = KINDS[kind] if kind == "top_k" else lambda: PowerSGD(2, start=1)
    whole = trained(codec, 3, 6)

    def work(transport: LocalTransport) -> list[Tensors]:
        first, second, model = codec(), codec(), net()
        before = train(first, model, range(3), transport)
        second.load_state_dict(first.state_dict())
        train(first, net(), range(2), transport)  # what the first one does now is nothing to the second
        return before.sums + train(second, model, range(3, 6), transport).sums

    for sums, run in zip(run_local(3, work), whole, strict=True):
        for mine, other in zip(sums, run.sums, strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_state_of_another_plan_is_refused() -> None:
    def work(transport: LocalTransport) -> None:
        codec = TopK(0.1)
        codec.load_state_dict({"memory": {"first.weight": torch.zeros(4, 36)}})
        train(codec, net(), range(1), transport)

    with pytest.raises(
        PolylaneError, match=r"remembers of first.weight has the shape \(4, 36\).*\(8, 36\).*resume with"
    ):
        run_local(2, work)


def test_plain_values_make_a_codec() -> None:
    assert type(codec_of()) is Plain
    assert codec_of("bfloat16").dtype == torch.bfloat16
    assert codec_of("float16", None, {"w": torch.zeros(1)}).dtype == torch.float16
    power, top = codec_of(compress={"kind": "powersgd"}), codec_of(compress={"kind": "top_k", "fraction": 1})
    assert isinstance(power, PowerSGD) and (power.rank, power.start) == (4, 10)
    assert isinstance(top, TopK) and top.fraction == 1
    assert codec_of("same", None, {"w": torch.zeros(1, dtype=torch.complex64)}).state_dict() == {}


@pytest.mark.parametrize(
    "wire, compress, dtype, words",
    [
        ("int8", None, torch.float32, "sync.wire is 'int8': choose same, bfloat16 or float16"),
        ("float16", {"kind": "top_k"}, torch.float32, "sync.wire: float16 and sync.compress exclude each other: leave"),
        ("same", {"kind": "sign"}, torch.float32, "sync.compress.kind is 'sign': choose powersgd or top_k"),
        ("same", {"kind": "powersgd", "rank": 0}, torch.float32, "sync.compress.rank is 0: give a whole number of at"),
        ("same", {"kind": "powersgd", "rank": 1.5}, torch.float32, "sync.compress.rank is 1.5: give a whole number"),
        ("same", {"kind": "powersgd", "rank": True}, torch.float32, "sync.compress.rank is True: give"),
        ("same", {"kind": "powersgd", "start": -1}, torch.float32, "sync.compress.start is -1: give"),
        ("same", {"kind": "powersgd", "fraction": 0.1}, torch.float32, "sync.compress.fraction is not known: kind"),
        ("same", {"kind": "top_k", "fraction": 0}, torch.float32, "sync.compress.fraction is 0: give a number above 0"),
        ("same", {"kind": "top_k", "fraction": 1.01}, torch.float32, "sync.compress.fraction is 1.01: give a number"),
        ("same", {"kind": "top_k", "fraction": float("nan")}, torch.float32, "sync.compress.fraction is nan: give"),
        ("bfloat16", None, torch.complex64, "sync.wire takes gradients of real.* of w is torch.complex64: leave"),
        ("same", {"kind": "top_k"}, torch.int32, "sync.compress takes gradients of real.* of w is torch.int32: leave"),
    ],
)
def test_values_that_cannot_be_are_refused(wire: str, compress: Any, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(PolylaneError, match=words):
        codec_of(wire, compress, {"w": torch.zeros(2, dtype=dtype)})
