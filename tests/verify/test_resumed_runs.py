"""``verify --resume``: equal where checkpoints have everything, and the first tensor is named where they do not."""

from __future__ import annotations

import re

import pytest

from checkpoint.saved_runs import halving, momentum, small_model
from polylane.commands.verify_resume import describe, note_idle_rules
from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.plan.spec import parse
from polylane.runtime.checkpoint import training_state
from polylane.verify.resuming.resumed_run import verify_resumed
from training import batch_of, classify

OBJECTIVE = Objective("loss", classify, momentum, halving)
BATCHES = [batch_of(8, seed) for seed in range(4)]


def test_a_resumed_training_is_the_unbroken_one() -> None:
    verdict = verify_resumed(small_model(), OBJECTIVE, BATCHES, "data=2,microbatches=2", "pipeline=2,microbatches=2")
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
    verdict = verify_resumed(small_model(), OBJECTIVE, BATCHES, plan)
    assert verdict.passed, describe(verdict)
    assert note_idle_rules(parse(plan).sync, len(BATCHES)) == []


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


def test_state_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_state, "restore_optimizer", lambda *_: None)
    verdict = verify_resumed(small_model(), OBJECTIVE, BATCHES[:2], "data=1")
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
        verify_resumed(small_model(), OBJECTIVE, BATCHES[:steps], plan, other)
