"""``verify --resume``: equal where checkpoints have everything, and the first tensor is named where they do not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from polylane.commands.verifying.verify_resume import describe, note_idle_rules
from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.plan.spec import parse
from polylane.runtime.checkpoint import training_state
from polylane.runtime.data import sample_order
from polylane.verify.resuming.resumed_run import verify_resumed
from polylane.verify.resuming.training_data import TrainingData
from tests.checkpoint.saved_runs import halving, momentum, small_model
from tests.support.workers.training import batch_of, classify

OBJECTIVE = Objective("loss", classify, momentum, halving)
SAMPLES = [*zip(*batch_of(20), strict=True)]
# An epoch has batches of 8, 8 and 4 samples; the checkpoint is behind the second one of four.
DATA = TrainingData(batch_of(8), SAMPLES, 8, steps=4)


def test_a_resumed_training_is_the_unbroken_one() -> None:
    verdict = verify_resumed(small_model(), OBJECTIVE, DATA, "data=2,microbatches=2", "pipeline=2,microbatches=2")
    assert verdict.passed, describe(verdict)
    assert (verdict.steps, verdict.saved_step, verdict.culprit) == (4, 2, "")
    assert 0 <= verdict.worst < 1e-12
    # What normalization takes away again has no gradient but rounding.
    assert verdict.undetermined == ("optimizer/loss/0.bias/momentum_buffer",)
    sentence = describe(verdict)
    assert sentence.startswith("Equal: 2 workers") and "1e-09 is allowed" in sentence


RULES = (
    "data=2,every=2",
    "data=2,every=4,warmup=1",
    "data=2,every=2,outer=0.7:0.9",
    "data=2,tensor=2,every=2",
    "data=2,compress=powersgd:1:1",
    "data=2,compress=top_k:0.25",
    "data=2,wire=float16",
    "data=2,shard=gradients",
    "data=2,shard=parameters",
    "data=2,servers=2",
    "data=2,servers=1,dedicated=yes",
    "pipeline=2,schedule=pipedream,microbatches=2",
    "pipeline=2,schedule=pipedream-2bw,microbatches=2",
)


@pytest.mark.parametrize("plan", [RULES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in RULES[1:])])
def test_by_every_kind_of_synchronization(plan: str) -> None:
    verdict = verify_resumed(small_model(), OBJECTIVE, DATA, plan)
    assert verdict.passed, describe(verdict)
    assert note_idle_rules(parse(plan).sync, DATA.steps) == []


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            "data=2,compress=powersgd:1",
            "PowerSGD compresses from step 11 on, .* of step 2: with --steps 22 it has",
        ),
        ("data=2,every=4,warmup=3", "replicas train separately from step 4 on, .*: with --steps 8 it has"),
        ("data=2,every=4,outer=0.7", "the outer optimizer steps from step 4 on, .*: with --steps 8 it has"),
    ],
)
def test_what_begins_after_the_checkpoint_is_said(plan: str, says: str) -> None:
    (note,) = note_idle_rules(parse(plan).sync, 4)
    assert re.match(f"note: {says}", note)
    assert note_idle_rules(parse(plan).sync, 40) == []


class Stream(IterableDataset[Any]):
    """Samples in an order of its own; it says where it is, and goes on from there."""

    def __init__(self, goes_on: bool = True) -> None:
        self._at, self._goes_on = 0, goes_on

    def __iter__(self) -> Iterator[Any]:
        while self._at < len(SAMPLES):
            self._at += 1
            yield SAMPLES[7 * self._at % len(SAMPLES)]
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"] if self._goes_on else 0


def test_a_stream_goes_on_from_its_state() -> None:
    verdict = verify_resumed(small_model(), OBJECTIVE, replace(DATA, dataset=Stream()), "data=2", "data=1")
    assert verdict.passed, describe(verdict)


def test_an_iterator_is_made_anew_for_every_epoch() -> None:
    data = replace(DATA, dataset=iter(SAMPLES), reopen=lambda: iter(SAMPLES), steps=6)
    verdict = verify_resumed(small_model(), OBJECTIVE, data, "data=1")
    assert verdict.passed and verdict.saved_step == 3, describe(verdict)


def test_a_stream_that_begins_again_is_found_by_its_first_loss() -> None:
    verdict = verify_resumed(small_model(), OBJECTIVE, replace(DATA, dataset=Stream(goes_on=False)), "data=1")
    assert not verdict.passed and verdict.culprit == "the loss of step 3"


def test_samples_that_come_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = sample_order.sample_order
    monkeypatch.setattr(sample_order, "sample_order", lambda samples, epoch, _: original(samples, epoch, os.getpid()))
    verdict = verify_resumed(small_model(), OBJECTIVE, DATA, "data=1")
    assert not verdict.passed and verdict.culprit == "the loss of step 3"


def test_state_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_state, "restore_optimizer", lambda *_: None)
    verdict = verify_resumed(small_model(), OBJECTIVE, DATA.first_steps(2), "data=1")
    assert not verdict.passed
    assert verdict.culprit == verdict.same_plan.first == "model/0.weight"
    assert "NOT equal" in describe(verdict) and "the first that differs is model/0.weight" in describe(verdict)


@pytest.mark.parametrize(
    ("plan", "other", "steps", "sentence"),
    [
        ("data=2", None, 1, "give --steps 2 or more"),
        ("data=2,servers=1,staleness=any", None, 2, "without servers"),
        ("data=2,every=2", "data=2", 2, "numbers of its own"),
    ],
)
def test_what_cannot_be_proven_is_refused(plan: str, other: str | None, steps: int, sentence: str) -> None:
    with pytest.raises(PolylaneError, match=sentence):
        verify_resumed(small_model(), OBJECTIVE, DATA.first_steps(steps), plan, other)
