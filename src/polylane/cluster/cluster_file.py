"""Cluster files: YAML -> Cluster, and back; presets and units are resolved, errors name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from polylane.cluster.catalogue import device_presets, link_presets
from polylane.cluster.cluster import Cluster, Hosts, Links
from polylane.cluster.device import Device
from polylane.cluster.figures import expected_figure, resolve_figures
from polylane.cluster.link import Link, Positive
from polylane.errors import PolylaneError
from polylane.yaml_file import FileForm, StrictMapping, error_sentence, first_error, read
from polylane.yaml_file import dump as dump_yaml


class _File(StrictMapping):
    """The keys of a cluster file."""

    polylane: Literal[1] = 1
    hosts: tuple[Hosts, ...]
    links: Links = Links()
    speeds: dict[int, Positive] = pydantic.Field(default={})


def load(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        PolylaneError: the file cannot be read, or a key is missing, unknown or wrong; one sentence that names both.
    """
    data = read(path)
    try:
        return from_mapping(data)
    except PolylaneError as error:
        raise PolylaneError(f"{path}: {error}") from error


def from_mapping(data: dict[Any, Any]) -> Cluster:
    """Build the cluster that a file's mapping describes.

    Raises:
        PolylaneError: as :func:`load`, without the file.
    """
    _check_filled(data)
    # Units and presets first: pydantic then sees plain numbers. Errors quote the text that the user wrote.
    try:
        file = _File.model_validate(_resolve_file(data))
    except pydantic.ValidationError as error:
        raise PolylaneError(error_sentence(first_error(error), _FORM, data)) from error
    return Cluster(file.hosts, file.links, file.speeds)


def dump(cluster: Cluster) -> str:
    """Format a cluster as YAML; reading it again gives an equal one. Figures that equal a preset's become its name."""
    data: dict[str, Any] = {"polylane": 1, "hosts": [_dump_hosts(group) for group in cluster.hosts]}
    links = {name: _preset_or_figures(link, link_presets()) for name, link in cluster.links if link is not None}
    if links:
        data["links"] = links
    if cluster.speeds:
        data["speeds"] = dict(cluster.speeds)
    return dump_yaml(data)


def _dump_hosts(group: Hosts) -> dict[str, Any]:
    attributes = _to_plain(group.model_dump(exclude_defaults=True, exclude={"device", "link", "crowded"}))
    data = {"count": group.count, "devices": group.devices, **attributes}
    data["device"] = _preset_or_figures(group.device, device_presets())
    if group.link is not None:
        data["link"] = _preset_or_figures(group.link, link_presets())
    if group.crowded is not None:
        data["crowded"] = _preset_or_figures(group.crowded, link_presets())
    return data


def _preset_or_figures(component: Device | Link, presets: dict[str, dict[str, Any]]) -> str | dict[str, Any]:
    """Return the name of the preset that a device or link equals, or its figures."""
    preset = presets.get(component.kind)
    if preset is not None and type(component).model_validate(preset) == component:
        return component.kind
    return dict(_to_plain(component.model_dump(exclude_defaults=True)))


def _to_plain(data: Any) -> Any:
    """Convert mappings and tuples to the dicts and lists that YAML has."""
    if isinstance(data, Mapping):
        return {key: _to_plain(value) for key, value in data.items()}
    return [_to_plain(value) for value in data] if isinstance(data, tuple) else data


def _check_filled(data: object, location: str = "") -> None:
    """Refuse keys without a value, at any depth: YAML reads them as null."""
    if data is None:
        raise PolylaneError(f"{location} is empty")
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        _check_filled(value, f"{location}.{key}" if location else str(key))


def _resolve_file(data: dict[Any, Any]) -> dict[Any, Any]:
    """Return the file's mapping with plain numbers in place of presets and units."""
    data, hosts, links = dict(data), data.get("hosts"), data.get("links")
    if isinstance(hosts, list):
        data["hosts"] = [_resolve_group(group, f"hosts.{index}") for index, group in enumerate(hosts)]
    if isinstance(links, dict):
        data["links"] = {name: resolve_figures(link, link_presets(), f"links.{name}") for name, link in links.items()}
    return data


def _resolve_group(group: object, location: str) -> object:
    if not isinstance(group, dict):
        return group
    presets = {"device": device_presets(), "link": link_presets(), "crowded": link_presets()}
    return {
        key: resolve_figures(v, presets[key], f"{location}.{key}") if key in presets else v for key, v in group.items()
    }


def _keys(location: Sequence[int | str]) -> list[str]:
    """Return the keys that a mapping at a place of a cluster file may have, for suggestions in errors."""
    path = [str(part) for part in location if isinstance(part, str)]
    models: dict[tuple[str, ...], type[pydantic.BaseModel]] = {
        (): _File,
        ("hosts",): Hosts,
        ("hosts", "device"): Device,
        ("hosts", "link"): Link,
        ("hosts", "crowded"): Link,
        ("links",): Links,
    }
    return list(models.get(tuple(path), Link).model_fields)


_FORM = FileForm("a cluster", _keys, lambda location: expected_figure(*map(str, reversed(location))))
