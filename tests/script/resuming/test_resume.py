"""Resumed scripts: interrupted after any step, they end with the weights and the numbers of the unbroken run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import polylane
from polylane.checkpoint.store import CheckpointStore
from polylane.errors import PolylaneError
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.session import ScriptSession, running_session
from tests.script.loops import samples, sums_of


class Interrupted(Exception):
    """What ends a script in the middle of its loop."""


def build(dropout: float) -> Any:
    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def train(interrupted_after: int, numbers: list[tuple[int, float]], dropout: float) -> list[float]:
    """A script with an order, dropout, noise, schedulers of both kinds, numbered batches, sums, and an evaluation.

    Args:
        interrupted_after: number of steps after which it raises an exception.
        numbers: what it prints, each with the number of steps before.
        dropout: probability that a number is dropped; 0: the plain script prints the same.
    """
    torch.manual_seed(5)
    model = build(dropout)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.02)
    by_step: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    by_epoch: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader: Any = DataLoader(samples(18), batch_size=6, shuffle=True)
    tests: Any = DataLoader(samples(12), batch_size=6)
    model, optimizer, loader, tests, by_step, by_epoch = polylane.prepare(
        model, optimizer, loader, tests, by_step, by_epoch
    )
    kept = polylane.resumed(running=0.0, steps=0, best=100.0)
    for epoch in polylane.epochs(range(3)):
        model.train()
        kept.running = 0.0
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
            loss.backward()
            optimizer.step()
            by_step.step()
            kept.running += loss.item()
            kept.steps += 1
            numbers.append((kept.steps, loss.item() + number))
            if kept.steps == interrupted_after:
                raise Interrupted
        by_epoch.step()
        model.eval()
        with torch.no_grad():
            total = sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in tests)
        kept.best = min(kept.best, total)
        numbers += [(kept.steps, kept.running), (kept.steps, kept.best), (kept.steps, epoch)]
    return sums_of(model)


def run_script(plan: str, folder: Path, dropout: float, interrupted_after: int = 0) -> Any:
    """Run the script on workers, from the newest checkpoint of the folder; return its numbers and its weights."""
    newest = CheckpointStore(folder).find_newest() if folder.exists() else None

    def run(context: WorkerContext) -> tuple[list[tuple[int, float]], list[float]]:
        numbers, weights = list[tuple[int, float]](), list[float]()
        session = ScriptSession(plan, context.world, folder, newest, "1")
        with running_session(session):
            with suppress(Interrupted):
                weights = train(interrupted_after, numbers, dropout)
            for loop in session.loops:
                loop.close()
        assert enumerate is type(enumerate(()))
        return numbers, weights

    results = fork_workers(run, 2 if "2" in plan else 1)
    for numbers, weights in results[1:]:
        assert [number for _, number in numbers] == pytest.approx([number for _, number in results[0][0]], rel=1e-12)
        assert weights == pytest.approx(results[0][1], rel=1e-12)
    return results[0]


def compare(numbers: Any, expected: Any) -> None:
    assert [step for step, _ in numbers] == [step for step, _ in expected]
    assert [number for _, number in numbers] == pytest.approx([number for _, number in expected], rel=1e-9)


def check(expected: Any, plan: str, next_plan: str, steps: int, dropout: float, folder: Path) -> None:
    """Interrupt the script after some steps, resume it, and compare it with the numbers and weights of the unbroken."""
    numbers, weights = expected
    begun, _ = run_script(plan, folder, dropout, steps)
    resumed, resumed_weights = run_script(next_plan, folder, dropout)

    compare(begun, numbers[: len(begun)])
    # The last step is made again: its checkpoint would be taken where the next batch is asked for.
    assert steps - 1 <= resumed[0][0] <= steps
    assert len(resumed) > len(numbers) - len(begun)
    compare(resumed, numbers[-len(resumed) :])
    assert resumed_weights == pytest.approx(weights, rel=1e-9)


def test_a_resumed_script_ends_as_the_plain_one(tmp_path: Path) -> None:
    numbers = list[tuple[int, float]]()
    with running_session(ScriptSession()):
        weights = train(0, numbers, 0.0)
    assert len(numbers) == 9 + 9
    check((numbers, weights), "data=1", "pipeline=2", 5, 0.0, tmp_path)


CASES = [
    ("data=2", "pipeline=2", 6),
    ("data=1", "data=1", 3),
    ("pipeline=2", "data=2,shard=parameters", 4),
    ("data=2,shard=parameters", "tensor=2", 5),
    ("tensor=2", "data=1", 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "next_plan", "steps"), CASES)
def test_a_resumed_script_drops_what_the_unbroken_one_drops(
    plan: str, next_plan: str, steps: int, tmp_path: Path
) -> None:
    expected = run_script("data=1", tmp_path / "unbroken", 0.2)
    check(expected, plan, next_plan, steps, 0.2, tmp_path / "run")


def search(interrupted_after: int, numbers: list[float]) -> list[float]:
    """A script whose optimizer evaluates the loss as often as it likes, and remembers directions."""
    torch.manual_seed(5)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)
    model, optimizer, loader = polylane.prepare(model, optimizer, DataLoader(samples(24), batch_size=6))
    for epoch in polylane.epochs(range(2)):
        for number, (x, y) in enumerate(loader):

            def evaluate(x: Any = x, y: Any = y) -> Any:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            numbers.append(float(optimizer.step(evaluate)))
            if 4 * epoch + number + 1 == interrupted_after:
                raise Interrupted
    return sums_of(model)


@pytest.mark.parametrize(("plan", "next_plan"), [("data=1", "tensor=2")])
def test_optimizers_that_step_by_themselves_resume_with_their_states(plan: str, next_plan: str, tmp_path: Path) -> None:
    def run_search(plan: str, interrupted_after: int = 0) -> tuple[list[float], list[float]]:
        newest = CheckpointStore(tmp_path).find_newest()

        def run(context: WorkerContext) -> tuple[list[float], list[float]]:
            numbers, weights = list[float](), list[float]()
            session = ScriptSession(plan, context.world, tmp_path, newest, "1")
            with running_session(session):
                with suppress(Interrupted):
                    weights = search(interrupted_after, numbers)
                for loop in session.loops:
                    loop.close()
            return numbers, weights

        return fork_workers(run, 2 if "2" in plan else 1)[0]

    expected = list[float]()
    with running_session(ScriptSession()):
        weights = search(0, expected)
    begun, _ = run_search(plan, 5)
    resumed, resumed_weights = run_search(next_plan)
    assert begun == pytest.approx(expected[:5], rel=1e-9)
    assert 3 <= len(resumed) <= 4
    assert resumed == pytest.approx(expected[-len(resumed) :], rel=1e-9)
    assert resumed_weights == pytest.approx(weights, rel=1e-9)


def test_a_script_that_ends_before_its_checkpoint_says_so(tmp_path: Path) -> None:
    run_script("data=1", tmp_path, 0.0, 8)

    def run(context: WorkerContext) -> None:
        session = ScriptSession("data=1", context.world, tmp_path, CheckpointStore(tmp_path).find_newest(), "1")
        with running_session(session):
            model = build(0.0)
            polylane.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(samples(18), batch_size=6))
            for _ in polylane.epochs(range(1)):
                pass
            session.close()

    with pytest.raises(PolylaneError, match="was saved in epoch 3, and the script has ended before it came there"):
        fork_workers(run, 1)


def test_a_script_without_an_optimizer_is_told_that_nothing_is_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(context: WorkerContext) -> None:
        with running_session(ScriptSession("data=1", context.world, tmp_path, None, "1")):
            polylane.prepare(build(0.0))

    fork_workers(run, 1)
    assert "no checkpoints are saved" in "".join(capfd.readouterr())
