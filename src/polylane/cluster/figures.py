"""What a cluster file says of a device or a link (a preset's name, or figures with units) -> plain figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polylane.cluster.units import EXAMPLES, Dimension, figure
from polylane.errors import PolylaneError, format_value, suggest_name

# What is measured under a key, or in the mapping under it.
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
    """The figures that are meant: of a preset, of a preset with some changed (key ``preset``), or as they are.

    Args:
        given: what stands in the file.
        presets: by name.
        place: its key in the file.

    Raises:
        PolylaneError: there is no such preset, or a text is no figure of its kind.
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
    """What must stand under a key, or in the mapping under it: "a rate, such as 25 GB/s"; "a number" for most."""
    dimension = next((DIMENSIONS[key] for key in keys if key in DIMENSIONS), None)
    return "a number" if dimension is None else f"{_CALLED[dimension]}, such as {EXAMPLES[dimension]}"


def _preset(name: str, presets: Mapping[str, Mapping[str, Any]], place: str) -> Mapping[str, Any]:
    if name not in presets:
        known = f"known are {', '.join(presets)}{suggest_name(name, list(presets))}"
        raise PolylaneError(f"{place}: there is no preset {format_value(name)}, {known}")
    return presets[name]


def _figure(given: object, key: str, place: str) -> object:
    """A value with its unit taken in; what is no text is left as it is."""
    if isinstance(given, dict):
        return {inner: _figure(value, key, f"{place}.{inner}") for inner, value in given.items()}
    if not isinstance(given, str) or key in _NAMES:
        return given
    found, dimension = figure(given), DIMENSIONS.get(key)
    if found is None and dimension is None:
        return given
    if found is None or (dimension is not None and found[1] not in (dimension, None)):
        raise PolylaneError(f"{place} must be {expected_figure(key)}, not {format_value(given)}")
    value = found[0]
    return int(value) if dimension == "size" and value.is_integer() else value
