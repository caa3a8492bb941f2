"""What a command line asks for travels to workers in new processes, and is made before torch is imported."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from polylane import cli, cli_planning, cli_running
from polylane.commands.learning_rates import LearningRateOptions
from polylane.commands.requests import (
    ExportRequest,
    InspectRequest,
    LanesRequest,
    PlanRequest,
    RecipeRequest,
    SimulateRequest,
    TrainRequest,
    VerifyRequest,
    WhyRequest,
    build_request,
)
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


@pytest.mark.parametrize(
    ("command", "request_class"),
    [
        (cli.verify, VerifyRequest),
        (cli.inspect, InspectRequest),
        (cli.lanes, LanesRequest),
        (cli_planning.simulate, SimulateRequest),
        (cli_planning.plan, PlanRequest),
        (cli_running.export, ExportRequest),
        (cli_running.why, WhyRequest),
    ],
)
def test_every_option_is_an_attribute_of_its_request(command: Callable[..., None], request_class: type) -> None:
    options = inspect.signature(command).parameters
    assert options.keys() <= {attribute.name for attribute in fields(request_class)}


def test_options_that_were_not_given_are_the_requests() -> None:
    options = {"recipe": "digits.py", "batch": 8, "settings": None, "cluster": "2:cpu", "plan": "data=2"}
    request_ = build_request(SimulateRequest, {**options, "slow": ["0=0.5", "1=2"], "dtype": None, "overlap": False})
    assert request_.settings == () and request_.slow == ("0=0.5", "1=2")
    assert request_.dtype is None and request_.overlap is False and request_.batch == 8


def test_requests_are_made_without_torch() -> None:
    code = "import polylane.cli, polylane.commands.requests, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_is_told_by_its_groups_of_workers_not_by_their_chunks() -> None:
    asked = VerifyRequest(recipe="digits.py", batch=64, steps=3, workers=3, plan="pipeline=2,chunks=4")
    with pytest.raises(PolylaneError, match=r"the plan takes 2 \(data=1 times pipeline=2\): they must be equal"):
        choose_plan(asked)
