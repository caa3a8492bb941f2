"""What an audit allows as rounding follows from the types that a training rounds to, not from what it is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.verify.audit.step_replay import TOLERANCES, list_cast_dtypes, read_rounding
from tests.support.workers.compiling import compile_training


class Casting(nn.Module):
    """A linear layer in float64, on numbers that are cast to another type before."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(4, 2).double(), dtype

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.to(self.dtype).double())
        return result


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


@pytest.mark.parametrize(
    ("given", "cast", "least"),
    [
        (torch.float64, torch.float64, torch.float64),
        (torch.float32, torch.float64, torch.float64),  # more precise than what it is given: nothing is rounded
        (torch.float64, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_types_that_numbers_are_rounded_to_decide(given: torch.dtype, cast: torch.dtype, least: torch.dtype) -> None:
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    objectives = build_objectives(mean_square, optimizer, None)
    prepared = compile_training(Casting(cast), objectives, torch.randn(4, 4, dtype=given), "data=1")
    assert read_rounding(prepared, torch.device("cpu")).tolerance == TOLERANCES[least]
    casts = list_cast_dtypes(prepared.graphs["loss"].partition.graph)
    assert casts == ({least} if least is not torch.float64 else set())
