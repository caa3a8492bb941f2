"""What a command line asks for travels to workers in new processes, and is made before torch is imported."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from polylane.commands.learning_rates import LearningRateOptions
from polylane.commands.requests import PlanRequest, RecipeRequest, SimulateRequest, TrainRequest, VerifyRequest
from polylane.commands.user_inputs import choose_plan
from polylane.errors import PolylaneError
from polylane.plan.spec import parse

TRAIN = TrainRequest(recipe="digits.py", batch=64, settings=("width=8",), rates=LearningRateOptions(64, warmup=5))


@pytest.mark.parametrize(
    "request_",
    [
        TRAIN,
        replace(TRAIN, plan=parse("data=2,pipeline=2"), steps=3, model_path=Path("run/model.safetensors")),
        VerifyRequest(recipe="digits.py", batch=64, steps=3),
        PlanRequest(recipe="digits.py", batch=64, cluster="8:h100-80g"),
        SimulateRequest(recipe="digits.py", batch=64, cluster="8:h100-80g", plan="data=8"),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_request_travels(request_: RecipeRequest) -> None:
    assert pickle.loads(pickle.dumps(request_)) == request_


def test_requests_are_made_without_torch() -> None:
    code = "import polylane.cli, polylane.commands.requests, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_is_told_by_its_groups_of_workers_not_by_their_chunks() -> None:
    asked = VerifyRequest(recipe="digits.py", batch=64, steps=3, workers=3, plan="pipeline=2,chunks=4")
    with pytest.raises(PolylaneError, match=r"the plan takes 2 \(data=1 times pipeline=2\): they must be equal"):
        choose_plan(asked)
