"""Plan files: one sentence names the file and the key of everything that is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.plan_files import MESH, edited, refusal


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"stagse": []},
            "stagse is not a key of a plan; known there are polylane, graph, stages, schedule, vertical_sync, "
            "order, microbatches, replicas, sync, precision, recompute, per_sample, compile, shares",
        ),
        ({"stagse": []}, "; did you mean stages?"),
        ({"stages.0.node": ["a", "b"]}, "stages.0.node is not a key of a plan; known there are nodes, devices, mesh,"),
        ({"stages": None}, "stages is missing"),
        (
            {"recompute": "some"},
            "recompute must be none, selective, full, or a budget such as budget:200MB, or one of these for each "
            "module, as in {blocks.3: full}, not 'some'",
        ),
        ({"recompute": {}}, "or one of these for each module, as in {blocks.3: full}, not {}"),
        (
            {"recompute": {"a.b": "half"}},
            "recompute: a.b must be none, selective, full, or a budget such as budget:200MB, not 'half'",
        ),
        ({"recompute": {3: "full"}}, "recompute: 3 must be a name, in quotes where it reads like a number ('3')"),
        ({"stages.1.recompute": {"a": None}}, "stages.1.recompute: a must be none, selective, full, or a budget"),
        ({"stages.1.recompute": "budget:0MB"}, "stages.1.recompute must be none, selective, full, or a budget"),
        ({"stages": 3}, "stages must be a list, not 3"),
        ({"stages": []}, "stages: there must be at least one"),
        ({"graph.id": None}, "graph.id is missing"),
        ({"graph.nodes": "many"}, "graph.nodes must be a whole number, not 'many'"),
        ({"polylane": 2}, "polylane: 2 is a form that this version cannot read"),
        (
            {"schedule": "gpipe"},
            "schedule must be naive, afab, 1f1b, interleaved, zb-h1, zb-h2, zb-v, pipedream, pipedream-2bw or auto, "
            "not 'gpipe'",
        ),
        ({"microbatches": 0}, "microbatches must be at least 1, not 0"),
        ({"microbatches": 2.5}, "microbatches must be a whole number, not 2.5"),
        ({"microbatches": True}, "microbatches must be a whole number, not True"),
        ({"precision": "float8"}, "precision must be float32, bfloat16 or float16, not 'float8'"),
        ({"sync": {"kind": "gossip"}}, "sync.kind must be all_reduce or parameter_server, not 'gossip'"),
        ({"sync": "all_reduce"}, "sync must be a mapping of keys and values, not 'all_reduce'"),
        ({"stages.1": "layer2"}, "stages.1 must be a mapping of keys and values, not 'layer2'"),
        (
            {"stages.1.nodes": ["layer2/op"]},
            "stages.1.nodes: there must be two names, the first node or module and the",
        ),
        ({"stages.1.nodes": ["a", "b", "c"]}, "the last (of every piece), not 3"),
        ({"stages.1.nodes": "layer2/op"}, "stages.1.nodes must be a list, not 'layer2/op'"),
        ({"stages.1.nodes": [0, 2]}, "stages.1.nodes.0 must be a name, in quotes where it reads like a number ('0'), "),
        ({"stages.0.devices": [0, "x"]}, "stages.0.devices.1 must be a whole number, not 'x'"),
        ({"stages.0.devices": "x" * 900}, f"stages.0.devices must be a list, not '{'x' * 59}…"),
        ({"stages.0.mesh": {"data": 2, "tensor": 2}}, "stages.0: 2 devices for a mesh of data=2, tensor=2"),
        (
            {"stages.0.mesh": {"data": 2, "tensr": 2}},
            "stages.0.mesh.tensr is not a key of a plan; known there are data, sequence, tensor; did you mean tensor?",
        ),
        ({"stages.0.mesh.tensor": 0}, "stages.0.mesh.tensor must be at least 1, not 0"),
        ({"stages.1.mesh": {"tensor": 3}}, "stages.1: 2 devices for a mesh of tensor=3"),
        ({"stages.1.mesh": {}}, "stages.1: 2 devices for a mesh of data=1"),
        ({"stages.1.mesh": {"data": 3}}, "stages.1: 2 devices for a mesh of data=3"),
        (
            {"stages.1.devices": [1], "stages.1.mesh": {"data": 1}},
            "devices must be numbered from 0 to 4: 5 is there, but 4 is not",
        ),
        ({"stages.1.devices": [0, 4]}, "device 0 is on stages 0 and 1: every worker has one place"),
        ({"stages.0.devices": [0, 0]}, "stages.0.devices names 0 twice: every worker has one place"),
        ({"stages.2.devices": [2, 9]}, "devices must be numbered from 0 to 5: 9 is there, but 5 is not"),
        ({"stages.2.devices": [2, -1]}, "devices must be numbered from 0 to 5: -1 is there, but 5 is not"),
        ({"stages.0.devices": [], "stages.0.mesh": {"data": 0}}, "stages.0.mesh.data must be at least 1, not 0"),
    ],
)
def test_a_wrong_file(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in refusal(edited(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: [", "is not YAML"),
        ("\x00", "is not YAML"),
        ("", "there is nothing in it"),
        ("- 1", "is not a mapping"),
        ("data=2,pipeline=2", "is not a mapping"),
        ("1: 2", "1 is not a key of a plan; known there are polylane, graph"),
        ("stages:", "stages must be a list, not empty"),
        (
            "stags: []",
            "stags is not a key of a plan; known there are polylane, graph, stages, schedule, vertical_sync, "
            "order, microbatches, ",
        ),
        ("when: 2024-13-45", "when is not a key of a plan"),
        ("\xff", "is not YAML"),
        ("polylane: 1\nmicrobatches: 2\nmicrobatches: 4", "microbatches is there twice, on lines 2 and 3: keep one"),
        ("stages:\n- {devices: [0], devices: [1]}", "devices is there twice, on lines 2 and 2: keep one"),
    ],
)
def test_no_plan_at_all(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text, encoding="latin-1")
    assert says in refusal(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "plan.yaml")
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("placements", "says"),
    [
        ({"a.b": {"tensor": "shart(0)"}}, "a.b.tensor: 'shart(0)' is not replicate, shard(<dim>) or partial"),
        ({"w0": {"tensor": "shard(-1)"}}, "w0.tensor: 'shard(-1)' is not replicate, shard(<dim>) or partial"),
        ({"w0": {"tensor": "Shard(0)"}}, "w0.tensor: 'Shard(0)' is not replicate"),
        ({"w0": {"tensor": "shard(0) "}}, "w0.tensor: 'shard(0) ' is not replicate"),
        ({"w0": {"tensor": 0}}, "w0.tensor: 0 is not replicate, shard(<dim>) or partial"),
        (
            {"w0": {"tensr": "replicate"}},
            "w0.tensr is not a key of a plan; known there are sequence, tensor; did you mean tensor?",
        ),
        ({"w0": {"data": "replicate"}}, "w0.data is not a key of a plan; known there are sequence, tensor"),
        ({0: {"tensor": "shard(0)"}}, "0 must be a name, in quotes where it reads like a number ('0'), not 0"),
        ({"w0": "shard(0)"}, "w0 must be a mapping of keys and values, not 'shard(0)'"),
    ],
)
def test_a_placement_that_is_none(placements: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = edited(tmp_path, MESH, **{"stages.0.placements": placements})
    assert refusal(file).startswith(f"plan {file}: stages.0.placements.{says}")
