"""The training scripts of examples/scripts print the same numbers alone and under every kind of plan."""

from __future__ import annotations

import ast
import io
import math
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from polylane.plan.spec import parse
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.session import ScriptSession, running_session
from tests.support.models import EXAMPLES

# By script, arguments with which it trains for a few steps.
SCRIPTS = {
    "causal_lm": "--steps 4 --eval-interval 2 --batch-size 4 --block-size 8 --dim 16",
    "finetune": "--epochs 2 --pretrain-epochs 1 --samples 200",
    "gan": "--epochs 1 --samples 48 --batch-size 16",
    "image_classification": "--epochs 2 --samples 160 --checkpoint {folder}/best.pt",
    "lstm": "--epochs 1 --characters 1200 --bptt 12 --batch_size 4 --log_interval 5",
    "masked_lm": "--epochs 2 --batch-size 128",
    "segmentation": "--epochs 1 --samples 80",
    "siamese": "--epochs 2 --samples 160 --log-interval 1",
    "translation": "--epochs 1 --numbers 80",
    "vae": "--epochs 2 --samples 160 --anneal-steps 3",
}
PLANS = ["data=1", "data=2", "pipeline=2", "data=2,pipeline=2", "tensor=2", "data=2,shard=parameters"]
QUICK: list[tuple[str, str]] = []  # each runs for half a minute
CASES = [
    pytest.param(name, plan, marks=() if (name, plan) in QUICK else pytest.mark.slow)
    for name in SCRIPTS
    for plan in PLANS
]
# Noise that a model draws itself is drawn per sample, and not in the plain script's order: one worker is the reference.
DRAWING = {"vae"}


def source_of(name: str) -> str:
    return (EXAMPLES / "scripts" / f"{name}.py").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_prepared_by_an_import_and_a_call(name: str) -> None:
    statements = [node for node in ast.walk(ast.parse(source_of(name))) if isinstance(node, ast.stmt)]
    assert len(source_of(name).splitlines()) <= 120
    simple = [node for node in statements if not hasattr(node, "body") and "polylane" in ast.unparse(node)]
    simple = [node for node in simple if not isinstance(getattr(node, "value", None), ast.Constant)]  # the docstring
    assert [ast.unparse(node).split("(")[0].split("=")[-1].strip() for node in simple] == [
        "import polylane",
        "polylane.prepare",
    ]


def printed(name: str, plan: str | None, folder: Path) -> list[list[float]]:
    """Numbers that a script prints on each worker, to their last digit, in float64."""
    # Same lines, so that what points at one points at the script's own.
    script = folder / f"{name}.py"
    script.write_text(re.sub(r":[\d.,]+[fg%]\}", ":.17g}", source_of(name)))

    def run(context: WorkerContext) -> str:
        torch.set_default_dtype(torch.float64)
        own_folder = folder / f"rank{context.rank}"
        own_folder.mkdir(exist_ok=True)
        sys.argv = [str(script), *SCRIPTS[name].format(folder=own_folder).split()]
        with redirect_stdout(io.StringIO()) as output, running_session(ScriptSession(plan, context.world)):
            runpy.run_path(str(script), run_name="__main__")
        return output.getvalue()

    outputs = fork_workers(run, 1 if plan is None else parse(plan).workers)
    return [[float(n) for n in re.findall(r"(?<![\w.])-?\d+\.?\d*(?:e-?\d+)?", output)] for output in outputs]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_by_itself(name: str, tmp_path: Path) -> None:
    [numbers] = printed(name, None, tmp_path)
    assert len(numbers) >= 4 and all(map(math.isfinite, numbers))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_script_prints_the_plain_script_s_numbers(name: str, plan: str, tmp_path: Path) -> None:
    [expected] = printed(name, "data=1" if name in DRAWING else None, tmp_path)
    assert len(expected) >= 4
    for numbers in printed(name, plan, tmp_path):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-11)
