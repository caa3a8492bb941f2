"""Layouts of stages with meshes of their own: between those with as many replicas each talks to its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polylane.graph.capture.capture import capture
from polylane.graph.partition import balance_stages
from polylane.placement.placement import REPLICATE, Shard
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.spec import parse
from polylane.sharding.layout import Layout
from polylane.sharding.stage_layouts import StageLayouts, check_peers, choose_layouts
from tests.support import models


def test_what_replicas_hold_of_a_value_is_the_same_on_stages_with_as_many() -> None:
    case = models.towers()
    graph = capture(case.model(), case.loss, case.batch(6, 0))
    spec = parse("[data=2 | data=2,tensor=2]")
    partition = balance_stages(graph, 2, [1.0] * len(graph.nodes))
    plan = plan_from_partition(partition, spec, 1)
    made = choose_layouts(partition, plan, 6, sampled=(True, True))
    first, second = made[0], made[1]
    assert first is not None and second is not None and tuple(second.splits) == ("data", "tensor")
    value = partition.crossings[0].value
    assert isinstance(second.state(value, 6)[0], Shard)

    split = second.splits["data"]
    whole = replace(split.strategies[value], outputs=(REPLICATE,) * len(split.strategies[value].outputs))
    wrong = replace(split, strategies={**split.strategies, value: whole})
    other = Layout(graph, second.samples, {**second.splits, "data": wrong})
    with pytest.raises(RuntimeError) as caught:
        check_peers(StageLayouts((first, other)), partition, plan)
    assert str(caught.value) == (
        f"over the replicas, {value} is shard(0) on stage 0 and replicate on stage 1: a replica would need what no "
        "rank that sends to it has"
    )
    check_peers(
        StageLayouts((first, other)), partition, plan_from_partition(partition, parse("[data=2 | tensor=4]"), 1)
    )
