"""Figures: what a cluster file has for a device or a link (a preset's name, figures with units) -> plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polylane.cluster.units import EXAMPLES, Dimension, figure
from polylane.errors import PolylaneError, format_value, suggest_name

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
    "overhead": "time",
    "dispatch": "time",
    "dispatch_backward": "time",
    "flops": "flops",
    "achieved": "flops",
}

_NAMES = ("kind", "preset")
_CALLED: dict[Dimension, str] = {"size": "a size", "rate": "a rate", "time": "a time", "flops": "a rate of operations"}


def resolve_figures(given: object, presets: Mapping[str, Mapping[str, Any]], place: str) -> object:
    """Resolve presets and units: a preset's name, a preset with some figures changed (key ``preset``), or figures.

    Args:
        given: the value in the file, of any type.
        presets: figures of every preset, by name.
        place: key of the value in the file, for errors.

    Raises:
        PolylaneError: there is no such preset, or a text is no figure of the key's dimension.
    """
    if isinstance(given, str):
        return dict(_preset(given, presets, place))
    if not isinstance(given, dict):
        return given
    own = {key: _figure(value, str(key), f"{place}.{key}") for key, value in given.items()}
    if "preset" not in own:
        return own
    name = own.pop("preset")
    if not isinstance(name, str):
        raise PolylaneError(f"{place}.preset must be a preset's name, not {format_value(name)}")
    return {**_preset(name, presets, f"{place}.preset"), **own}


def expected_figure(*keys: str) -> str:
    """Describe what must be under a key, or in the mapping under it: "a rate, such as 25 GB/s"; "a number" for most."""
    dimension = next((DIMENSIONS[key] for key in keys if key in DIMENSIONS), None)
    return "a number" if dimension is None else f"{_CALLED[dimension]}, such as {EXAMPLES[dimension]}"


def _preset(name: str, presets: Mapping[str, Mapping[str, Any]], place: str) -> Mapping[str, Any]:
    if name not in presets:
        known = f"known are {', '.join(presets)}{suggest_name(name, list(presets))}"
        raise PolylaneError(f"{place}: there is no preset {format_value(name)}, {known}")
    return presets[name]


def _figure(given: object, key: str, place: str) -> object:
    """Convert text with a unit to a number; other types are returned unchanged, for pydantic to check."""
    if isinstance(given, dict):  # such as flops by dtype: its values have the dimension of the outer key
        return {inner: _figure(value, key, f"{place}.{inner}") for inner, value in given.items()}
    if not isinstance(given, str) or key in _NAMES:
        return given
    found, dimension = figure(given), DIMENSIONS.get(key)
    if found is None and dimension is None:
        return given
    if found is None or (dimension is not None and found[1] not in (dimension, None)):
        raise PolylaneError(f"{place} must be {expected_figure(key)}, not {format_value(given)}")
    value = found[0]
    # Sizes are whole bytes, and pydantic's strict counts refuse 80e9.
    return int(value) if dimension == "size" and value.is_integer() else value
