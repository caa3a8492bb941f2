"""Log statements: nothing computed depends on them, and they are run once a step with the loss of the whole batch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.capture.python.log_statements import split_log_statements
from polylane.runtime.job import Job
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers

Loss = Callable[[Any, Any], Tensor]
SAMPLES, STEPS = 6, 3
PLANS = ("data=2", "pipeline=2,microbatches=3", "data=2,shard=parameters,microbatches=2", "tensor=2")


class Meter:
    """What keeps a sum, as people write it."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


history: list[float] = []
tensors: list[Tensor] = []
meter = Meter()
table = {"losses": [], "scale": 1.0}  # type: ignore[var-annotated]
calls = 0
SCALE = 2.0


def appended(model: nn.Module, batch: Any) -> Tensor:
    """Keep a history."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    history.append(loss.item())
    return loss


def counted(model: nn.Module, batch: Any) -> Tensor:
    global calls
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if int(os.environ.get("RANK", 0)) == 0:
        calls += 1
        if calls % 2 == 0:
            print("calls", calls)
    return loss


def averaged(model: nn.Module, batch: Any) -> Tensor:
    loss = SCALE * F.cross_entropy(model(batch[0]), batch[1])
    value = float(loss.detach())
    if not math.isnan(value):
        meter.update(value)
    with torch.no_grad():
        tensors.append(loss.detach().exp())
    table["losses"] = [*table["losses"], value]
    return loss


def update_meter(loss: Tensor) -> None:
    meter.update(loss.item())


def by_function(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    update_meter(loss)
    return loss


CUT = [appended, counted, averaged, by_function]


def read_again(model: nn.Module, batch: Any) -> Tensor:
    weight = 1.0 if not history else 0.5
    loss = weight * F.cross_entropy(model(batch[0]), batch[1])
    history.append(loss.item())
    return loss


def scaled_by_state(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1]) * (1 + calls)
    global_count()
    return loss


def global_count() -> None:
    global calls
    calls += 1


def in_place(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    history.append(loss.item())
    loss.mul_(2)
    return loss


def of_a_part(model: nn.Module, batch: Any) -> Tensor:
    part = F.cross_entropy(model(batch[0]), batch[1])
    history.append(part.item())
    loss = 2 * part
    history.append(0.0)
    return loss


def of_outputs(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    loss = F.cross_entropy(output, batch[1])
    history.append((output.argmax(1) == batch[1]).double().mean().item())
    return loss


def differentiated(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.register_hook(lambda gradient: 2 * gradient)
    return loss


def of_settings(model: nn.Module, batch: Any) -> Tensor:
    torch.manual_seed(3)
    loss = F.cross_entropy(F.dropout(model(batch[0])), batch[1])
    os.environ["SEEN"] = "1"
    return loss


def refusing(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if torch.isnan(loss):
        raise ValueError("no number")
    return loss


def by_alias(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    same = loss
    same.mul_(2)
    return loss


def in_memory_of_the_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    array = loss.detach().numpy()
    array *= 2
    return loss


callbacks = {"log": history.append, "scale": lambda loss: loss.mul_(2)}


def by_callbacks(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    for call in callbacks.values():
        call(loss)
    return loss


scheduler = None


def of_a_scheduler(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    scheduler.step(loss.item())  # type: ignore[attr-defined]
    return loss


callback = None


def by_what_comes_later(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    callback(loss)  # type: ignore[misc]
    return loss


NOT_CUT = [
    *(by_what_comes_later, by_alias, in_memory_of_the_loss, by_callbacks, of_a_scheduler),
    *[read_again, scaled_by_state, in_place, of_a_part, of_outputs, differentiated, of_settings, refusing],
]


class Scaled(nn.Linear):
    """Reads what the loss of the same file writes."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1.0 if meter.count < 2 else 0.5)


def network(last: type[nn.Linear] = nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), last(8, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, 4, generator=random).double(), torch.randint(0, 3, (SAMPLES,), generator=random))
        for _ in range(STEPS)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.3)


def notes() -> tuple[Any, ...]:
    return [*history], [float(each) for each in tensors], (meter.total, meter.count), [*table["losses"]], calls


@pytest.fixture(autouse=True)
def no_notes() -> None:
    global calls
    calls, meter.total, meter.count, table["losses"] = 0, 0.0, 0, []
    history.clear()
    tensors.clear()


@pytest.mark.parametrize("loss", CUT)
def test_what_only_notes_is_cut_out(loss: Loss) -> None:
    without, log = split_log_statements(loss, network(), [sgd])
    assert log is not None and log.loss is loss
    (batch, *_), before = batches(), notes()
    torch.testing.assert_close(without(network(), batch), F.cross_entropy(network()(batch[0]), batch[1]) * factor(loss))
    assert notes() == before
    assert log.reads_loss is (loss is not counted)
    assert log.source.startswith(f"{__file__}:")


def factor(loss: Loss) -> float:
    return SCALE if loss is averaged else 1.0


@pytest.mark.parametrize("loss", NOT_CUT)
def test_what_is_computed_with_or_looks_at_more_stays(loss: Loss) -> None:
    assert split_log_statements(loss, network(), [sgd]) == (loss, None)


def test_what_the_model_or_the_optimizer_reads_stays() -> None:
    assert split_log_statements(averaged, network(Scaled), [sgd]) == (averaged, None)
    assert split_log_statements(averaged, network(), [lambda parameters: meter])[1] is None

    class Slower(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] = 0.1 / max(1, len(history))
            return super().step(closure)

    assert split_log_statements(appended, network(), [lambda parameters: Slower(parameters, 0.1)])[1] is None
    Slower([nn.Parameter(torch.zeros(1))], 0.1)  # torch puts a function of its own around the class's step() now
    assert split_log_statements(appended, network(), [lambda parameters: Slower(parameters, 0.1)])[1] is None
    note = {"seen": 0}

    def noting(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        note["seen"] += 1
        return loss

    assert split_log_statements(noting, network(), [sgd])[1] is not None
    assert split_log_statements(noting, network(), [lambda parameters: note])[1] is None


@pytest.mark.parametrize("loss", CUT)
def test_notes_are_those_of_one_device(loss: Loss, capfd: pytest.CaptureFixture[str]) -> None:
    noted_alone = fork_workers(lambda _: train_plainly(loss), 1)[0]
    printed_alone = capfd.readouterr().out
    for plan in PLANS if loss is averaged else PLANS[:1]:
        problem = TrainingProblem(network(), build_objectives(loss, sgd, None), batches()[0])
        for noted in train_by_plan(problem, plan):
            assert flat(noted) == pytest.approx(flat(noted_alone), rel=1e-9, abs=1e-12)
        assert capfd.readouterr().out == printed_alone


def train_by_plan(problem: TrainingProblem, plan: str) -> list[tuple[Any, ...]]:
    """Return what each worker has noted."""
    prepared = compile_training(problem, plan)
    assert not any(node.op == "leaf" for node in prepared.main_partition.graph.nodes)

    def run(context: WorkerContext) -> tuple[Any, ...]:
        job = Job(prepared, context.world, example=batches()[0], seed=5)
        for batch in batches():
            job.step(batch)
        job.close()
        return notes()

    return fork_workers(run, prepared.plan.processes)


def train_plainly(loss: Loss) -> tuple[Any, ...]:
    model = network()
    optimizer = sgd(model.named_parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return notes()


def flat(noted: tuple[Any, ...]) -> list[float]:
    return [float(value) for part in noted for value in (part if isinstance(part, list | tuple) else [part])]
