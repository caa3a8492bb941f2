"""polylane verify: its verdict, as text, as JSON and as an exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polylane.verify import verify as verification
from tests.cli.tiny_recipe import call, execute


def test_verify(folder: Path) -> None:
    line = "verify tiny.py --workers 2 --plan pipeline=2 --batch 9 --steps 4 --clip-norm 0.1 --json"
    result = json.loads(execute(folder, line)[0])
    assert result["passed"]
    assert len(result["losses"]) == 4  # one more than an epoch has
    assert result["worst"] < 1e-9
    assert {one["name"] for one in result["deviations"]} >= {"inward.weight", "layers.2.0.bias"}


@pytest.mark.parametrize("passed", [True, False])
def test_verdicts_are_told(here: Path, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    names = [f"layer{number}.weight" for number in range(30)]
    deviations = [verification.Deviation(name, 1e-16, 1e-16) for name in names]
    verdict = verification.Verdict(
        passed=True,
        plan="pipeline=2",
        workers=2,
        steps=1,
        tolerance=1e-9,
        reference="the plain model",
        losses=((1.0, 1.0),),
        loss_error=0.0,
        deviations=tuple(deviations),
        worst=1e-16,
        replicas_equal=True,
        culprit=None,
    )
    if not passed:
        wrong = (*deviations[:-1], verification.Deviation("layer29.weight", None, float("nan")))
        verdict = replace(verdict, passed=False, deviations=wrong, worst=float("nan"), culprit="layer29/linear")
    monkeypatch.setattr(verification, "verify", lambda *args, **kwargs: verdict)
    told = call("verify", "tiny.py", "--plan", "pipeline=2")
    assert told.exit_code == (0 if passed else 1)
    assert ("Equal:" in told.stdout, "NOT equal:" in told.stdout) == (passed, not passed)
    assert ("layer29/linear" in told.stdout) == (not passed)
    first = told.stdout.index("layer29.weight" if not passed else "layer0.weight")
    assert first < told.stdout.index("layer1.weight")  # the worst first
    assert "and 10 more" in told.stdout
    as_json = call("verify", "tiny.py", "--plan", "pipeline=2", "--json")
    assert as_json.exit_code == told.exit_code
    assert len(json.loads(as_json.stdout)["deviations"]) == 30


def test_verify_starts_its_own_workers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "run it without torchrun" in call("verify", "tiny.py").stderr
