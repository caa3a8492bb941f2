"""Cluster in one line: ``8:h100-80g``, ``16x8:a100-80g,hosts=roce-200``, ``2x4x8:a100-80g,sites=internet-1g``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from polylane.cluster.catalogue import device_presets, usual_links
from polylane.cluster.cluster import Cluster
from polylane.cluster.cluster_file import from_mapping, load
from polylane.errors import PolylaneError, format_value, suggest_name
from polylane.settings import split_pairs

_FORM = "[SITESx]HOSTSxDEVICES:DEVICE, as in 16x8:a100-80g, or a cluster file ending in .yaml"
_HEAD = re.compile(r"(?:(?:([0-9]+)\s*x\s*)?([0-9]+)\s*x\s*)?([0-9]+)\s*:\s*(\S+)")

# The keys that may follow, and their place in a cluster file.
_KEYS = {
    "link": "hosts.0.link",
    "hosts": "links.hosts",
    "sites": "links.sites",
    "cores": "hosts.0.cores",
    "speed": "hosts.0.speed",
    "price": "hosts.0.price",
}

# Most devices that a cluster may have: ten times the largest machines.
MOST = 2**20


def load_or_parse(text: str) -> Cluster:
    """Read the cluster that a user names: a file, or one line.

    Raises:
        PolylaneError: a file or line that cannot be read; it names the key at fault.
    """
    path = Path(text)
    return load(path) if path.suffix in (".yaml", ".yml") or os.path.isfile(path) else parse(text)


def parse(text: str) -> Cluster:
    """Read a cluster in one line; links that are not given are the usual ones of such devices.

    Raises:
        PolylaneError: a line that is wrong; it names the key at fault and what it may be.
    """
    try:
        return _parse_line(text)
    except PolylaneError as error:
        raise PolylaneError(f"cluster {format_value(text)}: {error}") from None


def _parse_line(text: str) -> Cluster:
    head, *items = (piece.strip() for piece in text.split(","))
    match = _HEAD.fullmatch(head)
    if match is None:
        raise PolylaneError(f"{format_value(head)} is not of the form {_FORM}")
    device, keys = match[4], split_pairs(items, list(_KEYS), "hosts=ethernet-25g")
    fields = (("sites", match[1] or "1"), ("hosts", match[2] or "1"), ("devices", match[3]))
    sites, hosts, devices = (_parse_count(name, digits) for name, digits in fields)
    if sites * hosts * devices > MOST:
        site = f"{hosts} hosts of {devices} devices"
        description = site if sites == 1 else f"{sites} sites of {site}"
        raise PolylaneError(f"{description} are more than {MOST:,} devices, the most there can be")
    if device not in device_presets():
        choices = f"known are {', '.join(device_presets())}{suggest_name(device, list(device_presets()))}"
        raise PolylaneError(f"there is no device {format_value(device)}, {choices}")
    # Inside a host and between hosts there are usual links; between sites there are none to assume.
    for key, linked in (("link", devices), ("hosts", hosts)):
        if linked > 1 and key not in keys:
            keys[key] = _usual_link(device, key)
    if sites > 1 and "sites" not in keys:
        raise PolylaneError("sites is missing: say what links the sites, as in sites=internet-1g")
    links = {key: keys.pop(key) for key in ("hosts", "sites") if key in keys}
    figures = {key: _parse_number(key, value) for key, value in keys.items()}
    group = {"count": hosts, "devices": devices, "device": device, **figures}
    names = [f"site{number}" for number in range(sites)] if sites > 1 else [""]
    return _build_cluster({"hosts": [{**group, "site": name} for name in names], "links": links})


def _build_cluster(data: dict[str, Any]) -> Cluster:
    """Build the cluster; errors then name the line's keys, not a file's."""
    try:
        return from_mapping(data)
    except PolylaneError as error:
        text = str(error)
        key = next((key for key, location in _KEYS.items() if text.startswith(location)), None)
        raise PolylaneError(text if key is None else key + text[len(_KEYS[key]) :]) from None


def _usual_link(device: str, key: str) -> str:
    """Return the preset of the link that such devices usually have."""
    if device not in usual_links():
        endpoints = "the devices of a host" if key == "link" else "the hosts"
        raise PolylaneError(f"{key} is missing: say what links {endpoints}, as in {key}=ethernet-10g")
    return usual_links()[device][key]


def _parse_count(name: str, digits: str) -> int:
    if not digits.strip("0") or len(digits.lstrip("0")) > len(str(MOST)):
        raise PolylaneError(f"{name} must be from 1 to {MOST:,}, not {format_value(digits)}")
    return int(digits)


def _parse_number(key: str, value: str) -> object:
    """Parse a count or a figure into what a YAML file would have."""
    if key == "cores":
        return int(value) if value.isascii() and value.isdecimal() else value
    try:
        return value if key == "link" else float(value)
    except ValueError:
        return value
