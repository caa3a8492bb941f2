"""Interleaved 1F1B, lane by lane as people draw it."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.interleaved import interleaved
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import one_forward_one_backward
from tests.support.simulated_tasks import interleaved_live_bound


def drawn(lane: tuple[Action, ...], ranks: int) -> str:
    """``0 1' <0``: a microbatch, with a mark for each chunk before its own; ``<`` is a backward."""
    return " ".join(
        f"{'' if a.kind is ActionKind.FORWARD else '<'}{a.microbatch}{chr(39) * (a.stage // ranks)}" for a in lane
    )


def test_two_ranks_of_two_chunks() -> None:
    assert [drawn(lane, 2) for lane in interleaved(2, 2, 4)] == [
        "0 1 0' 1' 2 <0' 3 <1' 2' <0 3' <1 <2' <3' <2 <3",
        "0 1 0' <0' 1' <1' 2 <0 3 <1 2' <2' 3' <3' <2 <3",
    ]


def test_the_published_figure() -> None:
    """Narayanan et al., figure 4, below: four ranks of two chunks, eight microbatches."""
    first, *_, last = interleaved(4, 2, 8)
    assert drawn(first[:16], 4) == "0 1 2 3 0' 1' 2' 3' 4 5 6 <0' 7 <1' 4' <2'"
    assert drawn(last[:10], 4) == "0 1 2 3 0' <0' 1' <1' 2' <2'"


def test_virtual_stages_go_round_the_ranks() -> None:
    for rank, lane in enumerate(interleaved(3, 4, 6)):
        assert {action.stage for action in lane} == {rank, 3 + rank, 6 + rank, 9 + rank}


def test_one_chunk_is_1f1b() -> None:
    for ranks, microbatches in ((1, 1), (4, 2), (4, 4), (3, 7)):
        assert interleaved(ranks, 1, microbatches) == one_forward_one_backward(ranks, microbatches)


def test_the_busy_share_of_four_ranks() -> None:
    timeline = simulate_schedule(interleaved(4, 2, 8), forward=1, backward=2, graph=StageGraph.chain(8))
    assert (sum(timeline.busy()), 4 * timeline.makespan()) == (192, 228)
    halves = simulate_schedule(interleaved(4, 2, 8), Fraction(1, 2), 1, graph=StageGraph.chain(8))  # type: ignore[arg-type]
    assert halves.makespan() == Fraction(2 * 8 + 4 - 1, 2) * 3


def test_live_bounds() -> None:
    assert [interleaved_live_bound(4, 2, 8, rank) for rank in range(4)] == [11, 9, 7, 5]
    assert [interleaved_live_bound(4, 2, 2, rank) for rank in range(4)] == [4, 4, 4, 3]


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ((0, 2, 4), "ranks must be a whole number of at least 1, not 0"),
        ((2, -1, 4), "chunks must be a whole number of at least 1, not -1"),
        ((2, 2, 0), "microbatches must be a whole number of at least 1, not 0"),
        ((2, 2, 1.5), "microbatches must be a whole number of at least 1, not 1.5"),
    ],
)
def test_counts_below_one_are_refused(counts: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        interleaved(*counts)


def test_a_virtual_stage_belongs_to_one_lane() -> None:
    twice = [[Action(ActionKind.FORWARD, 0, 0)], [Action(ActionKind.FORWARD, 0, 1)]]
    with pytest.raises(ValueError, match="lane 1 holds the forward of microbatch 1 on stage 0: it belongs in lane 0"):
        simulate_schedule(twice, 1, 1, graph=StageGraph.chain(4))
    with pytest.raises(ValueError, match="lane 0 holds the forward of microbatch 0 on stage 4: there are 4 stages"):
        simulate_schedule([[Action(ActionKind.FORWARD, 4, 0)], []], 1, 1, graph=StageGraph.chain(4))
