"""Presets: figures of well-known devices and links, by name, from the YAML files of the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from polylane.cluster.figures import resolve_figures
from polylane.yaml_file import parse


@cache
def link_presets() -> dict[str, dict[str, Any]]:
    """Return the figures of every link preset, by name."""
    return _presets(_file("links")["links"])


@cache
def device_presets() -> dict[str, dict[str, Any]]:
    """Return the figures of every device preset, by name."""
    return _presets(_file("devices"))


@cache
def usual_links() -> dict[str, dict[str, str]]:
    """Return the usual links of devices: device preset -> {"link": inside a host, "hosts": between hosts}."""
    return dict(_file("links")["usual"])


def _file(name: str) -> dict[str, Any]:
    return parse((files("polylane.cluster") / "presets" / f"{name}.yaml").read_text(encoding="utf-8"))


def _presets(named: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"kind": name, **_of(resolve_figures(figures, {}, name))} for name, figures in named.items()}


def _of(figures: object) -> dict[str, Any]:
    assert isinstance(figures, dict)
    return figures
