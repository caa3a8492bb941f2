"""Plan files: what they say survives a round trip, and one sentence names the key of everything that is wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.fit_to_graph import check_recompute, partition_for, plan_from_partition, with_fingerprint
from polylane.plan.plan import Plan
from polylane.plan.plan_file import dump, load
from polylane.plan.recompute import RecomputeRule
from polylane.plan.spec import Spec, default_microbatches, parse
from tests.plan.plan_files import GRAPH, MESH, PLAN, edited, refusal
from tests.support.synthetic_graphs import chain, graph

# Reading and writing


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        plan_from_partition(Partition(GRAPH, ()), Spec(), 1),
        plan_from_partition(
            Partition(GRAPH, (3,)), Spec(data=3, pipeline=2, schedule="naive", precision="bfloat16"), 7
        ),
        plan_from_partition(Partition(GRAPH, ()), Spec(tensor=4, recompute="budget:2GiB"), 1),
        plan_from_partition(Partition(GRAPH, ()), Spec(recompute={"first": "full", "default": "budget:2GiB"}), 1),
        plan_from_partition(Partition(GRAPH, (3,)), Spec(pipeline=2, sequence=2), 1),
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
    assert [PLAN.stage_and_replica(rank) for rank in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    with pytest.raises(PolylaneError, match="rank 6 is on none"):
        PLAN.stage_and_replica(6)


def test_the_mesh_of_a_stage_is_row_major_with_replicas_outermost() -> None:
    """rank = ((replica * pipeline + stage) * sequence + q) * tensor + t."""
    for replica, stage, q, t in itertools.product(range(2), range(2), range(2), range(3)):
        rank = ((replica * 2 + stage) * 2 + q) * 3 + t
        assert MESH.stage_and_replica(rank) == (stage, replica)
        assert MESH.coordinates(rank) == {"sequence": q, "tensor": t}
        assert MESH.rank_at(stage, replica, {"sequence": q, "tensor": t}) == rank
    assert MESH.stages[1].devices == (*range(6, 12), *range(18, 24))


def test_axes_are_those_with_several_ranks() -> None:
    assert MESH.axes == ("sequence", "tensor") and PLAN.axes == () and PLAN.coordinates(4) == {}
    only = plan_from_partition(Partition(GRAPH, ()), Spec(tensor=3), 1)
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
    (stage,) = plan_from_partition(Partition(GRAPH, ()), Spec(data=2, tensor=2), 1).stages
    turned = PLAN.model_copy(update={"stages": (stage.model_copy(update={"devices": (3, 1, 0, 2)}),)})
    assert [turned.stage_and_replica(rank)[1] for rank in range(4)] == [1, 0, 1, 0]
    assert [turned.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 1, 0]
    assert turned.group(3, ("tensor",)) == (1, 3) and turned.group(3, ("data",)) == (0, 3)
    assert turned.ranks_along(1, "tensor") == (3, 1) and turned.ranks_along(2, "tensor") == (0, 2)
    assert turned.ranks_along(1, "data") == (1, 2) and turned.ranks_along(0, "data") == (3, 0)


def test_one_line_says_all_that_a_line_can() -> None:
    assert parse(PLAN.spec) == Spec(2, 3, schedule="afab", microbatches=4)
    reduced = PLAN.model_copy(update={"precision": "bfloat16"})
    assert parse(reduced.spec) == Spec(2, 3, schedule="afab", microbatches=4, precision="bfloat16")
    assert MESH.spec == "data=2,pipeline=2,sequence=2,tensor=3,schedule=1f1b,microbatches=4"
    assert parse(MESH.spec) == Spec(2, 2, 3, 2, microbatches=4)
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


# Placements


def test_a_placement_on_an_axis_that_there_is_not(tmp_path: Path) -> None:
    plan = plan_from_partition(Partition(GRAPH, ()), Spec(tensor=2), 1)
    for asked, mesh in (("shard(0)", {"data": 1, "tensor": 2}), ("replicate", {"sequence": 1, "tensor": 2})):
        on_stage = {"stages.0.placements": {"w0": {"sequence": asked}}, "stages.0.mesh": mesh}
        says = "stages.0.placements.w0.sequence: the stage splits nothing along sequence: leave it out, or give"
        assert says in refusal(edited(tmp_path, plan, **on_stage))
    with pytest.raises(PolylaneError, match=r"^plan: stages\.0\.placements\.w0\.sequence: the stage splits nothing"):
        partition_for(placed({"w0": {"sequence": "shard(0)"}}, plan=plan), GRAPH)


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


def recomputed(plan: RecomputeRule, *stages: RecomputeRule | None) -> Plan:
    each = (s.model_copy(update={"recompute": own}) for s, own in zip(placed({}, {}).stages, stages, strict=True))
    return placed({}, {}).model_copy(update={"recompute": plan, "stages": tuple(each)})


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            recomputed({"layr1": "full"}, None, None),
            "recompute.layr1: the model runs no operator in a module of this name",
        ),
        (recomputed({"layr1": "full"}, None, None), "; did you mean layer1?"),
        (recomputed("none", None, {"layer1": "full"}), "stages.1.recompute.layer1: it is on stage 0"),
        (
            recomputed({"layer1": "full"}, "none", None),
            "recompute.layer1: it is on stage 0, which says for itself what it recomputes: say it there",
        ),
    ],
)
def test_modules_to_recompute_that_are_not_there(plan: Plan, says: str) -> None:
    with pytest.raises(PolylaneError) as caught:
        check_recompute(plan, [partition_for(plan, GRAPH)])
    assert says in str(caught.value) and str(caught.value).startswith("plan: ")


def test_modules_to_recompute_are_of_the_plan_or_of_a_stage() -> None:
    plan = recomputed({"layer1": "full", "default": "none"}, None, {"layer3": "selective", "default": "full"})
    check_recompute(plan, [partition_for(plan, GRAPH)])
    assert plan.recompute_of(0) == {"layer1": "full", "default": "none"}
    assert plan.recompute_of(1) == {"layer3": "selective", "default": "full"}


def test_placements_of_a_tied_weight_agree() -> None:
    tied = graph([[], [0], [1]], {"e": [0, 2], "w": [1]})
    plan = plan_from_partition(Partition(tied, (2,)), Spec(pipeline=2, tensor=2), 1)
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
        (
            (("layer0", "layer1"), ("layer3", "layer3"), ("layer4", "layer5")),
            "layer3/op on stage 1 needs layer2/op, which no",
        ),
        (
            (("layer0", "layer2"), ("layer2", "layer3"), ("layer4", "layer5")),
            "layer2/op is on stage 0 already: every node",
        ),
        (
            (("layer1", "layer2"), ("layer3", "layer3"), ("layer4", "layer5")),
            "stages: layer1/op on stage 0 needs layer0/op, which no stage",
        ),
        (
            (("layer0", "layer1"), ("layer2", "layer3"), ("layer4", "layer4")),
            "no stage has layer5/op: together they must cover the graph",
        ),
        ((("layer0", "layer1"), ("layer2", "layer1"), ("layer2", "layer5")), "layer1/op comes before layer2/op"),
        (
            (("layer0", "layer1"), ("layer2", "layer5"), ("layer5", "layer5")),
            "stages.2.nodes: layer5/op is on stage 1 already: every node has one stage",
        ),
        (
            (("layer0", "layer9"), ("layer2", "layer3"), ("layer4", "layer5")),
            "no node and no module 'layer9'; did you mean layer5",
        ),
        (
            (("layer0", "layer1"), ("layer2", "layer3"), ("layer4", "loss")),
            "stages.2.nodes: the model has no node and no module 'loss'; this graph's last node is layer5/op",
        ),
        (
            (("embedding", "layer1"), ("layer2", "layer3"), ("layer4", "layer5")),
            "stages.0.nodes: the model has no node and no module 'embedding'; this graph's first node is layer0/op",
        ),
    ],
)
def test_stages_that_do_not_cover_the_graph(nodes: tuple[tuple[str, str], ...], says: str) -> None:
    with pytest.raises(PolylaneError) as caught:
        partition_for(with_nodes(*nodes), GRAPH)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_where_the_graph_ends_is_told_of_ends_alone() -> None:
    plan = with_nodes(("layer0", "middle"), ("layer2", "layer3"), ("layer4", "layer5"))
    with pytest.raises(PolylaneError, match=r"no module 'middle'$"):
        partition_for(plan, GRAPH)
    plan = with_nodes(("layer0", "layer1"), ("layer2", "layer3"), ("layer4", "layer9"))
    with pytest.raises(PolylaneError, match=r"did you mean layer.*; this graph's last node is layer5/op$"):
        partition_for(plan, GRAPH)


def test_a_cut_where_there_must_be_none() -> None:
    together = graph([[], [0], [1], [2]], uncut=[(1, 2)])
    plan = plan_from_partition(Partition(together, (2,)), Spec(pipeline=2), 1)
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


def test_a_plan_without_a_fingerprint_is_for_any_model_that_has_its_nodes(tmp_path: Path) -> None:
    file = edited(tmp_path, graph=None)
    plan = load(file)
    assert plan.graph is None and "graph" not in dump(plan)
    assert partition_for(plan, GRAPH).cuts == partition_for(plan, chain(6, skips=[(0, 4)])).cuts == (2, 4)
    assert with_fingerprint(plan, GRAPH) == PLAN and with_fingerprint(PLAN, chain(5)) == PLAN
    with pytest.raises(PolylaneError) as caught:
        partition_for(plan, chain(5))
    assert str(caught.value).startswith(f"plan {file}: stages.2.nodes: the model has no node and no module 'layer5/op'")


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = edited(tmp_path, MESH, **{"stages.1.placements": {"w9": {"tensor": "shard(0)"}}})
    for wrong, says in ((GRAPH, ": stages.1.placements.w9: the model has no"), (chain(5), " is for another model: ")):
        with pytest.raises(PolylaneError) as caught:
            partition_for(load(file), wrong)
        assert str(caught.value).startswith(f"plan {file}{says}")


def test_thousands_of_devices_in_a_file(tmp_path: Path) -> None:
    plan = plan_from_partition(Partition(GRAPH, (2, 4)), Spec(data=64, pipeline=3, sequence=8, tensor=16), 1)
    (tmp_path / "plan.yaml").write_text(dump(plan))
    assert load(tmp_path / "plan.yaml") == plan and plan.workers == 24_576
