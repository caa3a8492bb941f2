"""What a forward keeps in plain attributes goes on from a checkpoint, or is refused at the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from tests.checkpoint.saved_runs import compile_once, on_workers, train


class Fade(nn.Module):
    """Its learning signal fades with the number of steps that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seen = 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen.append(len(self.seen))
        return x / (self.steps + self.seen[-1])


class ToldFade(Fade):
    """Says how to save what it keeps."""

    def get_extra_state(self) -> Any:
        return {"steps": self.steps, "weights": torch.tensor([1.0, 2.0])}

    def set_extra_state(self, state: Any) -> None:
        assert torch.equal(state["weights"], torch.tensor([1.0, 2.0]))
        self.restored = state["steps"]


def fading(kind: type[Fade] = Fade) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4), kind()).double()


def told_fading() -> nn.Module:
    return fading(ToldFade)


class WithTensor(nn.Module):
    """Keeps a tensor where nobody saves it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)
        self.mean = torch.zeros(4, dtype=torch.float64)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        return y - self.mean


@pytest.mark.parametrize(
    ("plan", "then"), [("data=1", "data=1"), ("data=2", "data=2"), ("data=2", "data=1"), ("pipeline=2", "data=2")]
)
def test_a_count_goes_on(plan: str, then: str, tmp_path: Path) -> None:
    plan, then = (f"{each},microbatches=1" for each in (plan, then))

    def unbroken(job: Job) -> list[float]:
        train(job, 2)
        job.save_checkpoint(tmp_path)
        return train(job, 2)

    def resumed(job: Job) -> list[float]:
        job.load_checkpoint(tmp_path)
        return train(job, 2)

    expected = on_workers(compile_once(plan, fading), unbroken)[0]
    found = on_workers(compile_once(then, fading), resumed)[0]
    if plan == then:
        assert found == expected
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_extra_state_is_saved_and_set(tmp_path: Path) -> None:
    prepared = compile_once("data=1", told_fading)

    def save(job: Job) -> None:
        train(job, 2)
        job.save_checkpoint(tmp_path)

    def load(job: Job) -> int:
        job.load_checkpoint(tmp_path)
        return int(job.model[3].restored)

    on_workers(prepared, save)
    assert on_workers(prepared, load) == [2]


def test_what_no_file_can_hold_is_refused_at_the_first_save(tmp_path: Path) -> None:
    def save(job: Job) -> str:
        train(job, 1)
        try:
            job.save_checkpoint(tmp_path)
        except PolylaneError as error:
            return str(error)
        return ""

    first, second = on_workers(compile_once("data=2", WithTensor), save)
    assert first == second
    assert "writes" in first and "mean" in first and "a Tensor" in first and "register_buffer" in first
