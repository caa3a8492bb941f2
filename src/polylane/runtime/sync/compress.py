"""Which codec a plan asks for: from plain values to the object that sums gradients that way."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.runtime.sync.codec import Codec, Plain
from polylane.runtime.sync.powersgd import PowerSGD
from polylane.runtime.sync.top_k import TopK
from polylane.runtime.sync.wire import Wire

WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_REAL = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def codec_of(
    wire: str = "same",
    compress: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> Codec:
    """How the sums over replicas are made; a new codec for each reducer, which it is to be the only one to use.

    Args:
        wire: ``"same"`` (gradients travel as they are), ``"bfloat16"`` or ``"float16"``.
        compress: None, ``{"kind": "powersgd", "rank": 4, "start": 10}`` or ``{"kind": "top_k", "fraction": 0.01}``; the
            numbers are those by default.
        parameters: whose gradients are to be summed, by canonical name.

    Raises:
        PolylaneError: a value is not one that its key takes, two keys exclude each other, or a gradient is none of
            real numbers.
    """
    if wire != "same" and wire not in WIRES:
        raise PolylaneError(f"sync.wire is {wire!r}: choose same, {' or '.join(WIRES)}")
    if wire != "same" and compress is not None:
        raise PolylaneError(f"sync.wire: {wire} and sync.compress exclude each other: leave one of them out")
    if wire == "same" and compress is None:
        return Plain()
    _require_real("sync.wire" if compress is None else "sync.compress", parameters or {})
    return Wire(WIRES[wire]) if compress is None else _compressed(compress)


def _require_real(key: str, parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype not in _REAL:
            raise PolylaneError(
                f"{key} takes gradients of real floating-point numbers, and that of {name} is {parameter.dtype}: "
                f"leave {key} out"
            )


def _compressed(compress: Mapping[str, Any]) -> Codec:
    kind = compress.get("kind")
    if kind == "powersgd":
        _require_keys(compress, ("kind", "rank", "start"))
        return PowerSGD(_whole(compress, "rank", 4, 1), _whole(compress, "start", 10, 0))
    if kind == "top_k":
        _require_keys(compress, ("kind", "fraction"))
        return TopK(_fraction(compress, 0.01))
    raise PolylaneError(f"sync.compress.kind is {kind!r}: choose powersgd or top_k")


def _require_keys(compress: Mapping[str, Any], known: Collection[str]) -> None:
    for key in compress:
        if key not in known:
            raise PolylaneError(f"sync.compress.{key} is not known: kind {compress['kind']} takes {', '.join(known)}")


def _whole(compress: Mapping[str, Any], key: str, default: int, least: int) -> int:
    value = compress.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PolylaneError(f"sync.compress.{key} is {value!r}: give a whole number of at least {least}")
    return value


def _fraction(compress: Mapping[str, Any], default: float) -> float:
    value = compress.get("fraction", default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise PolylaneError(f"sync.compress.fraction is {value!r}: give a number above 0 and at most 1")
    return float(value)
