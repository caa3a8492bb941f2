"""Placed training: one training under several plans, wherever its workers are placed, and its comparison.

Run as a script, which a launcher may start, it trains under one plan after the other; its arguments are the file that
rank 0 writes, and the plans.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane

SCRIPT = str(Path(__file__))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 16), nn.Tanh(),
        nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4),
    ).double()  # fmt: skip


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1, momentum=0.9)


def main() -> None:
    out, *plans = sys.argv[1:]
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    dataset = [(torch.randn(6, generator=random, dtype=torch.float64), i % 4) for i in range(48)]
    example = torch.utils.data.default_collate(dataset[:16])
    results = {}
    for plan in plans:
        job = polylane.parallelize(build_model(), loss, optimizer, example=example, plan=plan)
        losses = [float(job.step(batch).loss) for batch in job.batches(dataset, 16, epochs=2)]
        weights = {name: value.flatten().tolist() for name, value in job.state_dict().items()}
        results[plan] = {"losses": losses, "weights": weights}
        job.close()
    if os.environ.get("RANK", "0") == "0":
        with open(out, "w") as file:
            json.dump(results, file)


def train_here(plans: tuple[str, ...], workers: int, folder: Path) -> dict[str, Any]:
    """Train under each plan on this host."""
    out = folder / f"here{workers}.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    command = [sys.executable, *(launch if workers > 1 else []), SCRIPT, str(out), *plans]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def assert_equal(found: dict[str, Any], wanted: dict[str, Any], bound: float) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], abs=bound)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, values in wanted["weights"].items():
        same = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(found["weights"][name], dtype=torch.float64), same, rtol=0, atol=bound)


if __name__ == "__main__":
    main()
