"""Equality: one worker of polylane beside a plain loop on the same device, and beside the CPU's."""

from __future__ import annotations

import torch

from benchmarks.gpu.setting import Row, Setting, relative_difference
from benchmarks.gpu.trainings import SAMPLES, train_by_plan, train_plainly, trainings

STEPS = 4
IN_FLOAT64 = 1e-9  # relative; what verify allows
FLOORS = 4.0  # a difference within so many rounding floors is rounding
LEAST_FLOOR = 2e-6  # relative: 16 units in the last place of float32, where another order changes nothing


def measure(setting: Setting, device: torch.device) -> list[Row]:
    """Compare every training in float64, and under autocast in bfloat16; runs in one worker."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    for name in trainings():
        if name == "lstm" and device.type == "cuda" and not torch.backends.cudnn.is_available():
            continue  # without cuDNN torch runs it by other kernels, which not every build has
        try:
            rows += [_in_float64(name, device), _under_autocast(name, device)]
        except Exception as error:
            rows.append(Row("equality", name, {"failed": f"{type(error).__name__}: {error}"[:200]}, False))
    return rows


def _in_float64(name: str, device: torch.device) -> Row:
    host = train_plainly(name, STEPS, torch.device("cpu"))
    plain, own = train_plainly(name, STEPS, device), train_by_plan(name, STEPS, "data=1")[0]
    figures = {
        "to a plain loop here": relative_difference(own, plain),
        "to a plain loop on the CPU": relative_difference(own, host),
    }
    return Row("equality", f"{name}, float64", figures, max(figures.values()) < IN_FLOAT64)


def _under_autocast(name: str, device: torch.device) -> Row:
    """Compare in bfloat16 with what the plain loop itself changes by when its samples come in another order."""
    how = {"dtype": torch.float32, "autocast": True}
    plain = train_plainly(name, STEPS, device, **how)
    orders = [torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    floor = max(relative_difference(train_plainly(name, STEPS, device, order=o, **how), plain) for o in orders)
    own = train_by_plan(name, STEPS, "data=1,precision=bfloat16", torch.float32)[0]
    found = relative_difference(own, plain)
    figures = {"to a plain loop here": found, "rounding floor": floor}
    return Row("equality", f"{name}, bfloat16 autocast", figures, found <= FLOORS * max(floor, LEAST_FLOOR))
