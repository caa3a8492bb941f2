"""Every batch is looked at as the example was: one number of samples in all tensors that have samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polylane
from polylane.errors import PolylaneError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, batch: Any) -> Tensor:
        first, *others = batch.values() if isinstance(batch, dict) else batch
        return self.fc(first).mean() + sum(other.float().mean() for other in others)


def job_of(example: Any) -> polylane.Job:
    return polylane.parallelize(
        Net(), lambda model, batch: model(batch), lambda p: torch.optim.SGD(p, 0.1), example=example, plan="data=1"
    )


def pair(*rows: int) -> tuple[Tensor, ...]:
    return tuple(torch.ones(n, 5) for n in rows)


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize("rows", [(8, 9), (9, 8), (4, 9), (9, 1)])
def test_time_first(rows: tuple[int, int], call: str) -> None:
    with job_of(pair(9, 9)) as job:
        getattr(job, call)(pair(9, 9))
        with pytest.raises(PolylaneError, match=r"batch\[0\] has the shape \[\d, 5\] and batch\[1\] .*looks like time"):
            getattr(job, call)(pair(*rows))
        getattr(job, call)(pair(7, 7))


@pytest.mark.parametrize(
    ("example", "later", "said"),
    [
        # One odd tensor of a dict.
        (
            {"x": torch.ones(6, 5), "y": torch.ones(6), "w": torch.ones(6)},
            {"x": torch.ones(6, 5), "y": torch.ones(6), "w": torch.ones(5)},
            r"batch\['x'\] has the shape \[6, 5\] and batch\['w'\] \[5\]",
        ),
        # Class weights, of which the example happens to have as many as samples.
        ((torch.ones(3, 5), torch.ones(3)), (torch.ones(8, 5), torch.ones(3)), r"belongs to the batch as a whole"),
        # The first tensor is the odd one.
        ((torch.ones(4, 5), torch.ones(4, 2)), (torch.ones(3, 5), torch.ones(4, 2)), r"batch\[1\] \[4, 2\]"),
    ],
)
def test_one_odd_tensor(example: Any, later: Any, said: str) -> None:
    with job_of(example) as job, pytest.raises(PolylaneError, match=said):
        job.step(later)


def test_a_tensor_of_the_whole_batch_may_have_any_number_of_rows() -> None:
    example = (torch.ones(6, 5), torch.ones(3))
    with job_of(example) as job:
        for rows in (6, 3, 2):
            job.step((torch.ones(rows, 5), torch.ones(3)))
