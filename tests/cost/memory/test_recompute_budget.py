"""The cheapest recomputation within a budget: against all choices of small graphs, and against full recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.cost.memory.recompute_budget import StageBudget, dropped_on_stages
from polylane.cost.memory.recompute_choice import SavedValues
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.graph.capture.repeatable import NOTHING_DROPPED
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition, cut_positions
from tests.support import models, subsets
from tests.support.reference.recomputed_stages import drop, predicted, trace
from tests.support.workers.training import classify


def budget_of(graph: Graph) -> StageBudget:
    keeping = trace(graph)
    return StageBudget(SavedValues(graph, keeping), set(graph.positions), ())


def captured(name: str) -> Graph:
    torch.manual_seed(0)
    case = models.CASES[name]()
    return capture(case.model(), case.loss, case.batch(4, 0))


@pytest.mark.parametrize(
    "name", subsets.one_in(2, ["vit", "moe", "latents", "lstm", pytest.param("t5", marks=pytest.mark.slow)], first=1)
)
def test_budgets_are_kept_and_cost_less_than_recomputing_all(name: str) -> None:
    graph = captured(name)
    program, full = budget_of(graph), drop(graph, "full")
    everything, least = program.kept_bytes(NOTHING_DROPPED), program.kept_bytes(full)
    assert everything == predicted(graph, NOTHING_DROPPED).live_bytes
    assert least == predicted(graph, full).live_bytes
    before = 0.0
    for share in (1.0, 0.8, 0.5, 0.2, 0.0):
        budget = least + share * (everything - least)
        found = program.solve(budget)
        assert found is not None
        need = predicted(graph, found.dropped)
        assert found.kept_bytes == need.live_bytes <= budget
        seconds = program.seconds(found.dropped)
        assert before <= seconds * 1.0002 and seconds <= program.seconds(full) * 1.0002
        before = max(before, seconds)
    assert program.solve(everything) is not None and not program.solve(everything).dropped  # type: ignore[union-attr]
    assert program.least().kept_bytes <= least
    assert program.solve(program.least().kept_bytes - 1) is None


class Small(nn.Module):
    """Ten operators with values of several sizes, one of them read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.up(x))
        gated = F.gelu(wide) * torch.sigmoid(wide)
        logits: Tensor = self.down(gated) + self.down(gated.exp())
        return logits


def choices(program: StageBudget, graph: Graph) -> Iterator[tuple[float, float]]:
    """Seconds and bytes of all sets of nodes that could run again."""
    values = program._values
    able = sorted(program._again)
    for count in range(len(able) + 1):
        for again in itertools.combinations(able, count):
            crossing = [values.makers[key] for key in values.crossing_blocks]
            dropped = values.on_stage(values.drop(again, crossing), set(graph.positions), ())
            yield program.seconds(dropped), program.kept_bytes(dropped)


def test_the_choice_is_the_best_of_all() -> None:
    torch.manual_seed(0)
    graph = capture(Small(), classify, (torch.randn(6, 4), torch.arange(6) % 4))
    program = budget_of(graph)
    assert 8 <= len(program._again) <= 12
    every = list(choices(program, graph))
    for budget in sorted({size for _, size in every}):
        best = min(seconds for seconds, size in every if size <= budget)
        found = program.solve(budget)
        assert found is not None and found.kept_bytes <= budget
        assert program.seconds(found.dropped) == pytest.approx(best, rel=1e-3)
    assert program.least().kept_bytes == min(size for _, size in every)


def test_a_budget_that_nothing_meets_is_refused_with_the_least_that_would_do() -> None:
    graph = captured("vit")
    keeping = trace(graph)
    positions = cut_positions(graph)
    partition = Partition(graph, (positions[len(positions) // 2],))
    with pytest.raises(PolylaneError, match=r"stage 0 needs a budget of .* at least .* and 1KB is less") as caught:
        dropped_on_stages(partition, ["budget:1KB", "none"], [keeping, keeping])
    least = str(caught.value).split(" needs a budget of ")[1].split(" ")[0]
    dropped, other = dropped_on_stages(partition, [f"budget:{least}", "none"], [keeping, keeping])
    assert dropped and not other
    with pytest.raises(PolylaneError, match="stage 1 needs"):
        dropped_on_stages(partition, ["none", "budget:1KB"], [keeping, keeping])
