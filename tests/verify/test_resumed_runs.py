"""``verify --resume``: equal where checkpoints have everything, and the first tensor is named where they do not."""

from __future__ import annotations

import pytest

from checkpoint.saved_runs import halving, momentum, small_model
from polylane.commands.verify_resume import describe
from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
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
