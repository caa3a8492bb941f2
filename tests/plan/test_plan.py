"""Plan files: what they say survives a round trip, and one sentence names the key of everything that is wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan import plan as plans
from polylane.plan.plan import Plan, default_microbatches, dump, from_partition, load, partition_for
from polylane.plan.spec import Spec, parse
from synthetic import chain, graph

GRAPH = chain(6)
PLAN = from_partition(Partition(GRAPH, (2, 4)), Spec(data=2, pipeline=3, schedule="afab"), microbatches=4)
MESH = from_partition(Partition(GRAPH, (2,)), Spec(data=2, pipeline=2, tensor=3, sequence=2), microbatches=4)


def edited(path: Path, plan: Plan = PLAN, **changes: Any) -> Path:
    """A plan file with some of its keys changed; "stages.1.devices" reaches inside, None removes."""
    data = yaml.safe_load(dump(plan))
    for key, value in changes.items():
        inside: Any = data
        *way, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        for part in way:
            inside = inside[part]
        if value is None:
            del inside[last]
        else:
            inside[last] = value
    file = path / "plan.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def refusal(file: Path) -> str:
    with pytest.raises(PolylaneError) as caught:
        load(file)
    message = str(caught.value)
    assert message.startswith(f"plan {file}") and "\n" not in message
    return message


# Reading and writing


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        from_partition(Partition(GRAPH, ()), Spec(), 1),
        from_partition(Partition(GRAPH, (3,)), Spec(data=3, pipeline=2, schedule="naive", precision="bfloat16"), 7),
        from_partition(Partition(GRAPH, ()), Spec(tensor=4), 1),
        from_partition(Partition(GRAPH, (3,)), Spec(pipeline=2, sequence=2), 1),
        MESH,
    ],
    ids=lambda plan: plan.spec,
)
def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(dump(plan))
    assert load(tmp_path / "plan.yaml") == plan


def test_a_file_reads_as_in_the_documentation() -> None:
    lines = dump(PLAN).splitlines()
    assert lines[0] == "polylane: 1"
    assert "- nodes: [layer0/op, layer1/op]" in lines
    assert "  devices: [0, 3]" in lines
    assert "  mesh: {data: 2}" in lines
    assert "schedule: afab" in lines and "microbatches: 4" in lines
    assert not any("placements" in line for line in lines)
    assert "  mesh: {data: 2, sequence: 2, tensor: 3}" in dump(MESH).splitlines()


def test_neighbouring_ranks_are_neighbouring_stages() -> None:
    assert [stage.devices for stage in PLAN.stages] == [(0, 3), (1, 4), (2, 5)]
    assert [PLAN.place(rank) for rank in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    with pytest.raises(PolylaneError, match="rank 6 is on none"):
        PLAN.place(6)


def test_the_mesh_of_a_stage_is_row_major_with_replicas_outermost() -> None:
    """rank = ((replica * pipeline + stage) * sequence + q) * tensor + t."""
    for replica, stage, q, t in itertools.product(range(2), range(2), range(2), range(3)):
        rank = ((replica * 2 + stage) * 2 + q) * 3 + t
        assert MESH.place(rank) == (stage, replica)
        assert MESH.coordinates(rank) == {"sequence": q, "tensor": t}
        assert MESH.rank_at(stage, replica, {"sequence": q, "tensor": t}) == rank
    assert MESH.stages[1].devices == (*range(6, 12), *range(18, 24))


def test_axes_are_those_with_several_ranks() -> None:
    assert MESH.axes == ("sequence", "tensor") and PLAN.axes == () and PLAN.coordinates(4) == {}
    only = from_partition(Partition(GRAPH, ()), Spec(tensor=3), 1)
    assert only.axes == ("tensor",) and only.coordinates(2) == {"tensor": 2}
    assert (MESH.degree("data"), MESH.degree("sequence"), MESH.degree("tensor")) == (2, 2, 3)
    assert (only.data, only.sequence, only.tensor, only.pipeline, only.workers) == (1, 1, 3, 1, 3)


def test_groups_differ_along_their_axes_only() -> None:
    assert MESH.group(7, ("tensor",)) == (6, 7, 8)
    assert MESH.group(7, ("sequence",)) == (7, 10)
    assert MESH.group(7, ("data",)) == (7, 19)
    assert MESH.group(19, {"data", "sequence"}) == (7, 10, 19, 22)
    assert MESH.group(7, ()) == (7,)
    assert MESH.group(0, ("data", "sequence", "tensor")) == tuple(sorted(MESH.stages[0].devices))
    assert MESH.peers(7, 0) == (1,) and [PLAN.peers(4, s) for s in range(3)] == [(3,), (4,), (5,)]


def test_devices_in_any_order() -> None:
    """Whoever writes a plan may name any ranks: the order of the list is what counts."""
    (stage,) = from_partition(Partition(GRAPH, ()), Spec(data=2, tensor=2), 1).stages
    turned = PLAN.model_copy(update={"stages": (stage.model_copy(update={"devices": (3, 1, 0, 2)}),)})
    assert [turned.place(rank)[1] for rank in range(4)] == [1, 0, 1, 0]
    assert [turned.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 1, 0]
    assert turned.group(3, ("tensor",)) == (1, 3) and turned.group(3, ("data",)) == (0, 3)
    assert turned.along(1, "tensor") == (3, 1) and turned.along(2, "tensor") == (0, 2)
    assert turned.along(1, "data") == (1, 2) and turned.along(0, "data") == (3, 0)


def test_one_line_says_all_that_a_line_can() -> None:
    assert parse(PLAN.spec) == Spec(2, 3, "afab", 4)
    reduced = PLAN.model_copy(update={"precision": "bfloat16"})
    assert parse(reduced.spec) == Spec(2, 3, "afab", 4, "bfloat16")
    assert MESH.spec == "data=2,pipeline=2,sequence=2,tensor=3,schedule=1f1b,microbatches=4"
    assert parse(MESH.spec) == Spec(2, 2, "1f1b", 4, tensor=3, sequence=2)
    assert PLAN.spec == "data=2,pipeline=3,schedule=afab,microbatches=4"


def test_workers_are_all_devices() -> None:
    assert (PLAN.workers, PLAN.data, PLAN.pipeline) == (6, 2, 3)


@pytest.mark.parametrize(
    ("spec", "batch", "expected"),
    [
        ("data=4", 64, 1),  # nothing to fill
        ("pipeline=2", 64, 8),
        ("pipeline=4", 64, 16),
        ("pipeline=4", 6, 6),  # one sample each
        ("data=2,pipeline=2", 6, 3),
        ("data=8,pipeline=2", 6, 1),
        ("pipeline=2,microbatches=3", 64, 3),
    ],
)
def test_default_microbatches(spec: str, batch: int, expected: int) -> None:
    assert default_microbatches(parse(spec), batch) == expected


# What is wrong with a file


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stagse": []}, "stagse: Extra inputs are not permitted"),
        ({"stages": None}, "stages: Field required"),
        ({"stages": []}, "stages: there must be at least one"),
        ({"graph": None}, "graph: Field required"),
        ({"graph.nodes": "many"}, "graph.nodes: Input should be a valid integer"),
        ({"polylane": 2}, "polylane: 2 is a form that this version cannot read"),
        ({"schedule": "gpipe"}, "schedule: Input should be 'naive', 'afab' or '1f1b'"),
        ({"microbatches": 0}, "microbatches: Input should be greater than 0"),
        ({"precision": "float16"}, "precision: Input should be"),
        ({"sync": {"kind": "gossip"}}, "sync.kind: Input should be 'all_reduce'"),
        ({"stages.1.nodes": ["layer2/op"]}, "stages.1.nodes.1: Field required"),
        ({"stages.0.mesh": {"data": 2, "tensor": 2}}, "stages.0: 2 devices for a mesh of data=2, tensor=2"),
        ({"stages.0.mesh": {"data": 2, "tensr": 2}}, "stages.0.mesh.tensr: Input should be"),
        ({"stages.0.mesh.tensor": 0}, "stages.0.mesh.tensor: Input should be greater than 0"),
        ({"stages.1.mesh": {"tensor": 2}}, "stages.1.mesh: data=1 beside data=2 on stage 0: all stages must have"),
        ({"stages.2.mesh": {"data": 1, "sequence": 2}}, "stages.2.mesh: data=1 beside data=2"),
        ({"stages.1.mesh": {"data": 3}}, "stages.1: 2 devices for a mesh of data=3"),
        ({"stages.1.devices": [1], "stages.1.mesh": {"data": 1}}, "stages.1.mesh: data=1 beside data=2 on stage 0"),
        ({"stages.1.devices": [0, 4]}, "device 0 is on stages 0 and 1"),
        ({"stages.2.devices": [2, 9]}, "devices must be numbered 0 to 5"),
        ({"stages.0.devices": [], "stages.0.mesh": {"data": 0}}, "stages.0.mesh.data: Input should be greater than 0"),
    ],
)
def test_a_wrong_file(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in refusal(edited(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: [", "is not YAML"),
        ("\x00", "is not YAML"),
        ("", "is not a mapping"),
        ("- 1", "is not a mapping"),
        ("data=2,pipeline=2", "is not a mapping"),
    ],
)
def test_no_plan_at_all(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    assert says in refusal(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "plan.yaml")
    assert "Is a directory" in refusal(tmp_path)


# Placements


def placed(*stages: dict[str, dict[str, str]], plan: Plan = MESH) -> Plan:
    copies = [s.model_copy(update={"placements": p}) for s, p in zip(plan.stages, stages, strict=True)]
    return plan.model_copy(update={"stages": tuple(copies)})


def test_placements_survive_a_round_trip(tmp_path: Path) -> None:
    asked = {"w0": {"tensor": "shard(1)", "sequence": "replicate"}, "layer1/op": {"tensor": "partial"}}
    plan = placed(asked, {"w5": {"tensor": "shard(0)"}})
    (tmp_path / "plan.yaml").write_text(dump(plan))
    assert load(tmp_path / "plan.yaml") == plan
    assert plan.pins("tensor") == {"w0": "shard(1)", "layer1/op": "partial", "w5": "shard(0)"}
    assert plan.pins("sequence") == {"w0": "replicate"}
    assert partition_for(plan, GRAPH) == Partition(GRAPH, (2,))


@pytest.mark.parametrize(
    ("placements", "says"),
    [
        ({"a.b": {"tensor": "shart(0)"}}, "a.b.tensor: 'shart(0)' is not replicate, shard(<dim>) or partial"),
        ({"w0": {"tensor": "shard(-1)"}}, "w0.tensor: 'shard(-1)' is not replicate, shard(<dim>) or partial"),
        ({"w0": {"tensor": "Shard(0)"}}, "w0.tensor: 'Shard(0)' is not replicate"),
        ({"w0": {"tensor": "shard(0) "}}, "w0.tensor: 'shard(0) ' is not replicate"),
        ({"w0": {"tensor": 0}}, "w0.tensor: 0 is not replicate, shard(<dim>) or partial"),
        ({"w0": {"tensr": "replicate"}}, "w0.tensr: Input should be 'sequence' or 'tensor'"),
        ({"w0": {"data": "replicate"}}, "w0.data: Input should be 'sequence' or 'tensor'"),
        ({"w0": "shard(0)"}, "w0: Input should be a valid dictionary"),
    ],
)
def test_a_placement_that_is_none(placements: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = edited(tmp_path, MESH, **{"stages.0.placements": placements})
    assert refusal(file).startswith(f"plan {file}: stages.0.placements.{says}")


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            ({"w9": {"tensor": "shard(0)"}}, {}),
            "stages.0.placements.w9: the model has no parameter and no node of this",
        ),
        (({"layer1": {"tensor": "shard(0)"}}, {}), "no node of this name; did you mean layer1/op?"),
        (({}, {"w1": {"tensor": "shard(0)"}}), "stages.1.placements.w1: it is on stage 0"),
        (({"layer3/op": {"tensor": "partial"}}, {}), "stages.0.placements.layer3/op: it is on stage 1"),
        (({"w1": {"sequence": "shard(2)"}}, {}), "w1.sequence: shard(2), but its dimensions are 0, 1"),
    ],
)
def test_placements_of_what_is_not_there(stages: tuple[Any, ...], says: str) -> None:
    with pytest.raises(PolylaneError) as caught:
        partition_for(placed(*stages), GRAPH)
    assert says in str(caught.value) and str(caught.value).startswith("plan: ")


def test_placements_of_a_tied_weight_agree() -> None:
    tied = graph([[], [0], [1]], {"e": [0, 2], "w": [1]})
    plan = from_partition(Partition(tied, (2,)), Spec(pipeline=2, tensor=2), 1)
    partition_for(placed({"e": {"tensor": "shard(0)"}}, {"e": {"tensor": "shard(0)"}}, plan=plan), tied)
    with pytest.raises(PolylaneError, match=r"stages\.1\.placements\.e\.tensor: replicate, but stage 0 has shard\(0\)"):
        partition_for(placed({"e": {"tensor": "shard(0)"}}, {"e": {"tensor": "replicate"}}, plan=plan), tied)
    named = replace(tied, tied={"head": "e"})
    with pytest.raises(PolylaneError, match=r"placements\.head: it is tied to e"):
        partition_for(placed({"head": {"tensor": "shard(0)"}}, {}, plan=plan), named)


# Plans and graphs


def test_the_cuts_come_back() -> None:
    assert partition_for(PLAN, GRAPH) == Partition(GRAPH, (2, 4))


def with_nodes(*nodes: tuple[str, str]) -> Plan:
    stages = tuple(s.model_copy(update={"nodes": pair}) for s, pair in zip(PLAN.stages, nodes, strict=True))
    return PLAN.model_copy(update={"stages": stages})


def test_first_and_last_by_module_path() -> None:
    plan = with_nodes(("layer0", "layer0"), ("layer1", "layer4"), ("layer5", "layer5"))
    assert partition_for(plan, GRAPH).cuts == (1, 5)
    plan = with_nodes(("layer0/op", "layer2"), ("layer3", "layer4/op"), ("layer5", "layer5"))
    assert partition_for(plan, GRAPH).cuts == (3, 5)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ((("layer0", "layer1"), ("layer3", "layer3"), ("layer4", "layer5")), "stages.1.nodes: stages must follow"),
        ((("layer0", "layer2"), ("layer2", "layer3"), ("layer4", "layer5")), "stages.1.nodes: stages must follow"),
        ((("layer1", "layer2"), ("layer3", "layer3"), ("layer4", "layer5")), "stages.0.nodes: stages must follow"),
        ((("layer0", "layer1"), ("layer2", "layer3"), ("layer4", "layer4")), "must end at layer5/op"),
        ((("layer0", "layer1"), ("layer2", "layer1"), ("layer2", "layer5")), "stages.1.nodes"),
        ((("layer0", "layer9"), ("layer2", "layer3"), ("layer4", "layer5")), "no node and no module 'layer9'"),
    ],
)
def test_stages_that_do_not_cover_the_graph(nodes: tuple[tuple[str, str], ...], says: str) -> None:
    with pytest.raises(PolylaneError) as caught:
        partition_for(with_nodes(*nodes), GRAPH)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_cut_where_there_must_be_none() -> None:
    together = graph([[], [0], [1], [2]], uncut=[(1, 2)])
    plan = from_partition(Partition(together, (2,)), Spec(pipeline=2), 1)
    with pytest.raises(PolylaneError, match=r"stages\.1\.nodes: the graph cannot be cut before layer2/op"):
        partition_for(plan, together)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (chain(5), "it names 'layer5/op', which this model does not have"),
        (graph([[i - 1] if i else [] for i in range(6)], {"w0": [0]}), "it has 6 parameter tensors, this model 1"),
        (chain(7), "it has 6 parameter tensors, this model 7"),
        (
            graph([[i - 1] if i else [] for i in range(7)], {f"w{i}": [i] for i in range(6)}),
            "it has 6 nodes, this model 7",
        ),
        (chain(6, skips=[(0, 4)]), "the shapes or the wiring differ (fingerprint"),
    ],
)
def test_a_plan_for_another_model(other: Any, difference: str) -> None:
    with pytest.raises(PolylaneError) as caught:
        partition_for(PLAN, other)
    assert str(caught.value).startswith("the plan is for another model: ") and difference in str(caught.value)


def test_a_summary_is_plain_data() -> None:
    told = plans.summary(PLAN)
    assert told["workers"] == 6 and told["schedule"] == "afab" and yaml.safe_dump(told)
