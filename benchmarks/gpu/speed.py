"""Speed: a plain loop beside polylane on one device, both compiled too, and the share of the device's matmul rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import polylane
from benchmarks.gpu import gpt
from benchmarks.gpu.setting import Row, Setting, synchronize

WITHIN = 0.02  # of a plain loop's time


def measure(setting: Setting, device: torch.device) -> list[Row]:
    """Time the contenders in turns; runs in one worker."""
    small = setting.quick or device.type == "cpu"
    figures, samples = (gpt.SMALL, 8) if small else (gpt.LARGE, 8)
    batch = tuple(t.to(device) for t in gpt.tokens(samples, figures["length"], figures["vocabulary"]))
    rate, work = measure_matmul_rate(device, 512 if small else 8192), count_flops(figures, samples)
    rows = [Row("speed", "matmul in bfloat16", {"TFLOP/s": rate / 1e12})]
    found: dict[str, float] = {}
    for compiled in (False, True):
        # Two at a time: both are in memory while they take turns.
        pair = {"plain loop": _plain_loop(figures, batch, device, compiled), "polylane": _job(figures, batch, compiled)}
        for name, seconds in time_in_turns(pair, device, 1 if setting.quick else 5, 2 if small else 10).items():
            found[name + ", compiled" * compiled] = seconds
        del pair
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for name, seconds in found.items():
        plain = found["plain loop" + ", compiled" * name.endswith("compiled")]
        columns = {
            "ms a step": seconds * 1e3,
            "of a plain loop": seconds / plain,
            "of the matmul rate": work / seconds / rate,
        }
        judged = name.startswith("polylane") and not small
        rows.append(Row("speed", name, columns, seconds / plain <= 1 + WITHIN if judged else None))
    return rows


def _plain_loop(
    figures: dict[str, int], batch: tuple[torch.Tensor, ...], device: torch.device, compiled: bool
) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = gpt.model(**figures).to(device)
    optimizer = gpt.optimizer(list(model.named_parameters()))
    run = torch.compile(gpt.loss) if compiled else gpt.loss

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = run(model, batch)
        loss.backward()
        optimizer.step()

    return step


def _job(figures: dict[str, int], batch: tuple[torch.Tensor, ...], compiled: bool) -> Callable[[], Any]:
    torch.manual_seed(0)
    plan = "data=1,precision=bfloat16" + ",compile=yes" * compiled
    example = tuple(tensor.cpu() for tensor in batch)
    job = polylane.parallelize(gpt.model(**figures), gpt.loss, gpt.optimizer, example=example, plan=plan)
    return lambda: job.step(batch)


def time_in_turns(
    contenders: dict[str, Callable[[], Any]], device: torch.device, rounds: int, steps: int
) -> dict[str, float]:
    """Return the median seconds of a step of each contender, which take turns of some steps."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(2):
        for step in contenders.values():
            step()
    for _ in range(rounds):
        for name, step in contenders.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize(device)
            found[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measure_matmul_rate(device: torch.device, size: int) -> float:
    """Return the operations per second of a square matmul in bfloat16, the median of five turns."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_in_turns({"matmul": lambda: a @ b}, device, 5, 10)["matmul"]


def count_flops(figures: dict[str, int], samples: int) -> float:
    """Return the operations of a step: 6 for each weight of a matrix and token, and those of causal attention."""
    layers, hidden, length = figures["layers"], figures["hidden"], figures["length"]
    weights = 12 * layers * hidden**2 + hidden * figures["vocabulary"]
    return samples * length * (6 * weights + 6 * layers * hidden * length)
