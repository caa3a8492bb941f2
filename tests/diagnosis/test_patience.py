"""Patience: which bound holds for what a worker is in, by itself and where the user has named one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polylane.diagnosis.page_layout import Phase, Record
from polylane.diagnosis.patience import LONG_SECONDS, MARGIN_SECONDS, START_SECONDS, choose_bound, note_bound
from polylane.diagnosis.report import FROZEN, Doing

STEP = Record(1, phase=Phase.TRAINING, round=7, usual=3_000_000_000)
USUAL = 3 + MARGIN_SECONDS
AFTER_STEPS = [replace(STEP, phase=phase) for phase in Phase]
BEFORE_STEPS = [Record(phase=phase) for phase in Phase]


def test_a_step_has_the_bound_of_its_own_times_or_the_users() -> None:
    for step in (STEP, replace(STEP, phase=Phase.EVALUATING)):
        assert choose_bound(step, Doing.COMPUTING, None) == USUAL
        assert choose_bound(step, Doing.COMPUTING, 2.0) == 2.0
        assert choose_bound(step, Doing.COMPUTING, 1000.0) == 1000.0


@pytest.mark.parametrize("record", [*AFTER_STEPS, *BEFORE_STEPS], ids=lambda r: f"{r.phase.name}-{r.round}")
def test_who_cannot_run_has_the_users_bound_in_every_phase(record: Record) -> None:
    leaving = {Doing.HOLDS_INTERPRETER} if record.phase is Phase.ENDING else set()
    for doing in FROZEN - leaving:
        assert choose_bound(record, doing, 2.0) == 2.0
    for doing in leaving:  # Python takes down what the process has made, and nobody waits for it
        assert choose_bound(record, doing, 2.0) == LONG_SECONDS
    assert choose_bound(record, Doing.STOPPED, None) == record.usual / 1e9 + MARGIN_SECONDS


def test_without_a_users_bound_phases_outside_of_steps_are_long() -> None:
    phases = set(Phase) - {Phase.TRAINING, Phase.EVALUATING}
    for record in (replace(STEP, is_new=True), *(replace(STEP, phase=phase) for phase in phases)):
        for doing in (Doing.COMPUTING, Doing.IN_USER_CODE, Doing.HOLDS_INTERPRETER):
            assert choose_bound(record, doing, None) == LONG_SECONDS


def test_a_users_bound_holds_in_the_loader_once_a_step_was_made_and_in_no_other_phase() -> None:
    loading = replace(STEP, phase=Phase.LOADING)
    assert choose_bound(loading, Doing.LOADING, 2.0) == 2.0
    assert choose_bound(replace(loading, round=0), Doing.LOADING, 2.0) == LONG_SECONDS
    others = {Phase.STARTING, Phase.COMPILING, Phase.SAVING, Phase.SCRIPT}
    for record in (replace(STEP, is_new=True), *(replace(STEP, phase=phase) for phase in others)):
        assert choose_bound(record, Doing.COMPUTING, 2.0) == LONG_SECONDS
        assert choose_bound(record, Doing.COMPUTING, 1000.0) == 1000.0


def test_what_takes_long_is_said_after_the_margin_or_the_users_bound() -> None:
    long = {Phase.STARTING, Phase.AUDITING, Phase.ENDING}
    for phase in set(Phase) - long:
        assert note_bound(replace(STEP, phase=phase), None) == USUAL
        assert note_bound(replace(STEP, phase=phase), 2.0) == 2.0
    for phase in long:
        assert note_bound(Record(phase=phase), 2.0) == START_SECONDS
