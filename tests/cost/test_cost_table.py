"""A table's running sums are what its nodes take one by one, whole or split, for any number of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from polylane.cost.cost_table import OperatorWork, ShardedGraphCost, busiest_local_shape
from polylane.cost.network.alpha_beta import RankSpeed
from polylane.placement.operator_view import view_operators
from polylane.placement.placement import Shard, even_cuts
from polylane.sharding.cost_model import CostSetting, list_redistributions
from polylane.sharding.layout import choose_layout
from tests.support import planning_graphs


@dataclass
class Counting:
    """A second for each element that an operator gives, two for its backward pass; remembers whom it was asked for."""

    seen: list[OperatorWork] = field(default_factory=list)

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        self.seen.append(work)
        given = float(sum(math.prod(shape) for shape in work.outputs))
        return given, 2 * given

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        return 1.0, 3.0


def one(collective: str, size: float) -> float:
    return 1.0


@pytest.mark.parametrize("samples", [1, 2, 8])
def test_a_whole_graph_takes_what_its_nodes_take(samples: int) -> None:
    graph = planning_graphs.blocks(3, 16)
    table = ShardedGraphCost(graph, {}, 2).table(samples, Counting(), {})
    steps = view_operators(graph, samples, 1).operators
    given = sum(math.prod(value.shape) for step in steps for value in step.call.outputs)
    assert table.between("forward", 0, len(graph.nodes)) == given
    assert table.between("backward", 0, len(graph.nodes)) == 2 * given
    assert table.between("issued", 0, len(graph.nodes)) == len(steps)
    assert not np.any(table.waits) and not np.any(table.sent)
    for step in steps:
        at = graph.positions[step.name]
        assert table.between("forward", at, at + 1) == sum(math.prod(v.shape) for v in step.call.outputs)


def test_nodes_that_are_alike_are_timed_once() -> None:
    few, many = Counting(), Counting()
    ShardedGraphCost(planning_graphs.blocks(3, 16), {}, 2).table(2, few, {})
    ShardedGraphCost(planning_graphs.blocks(6, 16), {}, 2).table(2, many, {})
    assert len(few.seen) == len(many.seen)


def test_a_split_graph_moves_what_its_placements_say() -> None:
    graph = planning_graphs.blocks(2, 16)
    splits = choose_layout(graph, {"tensor": 4}, 2).splits
    sheet, counting = ShardedGraphCost(graph, splits, 2), Counting()
    table = sheet.table(2, counting, {"tensor": one})
    shown = view_operators(graph, 2, 4)
    asked = list(list_redistributions(CostSetting(shown, 4, RankSpeed(), {}), splits["tensor"]))
    assert len(sheet.redistributions) == len(asked)
    assert table.between("waits", 0, len(graph.nodes)) + table.between("backward_waits", 0, len(graph.nodes)) > 0
    whole = ShardedGraphCost(graph, {}, 2).table(2, Counting(), {})
    assert table.between("forward", 0, len(graph.nodes)) < whole.between("forward", 0, len(graph.nodes))
    wide = [work for work in counting.seen if work.operator.call.base == "linear"]
    assert wide and all(not work.is_whole for work in wide)


def test_what_a_rank_has_of_a_shape() -> None:
    cut = Shard(1, even_cuts(10, 4))
    assert busiest_local_shape((2, 10), [cut]) == (2, 3)
    assert busiest_local_shape((2, 20), [cut]) == (2, 6), "the same share where the dimension has another size"
    assert busiest_local_shape((2, 10), []) == (2, 10)


def test_replicas_share_the_statistics_of_a_batch() -> None:
    graph = planning_graphs.example("digits")
    apart, together = (ShardedGraphCost(graph, {}, 2).table(2, Counting(), each) for each in ({}, {"data": one}))
    norms = [step for step in view_operators(graph, 2, 1).operators if step.call.base == "batch_norm"]
    assert norms and not np.any(apart.waits)
    for way in ("waits", "backward_waits"):
        assert together.between(way, 0, len(graph.nodes)) == len(norms), "one sum for each of them, there and back"
