"""Profile store: measured profiles on disk, one for each graph, device, torch version and number of threads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch

from polylane.cluster.device import Device
from polylane.cluster.link import Natural, Share
from polylane.cost.operators.profile import Profile
from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.yaml_file import Count, StrictMapping

_Both = tuple[Natural, Natural]
_AGAIN = "measure again: polylane probe --profile RECIPE"


class _Stored(StrictMapping):
    """File format of a profile; graph, device, torch and threads are there for human readers."""

    polylane: Literal[1] = 1
    graph: str
    device: str
    torch: str
    threads: int
    samples: tuple[Count, ...]
    nodes: dict[str, tuple[_Both, ...]]
    steps: tuple[_Both, ...]
    update: Natural
    shared: dict[str, tuple[_Both, ...]] = pydantic.Field(default={})
    together: dict[Annotated[int, pydantic.Field(gt=0)], Share] = pydantic.Field(default={})
    disturbed: str = ""

    @pydantic.model_validator(mode="after")
    def _complete(self) -> _Stored:
        if not self.samples or list(self.samples) != sorted(set(self.samples)):
            raise ValueError("samples must be ascending batch sizes, one at least")
        for name, pairs in (
            ("steps", self.steps),
            *((f"nodes.{name}", pairs) for name, pairs in [*self.nodes.items(), *self.shared.items()]),
        ):
            if len(pairs) != len(self.samples):
                raise ValueError(f"{name} must have a pair of seconds for each of {len(self.samples)} batch sizes")
        return self


def folder() -> Path:
    """Return the folder of the profiles: in $POLYLANE_CACHE, or else in the user's cache."""
    cache = os.environ.get("POLYLANE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polylane" if not cache else Path(cache)
    return base / "profiles"


def path_of(graph: Graph, device: Device, threads: int | None = None) -> Path:
    """Return the path of a graph's profile on a device.

    Args:
        graph: the captured graph, identified by its fingerprint.
        device: device of the profile; only its kind counts.
        threads: number of threads of a worker on a CPU; default: this process's.
    """
    key = repr((_of_graph(graph), device.kind, torch.__version__, _threads(device, threads)))
    name = re.sub(r"[^a-z0-9]+", "-", device.kind.lower()).strip("-")
    return folder() / f"{graph.fingerprint}-{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def save_profile(profile: Profile, graph: Graph, device: Device, threads: int | None = None) -> Path:
    """Save a profile, atomically replacing that of the same graph, device, torch version and threads.

    Raises:
        PolylaneError: the file cannot be written.
    """
    path = path_of(graph, device, threads)
    stored = _Stored(
        graph=_of_graph(graph),
        device=device.kind,
        torch=torch.__version__,
        threads=_threads(device, threads),
        samples=profile.samples,
        nodes=dict(profile.nodes),
        steps=profile.steps,
        update=profile.update_seconds,
        shared=dict(profile.shared),
        together=dict(profile.host_contention),
        disturbed=profile.disturbance,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside the target and renamed: a reader never sees half a file.
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(stored.model_dump_json(indent=1))
        os.replace(file.name, path)
    except OSError as error:
        raise PolylaneError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def load_profile(graph: Graph, device: Device, threads: int | None = None) -> Profile | None:
    """Load the profile of a graph on a device; None if there is none.

    Raises:
        PolylaneError: the file cannot be read or is invalid (naming the key), or belongs to another graph.
    """
    path = path_of(graph, device, threads)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:  # not measured yet
        return None
    except (OSError, UnicodeError) as error:
        raise PolylaneError(f"{path} cannot be read: {error}; {_AGAIN}") from error
    try:
        stored = _Stored.model_validate(json.loads(text))
    except pydantic.ValidationError as error:
        details = error.errors()[0]
        location = ".".join(map(str, details["loc"])) or "the file"
        raise PolylaneError(f"{path}: {location}: {details['msg'].removeprefix('Value error, ')}; {_AGAIN}") from error
    except ValueError as error:
        raise PolylaneError(f"{path} is not JSON: {error}; {_AGAIN}") from error
    if set(stored.nodes) != {node.name for node in graph.nodes} or stored.graph != _of_graph(graph):
        raise PolylaneError(f"{path}: nodes are not those of this graph; {_AGAIN}")
    shared, contention = stored.shared, stored.together
    return Profile(stored.samples, stored.nodes, stored.steps, stored.update, shared, contention, stored.disturbed)


def _of_graph(graph: Graph) -> str:
    """Return the fingerprint with a hash of dtypes and gradients, on which times depend as well."""
    description = repr([(node.dtype, node.requires_grad) for node in graph.nodes])
    return f"{graph.fingerprint}-{hashlib.sha256(description.encode()).hexdigest()[:8]}"


def _threads(device: Device, threads: int | None) -> int:
    """Return the number of threads that identifies a profile: 1 for a GPU, whose times do not depend on it."""
    if device.type != "cpu":
        return 1
    return torch.get_num_threads() if threads is None else threads
