"""Onlookers: a script does what it likes between steps, unless somebody waits for it; nobody else is left out."""

from __future__ import annotations

import random

import pytest

from polylane.diagnosis.culprit import RankState, Wait, find_culprits
from polylane.diagnosis.judgement import without_onlookers
from polylane.diagnosis.page_layout import Phase

FREE, STOPPED = RankState(), RankState(is_frozen=True)


def waiting(*ranks: int, number: int = 1) -> RankState:
    """A rank that has begun an operation of a group and waits for it."""
    name = ", ".join(map(str, ranks))
    return RankState(Wait(name, number, ranks), {name: number})


def named(states: dict[int, RankState], *phases: Phase) -> tuple[int, ...]:
    return find_culprits(without_onlookers(states, dict(enumerate(phases)))).culprits


def test_nobody_is_named_while_all_are_in_the_script() -> None:
    assert named({0: FREE, 1: FREE}, Phase.SCRIPT, Phase.SCRIPT) == ()
    assert named({0: FREE, 1: STOPPED}, Phase.SCRIPT, Phase.SCRIPT) == ()


def test_who_is_in_the_script_is_named_where_another_one_waits_for_it() -> None:
    assert named({0: waiting(0, 1), 1: FREE}, Phase.TRAINING, Phase.SCRIPT) == (1,)
    assert named({0: waiting(0, 1), 1: STOPPED}, Phase.TRAINING, Phase.SCRIPT) == (1,)
    # Reading a loss waits as well, wherever the script does it.
    assert named({0: waiting(0, 1), 1: FREE}, Phase.SCRIPT, Phase.SCRIPT) == (1,)


def test_one_that_is_waited_for_over_others_is_named_and_not_one_beside_them() -> None:
    states = {0: waiting(0, 1), 1: waiting(1, 2), 2: FREE, 3: STOPPED}
    assert named(states, Phase.TRAINING, Phase.TRAINING, Phase.SCRIPT, Phase.SCRIPT) == (2,)


def test_a_step_that_does_not_end_counts_though_nobody_waits_yet() -> None:
    assert named({0: FREE, 1: FREE}, Phase.SCRIPT, Phase.TRAINING) == (1,)


def test_servers_and_ended_workers_count_where_they_cannot_run() -> None:
    for phase in (Phase.SERVING, Phase.ENDING):
        assert named({0: waiting(0, 1), 1: FREE, 2: FREE}, Phase.TRAINING, Phase.LOADING, phase) == (1,)
        assert named({0: waiting(0, 1), 1: FREE, 2: STOPPED}, Phase.TRAINING, Phase.LOADING, phase) == (2,)


@pytest.mark.parametrize("seed", range(50))
def test_a_rank_is_left_out_only_where_nobody_would_reach_it(seed: int) -> None:
    draw = random.Random(seed)
    ranks = range(draw.randint(2, 6))
    groups = [tuple(sorted({rank, *draw.sample(ranks, 2)})) for rank in ranks]
    states = {r: draw.choice([FREE, STOPPED, waiting(*groups[r]), waiting(*groups[r])]) for r in ranks}
    phases = {rank: draw.choice([Phase.SCRIPT, Phase.TRAINING]) for rank in ranks}
    kept = without_onlookers(states, phases)
    left_out = states.keys() - kept.keys()
    assert all(phases[rank] is Phase.SCRIPT and not states[rank].is_waiting for rank in left_out)
    everything = find_culprits(states)
    assert not left_out & {other for others in everything.waits_for.values() for other in others}
    assert find_culprits(kept).waits_for == everything.waits_for
