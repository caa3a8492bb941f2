"""Profiles on disk: a recipe's nodes are measured once for each graph, device, torch and number of threads."""

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

_Both = tuple[Natural, Natural]
_AGAIN = "measure again: polylane probe --profile RECIPE"


class _Stored(pydantic.BaseModel):
    """A profile as a file has it; with what it is a profile of, for people."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    polylane: Literal[1] = 1
    graph: str
    device: str
    torch: str
    threads: int
    samples: tuple[Annotated[int, pydantic.Field(gt=0)], ...]
    nodes: dict[str, tuple[_Both, ...]]
    steps: tuple[_Both, ...]
    update: Natural
    shared: dict[str, tuple[_Both, ...]] = {}
    together: dict[Annotated[int, pydantic.Field(gt=0)], Share] = {}

    @pydantic.model_validator(mode="after")
    def _complete(self) -> _Stored:
        if not self.samples or list(self.samples) != sorted(set(self.samples)):
            raise ValueError("samples must be ascending batch sizes, one at least")
        for name, each in (
            ("steps", self.steps),
            *((f"nodes.{name}", own) for name, own in [*self.nodes.items(), *self.shared.items()]),
        ):
            if len(each) != len(self.samples):
                raise ValueError(f"{name} must have a pair of seconds for each of {len(self.samples)} batch sizes")
        return self


def folder() -> Path:
    """Where profiles are kept: in $POLYLANE_CACHE, or else in the user's own cache."""
    own = os.environ.get("POLYLANE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polylane" if not own else Path(own)
    return base / "profiles"


def path_of(graph: Graph, device: Device, threads: int | None = None) -> Path:
    """The file of a graph's profile on a device.

    Args:
        threads: that a worker computes with on a CPU; default: as this process does.
    """
    key = repr((_of_graph(graph), device.kind, torch.__version__, _threads(device, threads)))
    name = re.sub(r"[^a-z0-9]+", "-", device.kind.lower()).strip("-")
    return folder() / f"{graph.fingerprint}-{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def save_profile(profile: Profile, graph: Graph, device: Device, threads: int | None = None) -> Path:
    """Keep a profile; what was kept of the same graph, device, torch and threads is replaced, whole.

    Raises:
        PolylaneError: it cannot be written.
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
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(stored.model_dump_json(indent=1))
        os.replace(file.name, path)
    except OSError as error:
        raise PolylaneError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def load_profile(graph: Graph, device: Device, threads: int | None = None) -> Profile | None:
    """The profile that was kept of a graph on a device; None where there is none.

    Raises:
        PolylaneError: its file cannot be read, or is none of this graph's; naming the file and the key.
    """
    path = path_of(graph, device, threads)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        raise PolylaneError(f"{path} cannot be read: {error}; {_AGAIN}") from error
    try:
        stored = _Stored.model_validate(json.loads(text))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PolylaneError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}; {_AGAIN}") from error
    except ValueError as error:
        raise PolylaneError(f"{path} is not JSON: {error}; {_AGAIN}") from error
    if set(stored.nodes) != {node.name for node in graph.nodes} or stored.graph != _of_graph(graph):
        raise PolylaneError(f"{path}: nodes are not those of this graph; {_AGAIN}")
    return Profile(stored.samples, stored.nodes, stored.steps, stored.update, stored.shared, stored.together)


def _of_graph(graph: Graph) -> str:
    """The fingerprint, and what times depend on beyond it: dtypes, and which nodes have gradients."""
    told = repr([(node.dtype, node.requires_grad) for node in graph.nodes])
    return f"{graph.fingerprint}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def _threads(device: Device, threads: int | None) -> int:
    """Threads that matter: of a GPU none do."""
    if device.type != "cpu":
        return 1
    return torch.get_num_threads() if threads is None else threads
