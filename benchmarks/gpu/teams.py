"""Teams of workers in new processes, on the device that is measured or on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import collectives, dropout, equality, families, memory, spans, speed
from benchmarks.gpu.setting import Row, Setting
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import start_workers

ALONE = {
    "equality": equality,
    "dropout": dropout,
    "collectives": collectives,
    "spans": spans,
    "memory": memory,
    "speed": speed,
}


@contextmanager
def environment_of(setting: Setting) -> Iterator[dict[str, str]]:
    """Context manager: processes that are started inside see the devices of the setting; yields their environment."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield dict(os.environ)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def measure_alone(setting: Setting, subjects: list[str]) -> list[Row]:
    """Measure subjects of one worker, each in a process of its own: one that fails leaves the others."""
    rows: list[Row] = []
    for subject in subjects:
        try:
            with environment_of(setting):
                rows += start_workers(partial(_run_alone, subject, setting), 1, start_method="spawn")[0]
        except Exception as error:
            rows.append(Row(subject, "all of it", {"failed": _sentence(error)}, False))
    return rows


def _run_alone(subject: str, setting: Setting, context: WorkerContext) -> list[Row]:
    return list(ALONE[subject].measure(setting, context.device))


def measure_families(setting: Setting, workers: int) -> dict[str, dict[str, Any]]:
    """Train by every plan for so many workers; after a plan that fails a new team goes on with the next one."""
    left, found = list(families.plans_of(workers, setting.quick)), dict[str, dict[str, Any]]()

    def hear(rank: int, message: dict[str, Any]) -> None:
        found[message["plan"]] = message
        print(f"  {message['plan']}: {message['figures']['seconds']:.1f} s", flush=True)

    while left:
        try:
            with environment_of(setting):
                work = partial(families.run_plans, tuple(left), setting)
                start_workers(work, workers, hear, start_method="spawn")
            break
        except Exception as error:
            failed = next((plan for plan in left if plan not in found), left[-1])
            found[failed] = {"failed": _sentence(error)}
            print(f"  {failed}: failed, {_sentence(error)}", flush=True)
        left = [plan for plan in left if plan not in found]
    return found


def _sentence(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}"[:200] if lines else type(error).__name__


def describe_machine(setting: Setting) -> dict[str, Any]:
    """Return what the report says of the machine."""
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if setting.device == "cuda" else "CPU"
    said = {"device": device, "torch": torch.__version__, "CUDA": torch.version.cuda or "none"}
    return {**said, "quick": "yes, its figures mean nothing"} if setting.quick else said
