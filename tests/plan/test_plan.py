"""Plan files: what they say survives a round trip, and one sentence names the key of everything that is wrong."""

from __future__ import annotations

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


def edited(path: Path, **changes: Any) -> Path:
    """A plan file with some of its keys changed; "stages.1.devices" reaches inside, None removes."""
    data = yaml.safe_load(dump(PLAN))
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


def test_neighbouring_ranks_are_neighbouring_stages() -> None:
    assert [stage.devices for stage in PLAN.stages] == [(0, 3), (1, 4), (2, 5)]
    assert [PLAN.place(rank) for rank in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    with pytest.raises(PolylaneError, match="rank 6 is on none"):
        PLAN.place(6)


def test_one_line_says_all_that_a_line_can() -> None:
    assert parse(PLAN.spec) == Spec(2, 3, "afab", 4)
    reduced = PLAN.model_copy(update={"precision": "bfloat16"})
    assert parse(reduced.spec) == Spec(2, 3, "afab", 4, "bfloat16")


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
        ({"stages.0.mesh": {"data": 2, "tensor": 2}}, "stages.0.mesh.tensor"),
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
