"""What ``polylane verify`` says: of what is undetermined, of steps run freely, and of batches that are too small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polylane.commands import verify as command
from polylane.commands.requests import VerifyRequest
from polylane.errors import PolylaneError
from polylane.verify import verify as verification
from polylane.verify.verify import Deviation, FreeRunDeviation, Verdict

RECIPE = """
import torch

def model():
    raise AssertionError("built")

def data(split):
    return []

def loss(model, batch):
    return model(batch).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def tell(path: Path, plan: str, batch: int = 8, as_json: bool = False) -> bool:
    return command.run(VerifyRequest(recipe=str(path), plan=plan, steps=1, batch=batch, json=as_json))


@pytest.mark.parametrize(
    ("plan", "batch", "sentence"),
    [
        ("data=2", 1, "data=2: a batch of 1 sample cannot be divided into so many parts"),
        ("pipeline=2,microbatches=9", 8, "microbatches=9: a batch of 8 samples cannot be divided"),
    ],
)
def test_a_batch_that_is_too_small_is_refused_before_a_model_is_built(
    tmp_path: Path, plan: str, batch: int, sentence: str
) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    with pytest.raises(PolylaneError, match=sentence):
        tell(tmp_path / "recipe.py", plan, batch)


def verdict(undetermined: tuple[str, ...]) -> Verdict:
    return Verdict(
        passed=True,
        plan="data=2",
        workers=2,
        steps=1,
        tolerance=1e-9,
        reference="the plain model",
        losses=((1.0, 1.0),),
        loss_error=0.0,
        deviations=(Deviation("weight", 1e-16, 1e-16),),
        worst=1e-16,
        replicas_equal=True,
        culprit=None,
        undetermined=undetermined,
        free=FreeRunDeviation(1e-15, 1.8, "layers.0.key.bias"),
    )


@pytest.mark.parametrize("biases", [0, 1, 4, 6])
def test_what_is_undetermined_is_told_in_a_line(
    biases: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(f"gradient of layers.{i}.key.bias" for i in range(biases))
    monkeypatch.setattr(command.inputs, "build_model", lambda *_: None)
    monkeypatch.setattr(command.inputs, "rehearse_optimizer", lambda *_: None)
    monkeypatch.setattr(command.inputs, "whole_batches", lambda *_: [])
    monkeypatch.setattr(verification, "verify", lambda *_, **__: verdict(names))
    (tmp_path / "recipe.py").write_text(RECIPE)
    assert tell(tmp_path / "recipe.py", "data=2")
    out = capsys.readouterr().out
    assert "after 1 step run freely, which is not judged: worst difference 1.8e+00 in layers.0.key.bias" in out
    lines = [line for line in out.splitlines() if line.startswith("undetermined")]
    assert len(lines) == (biases > 0)
    if lines:
        assert ("and 2 more" in lines[0]) == (biases == 6)
        assert all(name in lines[0] for name in names[:4])
    assert tell(tmp_path / "recipe.py", "data=2", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert tuple(told["undetermined"]) == names and told["free"]["worst"] == 1.8
