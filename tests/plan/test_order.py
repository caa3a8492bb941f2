"""Orders of passes in plans: what is written is read again, and what cannot run is refused in the plan's words."""

from __future__ import annotations

import pytest

from polylane.errors import PolylaneError
from polylane.plan.order import check_order, check_order_runs, format_order, has_halves, parse_order
from polylane.schedule.schedules import NAMES, assign_stages, schedule_lanes
from polylane.schedule.stage_graph import StageGraph


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_every_schedule_is_one(name: str) -> None:
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    groups = assign_stages(name, 3, chunks)
    lanes = schedule_lanes(name, 3 * chunks, 4, groups)
    lines = format_order(lanes)
    assert parse_order(lines) == lanes
    assert has_halves(lines) == name.startswith("zb")
    check_order(lines, groups, 4)
    check_order_runs(lines, StageGraph.chain(3 * chunks))


@pytest.mark.parametrize(
    "lines, says",
    [
        (["f0.0 x0.0", "f1.0 b1.0"], r"order.0: 'x0.0' is no pass: write f, b, i or w"),
        (["f0.0 b0.0"], r"order has 1 line, for 2 groups of workers"),
        (["f0.0", "f1.0 b1.0"], r"order.0: b0.0 is missing"),
        (["f0.0 b0.0 f1.0", "f1.0 b1.0"], r"order.0: f1.0 does not belong there"),
        (["f0.0 f0.0 b0.0", "f1.0 b1.0"], r"order.0: f0.0 is there twice"),
        (["b0.0 f0.0", "f1.0 b1.0"], r"order.0: b0.0 is out of its place"),
        (["f0.0 w0.0 i0.0", "f1.0 i1.0 w1.0"], r"order.0: w0.0 is out of its place"),
    ],
)
def test_what_is_no_order(lines: list[str], says: str) -> None:
    with pytest.raises(PolylaneError, match=says):
        check_order(lines, (0, 1), 1)


def test_microbatches_go_in_their_order() -> None:
    with pytest.raises(PolylaneError, match=r"order.0: f0.1 is out of its place"):
        check_order(["f0.1 f0.0 b0.0 b0.1", "f1.0 f1.1 b1.0 b1.1"], (0, 1), 2)


def test_passes_that_wait_for_each_other() -> None:
    lines = ["f0.0 b0.0 f2.0 b2.0", "f1.0 b1.0"]
    check_order(lines, (0, 1, 0), 1)
    with pytest.raises(PolylaneError, match=r"order: .* waits for a pass that waits for it in turn"):
        check_order_runs(lines, StageGraph.chain(3))


def test_whole_and_halved_passes_of_a_stage() -> None:
    """Of different microbatches; also where only some stages have halves."""
    lines = ["f0.0 f0.1 i0.0 w0.0 b0.1", "f1.0 b1.0 f1.1 i1.1 w1.1"]
    check_order(lines, (0, 1), 2)
    check_order_runs(lines, StageGraph.chain(2))
    assert has_halves(lines) and has_halves(["f0.0 b0.0", "f1.0 i1.0 w1.0"])


@pytest.mark.parametrize(
    "line, says",
    [
        ("f0.0 f0.1 b0.0 i0.0 w0.0 b0.1", "b0.0 and i0.0 are both there: a backward pass is either whole or in two"),
        ("f0.0 f0.1 b0.0 w0.0 b0.1", "b0.0 and w0.0 are both there"),
        ("f0.0 f0.1 i0.0 b0.1", "w0.0 is missing"),
        ("f0.0 f0.1 b0.0 w0.1", "i0.1 is missing"),
        ("f0.0 f0.1 b0.0", "b0.1 is missing"),
        ("f0.0 f0.1 i0.0 w0.0", "i0.1 is missing"),
        # Gradients of weights accumulate in ascending order of microbatch.
        ("f0.0 f0.1 i0.0 b0.1 w0.0", "b0.1 is out of its place"),
    ],
)
def test_halves_that_do_not_fit_together(line: str, says: str) -> None:
    with pytest.raises(PolylaneError, match=f"order.0: {says}"):
        check_order([line], (0,), 2)


def test_mixed_passes_that_wait_for_each_other() -> None:
    lines = ["f0.0 b0.0 f2.0 i2.0 w2.0", "f1.0 i1.0 w1.0"]
    check_order(lines, (0, 1, 0), 1)
    with pytest.raises(PolylaneError, match=r"order: .* waits for a pass that waits for it in turn"):
        check_order_runs(lines, StageGraph.chain(3))
