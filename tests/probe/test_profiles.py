"""Profiles on disk: what is kept comes back, for the same graph, device, torch and threads, and for no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polylane.cluster.catalogue import device_presets
from polylane.cluster.device import Device
from polylane.cost.operators.profile import Profile
from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.probe.profiles import folder, load_profile, path_of, save_profile
from tests.support.synthetic_graphs import chain

CPU = Device.model_validate(device_presets()["cpu"])
GRAPH = chain(3)
PROFILE = Profile(
    samples=(2, 8),
    nodes={node.name: ((0.1 * i, 0.2), (0.3, 1 / 3)) for i, node in enumerate(GRAPH.nodes)},
    steps=((0.5, 1e-7), (1.5, 3.25)),
    update_seconds=0.01,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYLANE_CACHE", str(tmp_path))
    return tmp_path


def test_it_comes_back_as_it_was(cache: Path) -> None:
    assert load_profile(GRAPH, CPU) is None
    path = save_profile(PROFILE, GRAPH, CPU)
    assert path.is_relative_to(cache) and path == path_of(GRAPH, CPU)
    assert load_profile(GRAPH, CPU) == PROFILE
    assert list(path.parent.iterdir()) == [path]  # nothing else is left


def test_a_new_one_takes_the_place_of_the_old() -> None:
    save_profile(PROFILE, GRAPH, CPU)
    save_profile(replace(PROFILE, update_seconds=7.0), GRAPH, CPU)
    found = load_profile(GRAPH, CPU)
    assert found is not None and found.update_seconds == 7.0


def other(graph: Graph, **change: Any) -> Graph:
    return replace(graph, nodes=(replace(graph.nodes[0], **change), *graph.nodes[1:]))


def test_others_have_profiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(PROFILE, GRAPH, CPU)
    assert load_profile(chain(4), CPU) is None
    assert load_profile(other(GRAPH, dtype="float64"), CPU) is None
    assert load_profile(other(GRAPH, requires_grad=False), CPU) is None
    assert load_profile(GRAPH, CPU.model_copy(update={"kind": "another"})) is None
    assert load_profile(GRAPH, CPU, threads=torch.get_num_threads() + 1) is None
    monkeypatch.setattr(torch, "__version__", "0.1")
    assert load_profile(GRAPH, CPU) is None


def test_threads_are_of_cpus_alone() -> None:
    gpu = Device.model_validate(device_presets()["h200"])
    save_profile(PROFILE, GRAPH, gpu, threads=3)
    assert load_profile(GRAPH, gpu, threads=5) == PROFILE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": [8, 2]}, "samples must be ascending"),
        ({"samples": []}, "samples must be ascending"),
        ({"samples": [2]}, "steps must have a pair of seconds for each of 1 batch sizes"),
        ({"update": -1.0}, "update"),
        ({"steps": [[0.5, float("nan")], [1.0, 1.0]]}, "steps.0.1"),
        ({"nodes": {"another": [[1.0, 1.0], [1.0, 1.0]]}}, "nodes are not those of this graph"),
        ({"polylane": 2}, "polylane"),
        ({"more": 1}, "more"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_its_key(change: dict[str, Any], said: str) -> None:
    path = save_profile(PROFILE, GRAPH, CPU)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PolylaneError, match=said) as raised:
        load_profile(GRAPH, CPU)
    assert str(path) in str(raised.value) and "polylane probe --profile" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_json_is_refused() -> None:
    path = save_profile(PROFILE, GRAPH, CPU)
    path.write_text(path.read_text()[:40])
    with pytest.raises(PolylaneError, match="is not JSON"):
        load_profile(GRAPH, CPU)


def test_where_nothing_can_be_written(cache: Path) -> None:
    (cache / "profiles").write_text("a file")
    with pytest.raises(PolylaneError, match="cannot be written"):
        save_profile(PROFILE, GRAPH, CPU)


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert folder() == tmp_path / "profiles"
    monkeypatch.delenv("POLYLANE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert folder() == tmp_path / "mine" / "polylane" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache" / "polylane" / "profiles"
