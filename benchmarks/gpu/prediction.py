"""Prediction: ``polylane probe`` of this machine, and the step that is predicted from it beside the measured one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpt
from benchmarks.gpu.setting import Row, Setting

RECIPE = Path(gpt.__file__)
BATCH = 8


def measure(setting: Setting, folder: Path, measured_seconds: float | None, environment: dict[str, str]) -> list[Row]:
    """Probe the machine with one worker, and predict a step of the GPT of the speed table.

    Args:
        setting: where and how much is measured.
        folder: run folder, for the cluster file.
        measured_seconds: seconds of that step as it was measured; None: it was not.
        environment: environment of the commands.
    """
    cluster = folder / "cluster.yaml"
    figures = gpt.LARGE if setting.device == "cuda" and not setting.quick else gpt.SMALL
    sets = [word for key, value in figures.items() for word in ("--set", f"{key}={value}")]
    plan = ["--plan", "data=1,precision=bfloat16", "--batch", str(BATCH), "--json"]
    try:
        if setting.quick:
            probed, where = None, ["--cluster", "1x1:cpu" if setting.device == "cpu" else "1x1:a100-80g"]
        else:
            probed = _run(["probe", "-o", str(cluster), "--workers", "1", "--json"], environment)
            where = ["--cluster", str(cluster)]
        predicted = _run(["simulate", str(RECIPE), *where, *plan, *sets], environment)
    except RuntimeError as error:
        return [Row("prediction", "probe and simulate", {"failed": str(error)}, False)]
    seconds = float(predicted["step_seconds"])
    columns: dict[str, Any] = {"predicted ms": seconds * 1e3}
    if measured_seconds is not None:
        columns |= {"measured ms": measured_seconds * 1e3, "ratio": seconds / measured_seconds}
    rows = [] if probed is None else [Row("prediction", "operators, told by the probe", probed["operators"])]
    name = "a step, by a probe of this machine" if probed else "a step, by a preset (a quick run does not probe)"
    return [*rows, Row("prediction", name, columns)]


def _run(words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, "-m", "polylane", *words], env=environment, capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise RuntimeError((found.stderr.strip() or found.stdout.strip())[-300:])
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer
