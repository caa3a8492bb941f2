"""A script that trains under several plans, one after the other: tests start it with torchrun on several hosts.

Its arguments: the file that rank 0 writes, and the plans.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane


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


if __name__ == "__main__":
    main()
