"""What a user changes between steps (attributes, modes, what is frozen): seen, and trained as the plain loop does."""

from __future__ import annotations

import copy
import functools
import os
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from tests.support import subsets
from tests.support.workers.training import Trained, adamw, assert_same, batch_of, plainly, sgd, workers

BATCHES = [batch_of(8, seed) for seed in range(6)]
SHARPNESS = 1.0
OPTIONS = types.SimpleNamespace(scale=1.0, inner={"shift": 0.0})

Change = Callable[[int, Any], None]


class Scheduled(nn.Module):
    """Has what schedules change."""

    weight_of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0)
        self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.temperature, self.deep, self.config = 1.0, True, {"skip": (0.5, 1)}
        self.mask = torch.ones(8, dtype=torch.float64)
        self.seen_by_the_loop = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(torch.tanh(self.norm(self.first(x)))) * self.mask
        if self.deep:
            y = y + torch.tanh(self.second(y)) * self.config["skip"][0]
        logits: Tensor = self.head(y) / self.temperature * self.weight_of_class
        return logits * float(os.environ.get("POLYLANE_TEST_FACTOR", "1"))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0]) * SHARPNESS * OPTIONS.scale + OPTIONS.inner["shift"]
    return F.cross_entropy(logits, batch[1]) + OPTIONS.inner["shift"] * logits.square().mean()


def scheduled() -> Scheduled:
    torch.manual_seed(0)
    return Scheduled().double()


def temperature(step: int, model: Any) -> None:
    model.temperature = (1.0, 2.0, 0.5)[step % 3]


def branch(step: int, model: Any) -> None:
    model.deep = step % 2 == 0


def dropout(step: int, model: Any) -> None:
    model.drop.p = 1.0 if step in (2, 3) else 0.0


def contents(step: int, model: Any) -> None:
    model.config["skip"] = (step / 2, 1)


def tensors(step: int, model: Any) -> None:
    if step == 2:
        model.mask = torch.linspace(0, 1, 8, dtype=torch.float64)
    if step == 4:
        model.mask[3] = 5.0


def shadows(step: int, model: Any) -> None:
    if step == 3:
        model.weight_of_class = 3.0


def mode(step: int, model: Any) -> None:
    model.norm.train(step not in (2, 3))


def freeze(step: int, model: Any) -> None:
    model.second.requires_grad_(step < 2)
    model.first.weight.requires_grad_(step != 4)


def globally(step: int, model: Any) -> None:
    global SHARPNESS
    SHARPNESS = 1.0 + step % 2


def options(step: int, model: Any) -> None:
    OPTIONS.scale = 1.0 + step / 4
    OPTIONS.inner["shift"] = step / 8


def environment(step: int, model: Any) -> None:
    os.environ["POLYLANE_TEST_FACTOR"] = str(1 + step)


SCHEDULES: dict[str, Change] = {
    each.__name__: each
    for each in (
        temperature, branch, dropout, contents, tensors, shadows, mode, freeze, globally, options, environment
    )
}  # fmt: skip


def plain(model: nn.Module, change: Change, optimizer: Any = sgd) -> Trained:
    """One device, as anybody would write it."""
    model = copy.deepcopy(model)
    steps, losses = optimizer(list(model.named_parameters())), []
    for step, batch in enumerate(BATCHES):
        change(step, model)
        steps.zero_grad()
        value = loss(model, batch)
        value.backward()
        steps.step()
        losses.append(value.item())
    return Trained(losses, dict(model.state_dict()))


def by_plan(model: nn.Module, plan: str, change: Change, optimizer: Any = sgd) -> list[Trained]:
    def work(job: Job) -> Trained:
        losses = []
        for step, batch in enumerate(BATCHES):
            change(step, job.model)
            losses.append(job.step(batch).loss)
        return Trained(losses, job.state_dict())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return workers(work, model, plan, loss=loss, optimizer=optimizer, example=BATCHES[0])


@functools.cache
def unchanged() -> Trained:
    (found,) = fork_workers(lambda _: plain(scheduled(), lambda step, model: None), 1)
    return found


@pytest.mark.parametrize(
    ("name", "plan"),
    subsets.one_in(3, subsets.pairs(SCHEDULES, ["data=1", "data=2", "pipeline=2,microbatches=1"]), several=True),
)
def test_schedules_are_those_of_the_plain_loop(name: str, plan: str) -> None:
    change = SCHEDULES[name]
    (expected,) = fork_workers(lambda _: plain(scheduled(), change), 1)
    assert max(abs(a - b) for a, b in zip(expected.losses, unchanged().losses, strict=True)) > 1e-3
    for worker in by_plan(scheduled(), plan, change):
        assert_same(worker, expected, 1e-9)


FREEZING = ["tensor=2", "data=2,pipeline=2,microbatches=1", "data=2,every=2"]


@pytest.mark.parametrize("plan", subsets.one_in(2, subsets.except_slow(FREEZING, FREEZING[1:2]), first=1))
def test_a_freeze_goes_with_other_plans(plan: str) -> None:
    def change(step: int, model: Any) -> None:
        freeze(step, model)
        temperature(step, model)

    runs = by_plan(scheduled(), plan, change, adamw)
    if "every" not in plan:
        (expected,) = fork_workers(lambda _: plain(scheduled(), change, adamw), 1)
        assert_same(runs[0], expected, 1e-9)
    for worker in runs:
        assert_same(worker, runs[0], 1e-9)


def captures(change: Change, steps: int = 9) -> int:
    """How often a training is captured anew."""

    def work(job: Job) -> int:
        count, own = [0], CompiledTraining.recapture

        def counted(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return own(*args, **kwargs)

        CompiledTraining.recapture = counted  # type: ignore[assignment]
        for step in range(steps):
            change(step, job.model)
            job.step(BATCHES[0])
        return count[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = workers(work, scheduled(), "data=1", loss=loss, example=BATCHES[0])
    return int(found)


def of_the_loop(step: int, model: Any) -> None:
    """What a training loop keeps on a model for itself, and modes that it puts back."""
    model.seen_by_the_loop = model.best = float(step)
    model.eval()
    model.train()


def test_an_earlier_value_has_its_capture_already() -> None:
    assert captures(temperature) == 2
    assert captures(branch) == 1


@pytest.mark.parametrize("change", [of_the_loop, lambda step, model: model.eval(), lambda step, model: None])
def test_what_the_graph_does_not_read_is_not_captured_anew(change: Change) -> None:
    assert captures(change) == 0


def test_captures_are_not_kept_for_ever() -> None:
    def anneal(step: int, model: Any) -> None:
        model.temperature = 1.0 + step

    def work(job: Job) -> int:
        for step in range(12):
            anneal(step, job.model)
            job.step(BATCHES[0])
        return len(job._role._cache)

    with pytest.warns(UserWarning, match="temperature is another one again"):
        model, whole = scheduled(), BATCHES[0]
        import polylane

        job = polylane.parallelize(model, loss, sgd, example=whole, plan="data=1")
        assert work(job) == 8


def evaluated(step: int, job: Job) -> float:
    temperature(step, job.model)
    return job.evaluate(BATCHES[0])


def test_evaluations_follow_a_schedule() -> None:
    (values,) = workers(lambda job: [evaluated(s, job) for s in range(6)], scheduled(), "data=1", loss=loss)
    model = scheduled().eval()
    expected = []
    for step in range(6):
        temperature(step, model)
        expected.append(loss(model, BATCHES[0]).item())
    assert values == pytest.approx(expected, rel=1e-9)


def replace_module(step: int, model: Any) -> None:
    if step == 2:
        model.drop = nn.Identity()


def replace_parameter(step: int, model: Any) -> None:
    if step == 2:
        model.head.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.float64))


REFUSED: Sequence[tuple[Change, str, str]] = [
    (replace_module, "data=1", r"drop was replaced by another module"),
    (replace_parameter, "data=2", r"head\.weight was replaced by another parameter"),
    (freeze, "data=2,servers=1", r"servers=1: second\.weight was frozen, or unfrozen, between steps"),
]


@pytest.mark.parametrize(("change", "plan", "told"), REFUSED)
def test_what_cannot_be_followed_is_refused(change: Change, plan: str, told: str) -> None:
    model = scheduled()
    with pytest.raises(PolylaneError, match=told):
        by_plan(model, plan, change)


def test_no_change_is_the_plain_loop() -> None:
    assert_same(by_plan(scheduled(), "data=1", lambda step, model: None)[0], plainly(scheduled(), BATCHES, loss=loss))
