"""The progress of a search: on a terminal, after a moment, and nowhere else."""

from __future__ import annotations

import io

from rich.console import Console

from polylane.planner.search_progress import EVERY, PATIENCE, show_progress


def shown(terminal: bool, seconds: list[float]) -> str:
    """What is written where a search tells of plans at these seconds after its start."""
    screen, times = io.StringIO(), iter([0.0, 0.0, *seconds])
    last = 0.0

    def clock() -> float:
        nonlocal last
        last = next(times, last)
        return last

    with show_progress(Console(file=screen, force_terminal=terminal), clock) as told:
        for number, _ in enumerate(seconds):
            told("compared", 1000 * number)
    return screen.getvalue()


def test_nothing_is_shown_in_a_pipe() -> None:
    assert shown(False, [0.0, PATIENCE + 1, PATIENCE + 2]) == ""


def test_a_short_search_shows_nothing() -> None:
    assert shown(True, [0.0, PATIENCE / 2]) == ""


def test_a_long_search_says_how_far_it_is() -> None:
    text = shown(True, [0.0, *(PATIENCE + 1 + 20 * EVERY * each for each in range(40))])
    assert "plans compared" in text and "000" in text
