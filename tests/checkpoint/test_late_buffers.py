"""Running statistics of a later stage, before any step was made: in a new job, and after a checkpoint was loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from polylane.checkpoint.read_tensors import read_weights
from polylane.checkpoint.store import open_checkpoint
from polylane.runtime.job import Job
from tests.checkpoint.saved_runs import compile_once, example_of, on_workers, train

PLANS = ["pipeline=2", "pipeline=2,schedule=interleaved", "tensor=2"]


def late_norm() -> nn.Module:
    """A network whose BatchNorm is in the last stage of any pipeline."""
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    return nn.Sequential(*layers, nn.Linear(8, 4)).double()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("plan", PLANS)
def test_a_checkpoint_before_the_first_step_is_whole(plan: str, tmp_path: Path) -> None:
    on_workers(compile_once(plan, late_norm), lambda job: job.save_checkpoint(tmp_path))
    assert same(dict(read_weights(*open_checkpoint(tmp_path))), late_norm().state_dict())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")

    def work(job: Job) -> None:
        train(job, 3)
        job.save_checkpoint(folder)

    on_workers(compile_once("data=1", late_norm), work)
    return folder


@pytest.mark.parametrize("plan", PLANS)
def test_what_was_loaded_is_what_is_saved_and_evaluated(plan: str, trained: Path, tmp_path: Path) -> None:
    """Weights are handed on from a checkpoint without a step: its statistics were those of a new model."""

    def work(job: Job) -> tuple[dict[str, Tensor], float]:
        job.load_checkpoint(trained)
        state = job.state_dict()
        job.save_checkpoint(tmp_path / job.plan.spec)
        return state, float(job.evaluate(example_of(job.model)))

    expected = dict(read_weights(*open_checkpoint(trained)))
    ((_, loss),) = on_workers(compile_once("data=1", late_norm), work)
    for state, found in on_workers(compile_once(plan, late_norm), work):
        assert same(state, expected) and found == pytest.approx(loss, rel=1e-12)
    for folder in tmp_path.iterdir():
        assert same(dict(read_weights(*open_checkpoint(folder))), expected)
