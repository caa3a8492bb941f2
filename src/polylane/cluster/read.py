"""Cluster files: YAML that a person can write -> Cluster, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml

from polylane.cluster.catalogue import device_presets, link_presets
from polylane.cluster.cluster import Cluster, Hosts, Links
from polylane.cluster.device import Device
from polylane.cluster.figures import figures, wanted
from polylane.cluster.link import Link, Positive
from polylane.errors import PolylaneError
from polylane.yaml_file import FileForm, first_error, read, sentence


class _File(pydantic.BaseModel):
    """What a cluster file may say."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    polylane: Literal[1] = 1
    hosts: tuple[Hosts, ...]
    links: Links = Links()
    speeds: dict[int, Positive] = {}


def load(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        PolylaneError: the file cannot be read, or a key is missing, unknown or wrong; one sentence that names both.
    """
    data = read(path)
    try:
        return of_mapping(data)
    except PolylaneError as error:
        raise PolylaneError(f"{path}: {error}") from error


def of_mapping(data: dict[Any, Any]) -> Cluster:
    """The cluster that a file's mapping describes.

    Raises:
        PolylaneError: as :func:`load`, without the file.
    """
    _check_filled(data)
    try:
        file = _File.model_validate(_resolved(data))
    except pydantic.ValidationError as error:
        raise PolylaneError(sentence(first_error(error), _FORM, data)) from error
    return Cluster(file.hosts, file.links, file.speeds)


def dump(cluster: Cluster) -> str:
    """The cluster as YAML; reading it again gives an equal one. What equals a preset is said by its name."""
    data: dict[str, Any] = {"polylane": 1, "hosts": [_hosts(group) for group in cluster.hosts]}
    links = {name: _named(link, link_presets()) for name, link in cluster.links if link is not None}
    if links:
        data["links"] = links
    if cluster.speeds:
        data["speeds"] = dict(cluster.speeds)
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)


def _hosts(group: Hosts) -> dict[str, Any]:
    own = _plain(group.model_dump(exclude_defaults=True, exclude={"device", "link"}))
    data = {"count": group.count, "devices": group.devices, **own}
    data["device"] = _named(group.device, device_presets())
    if group.link is not None:
        data["link"] = _named(group.link, link_presets())
    return data


def _named(given: Device | Link, presets: dict[str, dict[str, Any]]) -> str | dict[str, Any]:
    """A preset's name, or the figures."""
    preset = presets.get(given.kind)
    if preset is not None and type(given).model_validate(preset) == given:
        return given.kind
    return dict(_plain(given.model_dump(exclude_defaults=True)))


def _plain(given: Any) -> Any:
    """A value as YAML has it: dicts and lists."""
    if isinstance(given, Mapping):
        return {key: _plain(value) for key, value in given.items()}
    return [_plain(value) for value in given] if isinstance(given, tuple) else given


def _check_filled(given: object, place: str = "") -> None:
    """A key with nothing behind it is a mistake everywhere."""
    if given is None:
        raise PolylaneError(f"{place} is empty")
    items = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ()
    for key, value in items:
        _check_filled(value, f"{place}.{key}" if place else str(key))


def _resolved(data: dict[Any, Any]) -> dict[Any, Any]:
    """The file's mapping with figures in place of names and units."""
    data, hosts, links = dict(data), data.get("hosts"), data.get("links")
    if isinstance(hosts, list):
        data["hosts"] = [_group(group, f"hosts.{index}") for index, group in enumerate(hosts)]
    if isinstance(links, dict):
        data["links"] = {name: figures(link, link_presets(), f"links.{name}") for name, link in links.items()}
    return data


def _group(group: object, place: str) -> object:
    if not isinstance(group, dict):
        return group
    presets = {"device": device_presets(), "link": link_presets()}
    return {key: figures(v, presets[key], f"{place}.{key}") if key in presets else v for key, v in group.items()}


def _keys(place: Sequence[int | str]) -> list[str]:
    """The keys of a mapping in a cluster file, by its place."""
    path = [str(part) for part in place if isinstance(part, str)]
    models: dict[tuple[str, ...], type[pydantic.BaseModel]] = {
        (): _File,
        ("hosts",): Hosts,
        ("hosts", "device"): Device,
        ("hosts", "link"): Link,
        ("links",): Links,
    }
    return list(models.get(tuple(path), Link).model_fields)


_FORM = FileForm("a cluster", _keys, lambda place: wanted(*map(str, reversed(place))))
