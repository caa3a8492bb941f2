"""Units: figures as a person writes them ("80 GB", "100 Gb/s", "5 us") -> numbers in bytes, seconds and operations."""

from __future__ import annotations

import math
import re
from typing import Literal

Dimension = Literal["size", "rate", "time", "flops"]

# An example of each dimension, for error messages.
EXAMPLES: dict[Dimension, str] = {"size": "80 GB", "rate": "25 GB/s", "time": "5 us", "flops": "312 TFLOP/s"}

_FIGURE = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµμ/]*)")

_DECIMAL = {"": 1, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _units() -> dict[str, tuple[float, Dimension]]:
    units: dict[str, tuple[float, Dimension]] = {}
    for prefix, factor in {**_DECIMAL, **_BINARY}.items():
        units[f"{prefix}B"] = factor, "size"
        units[f"{prefix}B/s"] = factor, "rate"
        units[f"{prefix}b/s"] = units[f"{prefix}bit/s"] = factor / 8, "rate"
    for prefix, factor in _DECIMAL.items():
        units[f"{prefix}FLOP/s"] = units[f"{prefix}FLOPS"] = factor, "flops"
    for name, seconds in {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}.items():
        units[name] = seconds, "time"
    return units


_UNITS = _units()


def figure(text: str) -> tuple[float, Dimension | None] | None:
    """Parse a figure into its number and the dimension of its unit (None without a unit); None if it is no figure.

    Sizes are decimal ("GB" is 10^9 bytes) or binary ("GiB"); rates are of bytes ("GB/s") or of bits ("Gb/s").
    """
    found = _FIGURE.fullmatch(text.strip())
    if found is None:
        return None
    number, unit = float(found[1]), found[2]
    if not unit:
        return number, None
    if unit not in _UNITS:
        return None
    factor, dimension = _UNITS[unit]
    # 1e-6 has no exact double, 1e6 has: "5 us" is then the double nearest to 5e-6.
    value = number * factor if factor >= 1 else number / round(1 / factor)
    return (value, dimension) if math.isfinite(value) else None
