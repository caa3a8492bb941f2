"""The example of Ray Train, in real Ray: a worker that is killed changes nothing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

EXAMPLE = Path(__file__).parents[2] / "examples/ray_train.py"


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2,microbatches=2"])
def test_a_worker_that_is_killed_changes_nothing(plan: str, tmp_path: Path) -> None:
    weights = []
    for options in ([], ["--kill-at", "37"]):
        storage = tmp_path / f"killed{len(weights)}"
        command = [sys.executable, str(EXAMPLE), "--plan", plan, "--storage", str(storage), *options]
        subprocess.run(command, check=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
        weights.append(load_file(storage / "model.safetensors"))
    whole, broken = weights
    assert (tmp_path / "killed1/killed").exists()
    assert all((whole[name] == broken[name]).all() for name in whole) and whole.keys() == broken.keys()
