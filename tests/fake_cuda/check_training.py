"""Run on the pretended device: what captures again in mid-training computes there what it computes on the host.

Batches of other lengths, a setting of the model that a script changes, evaluation, the whole model, a checkpoint: by
plans of which a worker holds a part of the model on its device. ``python check_training.py PLAN ...`` prints losses.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import start_workers


class Network(nn.Module):
    """Two layers over positions, behind a table; a temperature that is no tensor, and a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.second = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.norm, self.temperature = nn.BatchNorm1d(8), 1.0
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(self.table(tokens))).transpose(1, 2)).transpose(1, 2)
        return self.second(x) / self.temperature


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """A batch whose length is another one in every third step."""
    random = torch.Generator().manual_seed(step)
    shape = (4, 7 if step % 3 == 2 else 5)
    return torch.randint(11, shape, generator=random), torch.randint(11, shape, generator=random)


def train(plan: str, folder: str, context: WorkerContext) -> list[float]:
    """Return losses, and sums over the weights, of a training by a plan."""
    job = polylane.parallelize(Network(), loss, adamw, example=batch_of(0), plan=plan, audit="off")
    found = [job.step(batch_of(step)).loss for step in range(4)]
    job.model.temperature = 2.0  # type: ignore[assignment]
    found += [job.step(batch_of(step)).loss for step in range(4, 7)]
    found += [job.evaluate(batch_of(step)) for step in (7, 8)]
    with job.whole_model() as model:
        found.append(add_up(model.state_dict()) if context.rank == 0 else 0.0)
    job.save_checkpoint(folder)
    found.append(job.step(batch_of(9)).loss)
    job.load_checkpoint(folder)
    found += [job.step(batch_of(step)).loss for step in (9, 11)]
    found.append(add_up(job.state_dict()))
    job.close()
    return found


def adamw(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=0.01)


def add_up(state: Mapping[str, Tensor]) -> float:
    return float(sum(value.detach().double().abs().sum().cpu() for value in state.values()))


if __name__ == "__main__":
    for each in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as saved:
            print(json.dumps(start_workers(partial(train, each, saved), 2, start_method="spawn")[0]), flush=True)
