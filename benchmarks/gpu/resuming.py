"""Resuming: a training that is killed in its middle, resumed where it was and on the CPU, beside the unbroken one.

the same device    should show 0: checkpoints hold all of a training's state, and one worker adds in one order
the CPU            should show some 1e-15, float64's rounding; the bound is for what AdamW makes of it
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.gpu import slow_digits
from benchmarks.gpu.setting import Row, Setting, relative_difference
from polylane.checkpoint.store import CheckpointStore

BOUND = 1e-6  # relative, of the weights and of the last loss
STEPS, EVERY = 60, 20
PATIENCE = 120.0  # seconds until the first checkpoint, with the start of a device


def measure(setting: Setting, folder: Path, environment: dict[str, str], host: dict[str, str]) -> list[Row]:
    """Train unbroken, killed and resumed, and killed and resumed on the CPU.

    Args:
        setting: where is measured.
        folder: run folder, in which each training has one of its own.
        environment: environment of processes that see the device.
        host: environment of processes that see none.
    """
    unbroken, killed, moved = (folder / f"resuming-{name}" for name in ("unbroken", "killed", "moved"))
    for run in (unbroken, killed, moved):
        shutil.rmtree(run, ignore_errors=True)
    try:
        _train(unbroken, environment)
        step = _kill(killed, environment)
        shutil.copytree(killed, moved)
        _train(killed, environment, "--resume", "auto")
        _train(moved, host, "--resume", "auto")
        wanted = _end(unbroken)
        return [
            _compare(f"killed at step {step}, resumed on {place}", wanted, _end(run))
            for place, run in ((f"the same device ({setting.device})", killed), ("the CPU", moved))
        ]
    except (RuntimeError, TimeoutError) as error:
        return [Row("resuming", "killed and resumed", {"failed": str(error)[-300:]}, False)]


def _command(run: Path, *words: str) -> list[str]:
    options = ["--steps", str(STEPS), "--save-every", str(EVERY), "--batch", "16", "--workers", "1", "--audit", "off"]
    return [sys.executable, "-m", "polylane", "train", slow_digits.__file__, "--run", str(run), *options, *words]


def _train(run: Path, environment: dict[str, str], *words: str) -> None:
    ended = subprocess.run(_command(run, *words), env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip() or ended.stdout.strip())


def _kill(run: Path, environment: dict[str, str]) -> int:
    """Start a training, end its processes by SIGKILL behind the first checkpoint, and return the checkpoint's step."""
    process = subprocess.Popen(
        _command(run), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    store, end = CheckpointStore(run / "checkpoints"), time.monotonic() + PATIENCE
    while not (steps := store.list_steps()):
        if process.poll() is not None or time.monotonic() > end:
            break
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not steps or steps[-1][0] >= STEPS:
        raise TimeoutError("the training has ended before it was killed, or written no checkpoint")
    return steps[-1][0]


def _end(run: Path) -> tuple[dict[str, Any], float]:
    """Return the weights and the loss of a training's last step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return load_file(run / "model.safetensors"), [record["loss"] for record in records if "loss" in record][-1]


def _compare(name: str, wanted: tuple[dict[str, Any], float], state: tuple[dict[str, Any], float]) -> Row:
    weights, loss = relative_difference(state[0], wanted[0]), abs(state[1] - wanted[1]) / abs(wanted[1])
    return Row("resuming", name, {"weights": weights, "last loss": loss, "bound": BOUND}, max(weights, loss) < BOUND)
