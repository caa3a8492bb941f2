"""Figures: what a cluster file has for a device or a link (a preset's name, figures with units) -> plain numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from polylane.errors import PolylaneError, format_value, suggest_name

Dimension = Literal["size", "rate", "time", "flops"]

# An example of each dimension, for error messages.
EXAMPLES: dict[Dimension, str] = {"size": "80 GB", "rate": "25 GB/s", "time": "5 us", "flops": "312 TFLOP/s"}

# The dimension of the figure under a key, or of those in the mapping under it.
DIMENSIONS: dict[str, Dimension] = {
    "memory": "size",
    "half": "size",
    "bandwidth": "rate",
    "total": "rate",
    "local": "rate",
    "latency": "time",
    "latencies": "time",
    "hop": "time",
    "sums": "time",
    "overhead": "time",
    "dispatch": "time",
    "flops": "flops",
    "achieved": "flops",
}

_NAMES = ("kind", "preset")
_CALLED: dict[Dimension, str] = {"size": "a size", "rate": "a rate", "time": "a time", "flops": "a rate of operations"}


def resolve_figures(entry: object, presets: Mapping[str, Mapping[str, Any]], location: str) -> object:
    """Resolve presets and units: a preset's name, a preset with some figures changed (key ``preset``), or figures.

    Args:
        entry: the value in the file, of any type.
        presets: figures of every preset, by name.
        location: key of the value in the file, for errors.

    Raises:
        PolylaneError: there is no such preset, or a text is no figure of the key's dimension.
    """
    if isinstance(entry, str):
        return dict(_preset(entry, presets, location))
    if not isinstance(entry, dict):
        return entry
    figures = {key: _figure(value, str(key), f"{location}.{key}") for key, value in entry.items()}
    if "preset" not in figures:
        return figures
    name = figures.pop("preset")
    if not isinstance(name, str):
        raise PolylaneError(f"{location}.preset must be a preset's name, not {format_value(name)}")
    return {**_preset(name, presets, f"{location}.preset"), **figures}


def expected_figure(*keys: str) -> str:
    """Describe what must be under a key, or in the mapping under it: "a rate, such as 25 GB/s"; "a number" for most."""
    dimension = next((DIMENSIONS[key] for key in keys if key in DIMENSIONS), None)
    return "a number" if dimension is None else f"{_CALLED[dimension]}, such as {EXAMPLES[dimension]}"


def _preset(name: str, presets: Mapping[str, Mapping[str, Any]], location: str) -> Mapping[str, Any]:
    if name not in presets:
        choices = f"known are {', '.join(presets)}{suggest_name(name, list(presets))}"
        raise PolylaneError(f"{location}: there is no preset {format_value(name)}, {choices}")
    return presets[name]


def _figure(entry: object, key: str, location: str) -> object:
    """Convert text with a unit to a number; other types are returned unchanged, for pydantic to check."""
    if isinstance(entry, dict):  # such as flops by dtype: its values have the dimension of the outer key
        return {inner: _figure(value, key, f"{location}.{inner}") for inner, value in entry.items()}
    if not isinstance(entry, str) or key in _NAMES:
        return entry
    parsed_figure, dimension = figure(entry), DIMENSIONS.get(key)
    if parsed_figure is None and dimension is None:
        return entry
    if parsed_figure is None or (dimension is not None and parsed_figure[1] not in (dimension, None)):
        raise PolylaneError(f"{location} must be {expected_figure(key)}, not {format_value(entry)}")
    value = parsed_figure[0]
    # Sizes are whole bytes, and pydantic's strict counts refuse 80e9.
    return int(value) if dimension == "size" and value.is_integer() else value


# ---- figures as a person writes them ---------------------------------------------------------------------------------

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


def format_size(size: float) -> str:
    """Format bytes of memory in binary units, to three digits, as memory is sold and reported: ``80.0 GiB``."""
    scale, prefix = next(((scale, p) for p, scale in reversed(_BINARY.items()) if abs(size) >= scale), (1, ""))
    value = size / scale
    if not prefix:
        return f"{size:.0f} B"
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {prefix}B"


def figure(text: str) -> tuple[float, Dimension | None] | None:
    """Parse a figure into its number and the dimension of its unit (None without a unit); None if it is no figure.

    Sizes are decimal ("GB" is 10^9 bytes) or binary ("GiB"); rates are of bytes ("GB/s") or of bits ("Gb/s").
    """
    match = _FIGURE.fullmatch(text.strip())
    if match is None:
        return None
    number, unit = float(match[1]), match[2]
    if not unit:
        return (number, None) if math.isfinite(number) else None
    if unit not in _UNITS:
        return None
    factor, dimension = _UNITS[unit]
    # 1e-6 has no exact double, 1e6 has: "5 us" is then the double nearest to 5e-6.
    value = number * factor if factor >= 1 else number / round(1 / factor)
    return (value, dimension) if math.isfinite(value) else None
