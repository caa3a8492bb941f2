"""Trainings that look innocent at first: later the script around the steps changes something, on every worker."""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.equivalence.trainings.late_changes import ANYWHERE, even_batches, innocent, layers
from tests.equivalence.trainings.training import STATE, Training, classify, perceptron, seeded

Start = Callable[..., Any]
Script = Callable[[Start], tuple[list[float], Any]]


def scripted(refusable: tuple[str, ...] = ANYWHERE) -> Callable[[Script], Callable[[], Training]]:
    """Enter a script into the table under its function's name."""

    def enter(script: Script) -> Callable[[], Training]:
        def make() -> Training:
            return Training(perceptron(), classify, list, STATE, refusable, script=script)

        make.__name__ = script.__name__
        return innocent(make)

    return enter


def momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.2, momentum=0.9)


BATCHES = even_batches()
net = seeded(layers)


def started(start: Start, model: nn.Module | None = None, loss: Any = classify, **how: Any) -> Any:
    return start(model or net(), loss, momentum, example=BATCHES[0], **how)


def finished(job: Any, losses: list[float]) -> tuple[list[float], Any]:
    state = job.state_dict()
    job.close()
    return losses, state


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@scripted(())
def rates_by_hand(start: Start) -> Any:
    job, losses = started(start), []
    for step, batch in enumerate(BATCHES):
        for group in job.optimizer.param_groups:
            group["lr"] = 0.2 * min(1.0, (step + 1) / 3) if step < 5 else 0.02
        losses.append(job.step(batch).loss)
    return finished(job, losses)


@scripted(())
def scheduler_of_the_script(start: Start) -> Any:
    job, losses = started(start), []
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, factor=0.1, patience=0, threshold=0.02)
    for batch in BATCHES:
        losses.append(job.step(batch).loss)
        plateau.step(losses[-1])
    return finished(job, losses)


@scripted()
def rolled_back(start: Start) -> Any:
    """Weights of an earlier step come back where the loss has risen."""
    job, losses, best = started(start), list[float](), None
    for batch in BATCHES:
        losses.append(job.step(batch).loss)
        if best is None or losses[-1] < best[0]:
            best = losses[-1], job.state_dict()
        else:
            job.model.load_state_dict(best[1])
    return finished(job, losses)


@scripted()
def loaded_after_the_start(start: Start) -> Any:
    torch.manual_seed(3)
    other = layers().double()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(other.state_dict(), f"{folder}/weights.pt")
        job = started(start)
        job.model.load_state_dict(torch.load(f"{folder}/weights.pt"))
    return finished(job, [job.step(batch).loss for batch in BATCHES])


@scripted()
def neuron_switched_off(start: Start) -> Any:
    """The script zeroes a row of a weight after each step, from the third on."""
    job, losses = started(start), []
    for step, batch in enumerate(BATCHES):
        losses.append(job.step(batch).loss)
        if step > 2:
            with torch.no_grad():
                job.model[2].weight[1].zero_()
    return finished(job, losses)


@scripted()
def decayed_by_hand(start: Start) -> Any:
    job, losses = started(start), []
    for batch in BATCHES:
        losses.append(job.step(batch).loss)
        for parameter in job.model.parameters():
            parameter.data.mul_(0.95)
    return finished(job, losses)


@scripted()
def weights_as_a_vector(start: Start) -> Any:
    """Weights are averaged with the first ones as one long vector, in midcourse."""
    job, losses = started(start), []
    first = nn.utils.parameters_to_vector(job.model.parameters()).detach().clone()
    for step, batch in enumerate(BATCHES):
        losses.append(job.step(batch).loss)
        if step == 3:
            now = nn.utils.parameters_to_vector(job.model.parameters()).detach()
            nn.utils.vector_to_parameters(0.5 * (first + now), job.model.parameters())
    return finished(job, losses)


@scripted()
def average_beside(start: Start) -> Any:
    """An average of the weights is kept beside them, and is what the script ends with."""
    job, losses = started(start), []
    average = torch.optim.swa_utils.AveragedModel(job.model)
    for batch in BATCHES:
        losses.append(job.step(batch).loss)
        average.update_parameters(job.model)
    state = {name: value.clone() for name, value in average.module.state_dict().items()}
    job.close()
    return losses, state


@scripted()
def best_copied(start: Start) -> Any:
    """The best model is kept as a copy."""
    job, losses, best = started(start), list[float](), None
    for batch in BATCHES:
        losses.append(job.step(batch).loss)
        if losses[-1] == min(losses):
            best = copy.deepcopy(job.model)
    job.close()
    assert best is not None
    return losses, best.state_dict()


@scripted(())
def ended_early(start: Start) -> Any:
    job, losses = started(start), list[float]()
    for batch in BATCHES:
        losses.append(job.step(batch).loss)
        if len(losses) > 3 and losses[-1] < 1.43:
            break
    return finished(job, losses)


@scripted(())
def evaluated_between(start: Start) -> Any:
    """Evaluation between steps, of a model that counts its passes while it trains."""

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.passes += 1
                return torch.where(self.passes > 3, 2 * x, x)
            return x

    job, losses = started(start, seeded(lambda: layers(Passes()))()), []
    for step, batch in enumerate(BATCHES):
        losses += [job.step(batch).loss] + ([job.evaluate(batch)] if step % 2 else [])
    return finished(job, losses)


@scripted()
def counted_on_the_first_rank(start: Start) -> Any:
    """The first rank alone counts and reports within the loss; after some steps the count matters to it."""
    calls = {"count": 0}

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        value = classify(model, batch)
        if rank() == 0:
            calls["count"] += 1
            if calls["count"] % 4 == 0:
                print("calls", calls["count"], end="\r")
        return value

    job = started(start, loss=loss)
    return finished(job, [job.step(batch).loss for batch in BATCHES])


@scripted()
def loss_of_the_first_rank(start: Start) -> Any:
    """A term that only the first rank has: in a single process, that is everybody."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + (0.3 * logits.square().mean() if rank() == 0 else 0.0)

    job = started(start, loss=loss)
    return finished(job, [job.step(batch).loss for batch in BATCHES])


@scripted()
def batches_part_later(start: Start) -> Any:
    """Ranks draw from generators that part after the first step: each has batches of its own."""
    job, losses = started(start), []
    for step, (x, y) in enumerate(BATCHES):
        noise = torch.Generator().manual_seed(step if step < 2 else 10 * step + rank())
        losses.append(job.step((x + torch.randn(x.shape, generator=noise, dtype=x.dtype), y)).loss)
    return finished(job, losses)


@scripted(())
def batches_of_a_loader(start: Start) -> Any:
    """A loader that shuffles with torch's global generator, which the script has seeded alike everywhere."""
    job, losses = started(start), []
    torch.manual_seed(7)
    x, y = (torch.cat(parts)[:48] for parts in zip(*BATCHES, strict=True))
    for _ in range(2):
        losses += [job.step(batch).loss for batch in DataLoader(TensorDataset(x, y), 16, shuffle=True)]
    return finished(job, losses)


@scripted(())
def noise_of_the_script(start: Start) -> Any:
    """The script draws between steps, from torch and from Python."""
    torch.manual_seed(1)
    random.seed(1)
    job, losses = started(start), []
    torch.manual_seed(2)
    random.seed(2)
    for x, y in BATCHES:
        losses.append(job.step((x + 0.1 * torch.randn_like(x) + 0.1 * random.random(), y)).loss)
    return finished(job, losses)


@scripted(())
def one_buffer_for_batches(start: Start) -> Any:
    """Every batch is copied into the same tensors, which the script writes again as soon as a step returns."""
    job, results = started(start), []
    x, y = (part.clone() for part in BATCHES[0])
    for features, labels in BATCHES[:-1]:
        x.copy_(features)
        y.copy_(labels)
        results.append(job.step((x, y)))
        x.fill_(float("nan"))
    return finished(job, [result.loss for result in results])


@scripted()
def rate_by_gradients_at_hand(start: Start) -> Any:
    """The script looks at the gradients of the model's parameters, and lowers the rate where they are large."""
    job, losses = started(start), []
    for batch in BATCHES:
        losses.append(job.step(batch).loss)
        squares = [p.grad.square().sum() for p in job.model.parameters() if p.grad is not None]
        norm = float(torch.stack(squares).sum().sqrt())
        for group in job.optimizer.param_groups:
            group["lr"] = 0.2 / (1 + norm)
    return finished(job, losses)


@scripted()
def rate_by_weights_at_hand(start: Start) -> Any:
    """The same by the norm of the weights."""
    job, losses = started(start), []
    for batch in BATCHES:
        losses.append(job.step(batch).loss)
        norm = float(torch.stack([p.detach().square().sum() for p in job.model.parameters()]).sum().sqrt())
        for group in job.optimizer.param_groups:
            group["lr"] = 1 / (1 + norm)
    return finished(job, losses)


@scripted(())
def rate_by_whole_gradients(start: Start) -> Any:
    job, losses = started(start), []
    for batch in BATCHES:
        losses.append(job.step(batch).loss)
        squares = [gradient.square().sum() for gradient in job.whole_gradients().values() if gradient is not None]
        for group in job.optimizer.param_groups:
            group["lr"] = 0.2 / (1 + float(torch.stack(squares).sum().sqrt()))
    return finished(job, losses)


@scripted()
def momentum_forgotten(start: Start) -> Any:
    """The script zeroes what the optimizer remembers, in midcourse."""
    job, losses = started(start), []
    for step, batch in enumerate(BATCHES):
        losses.append(job.step(batch).loss)
        if step == 3:
            for state in job.optimizer.state.values():
                state["momentum_buffer"].zero_()
    return finished(job, losses)


@scripted()
def frozen_by_the_script(start: Start) -> Any:
    """A part is frozen, and thawed again."""
    job, losses = started(start), []
    for step, batch in enumerate(BATCHES):
        job.model[0].requires_grad_(not 2 <= step < 4)
        losses.append(job.step(batch).loss)
    return finished(job, losses)


@scripted()
def second_training_of_the_same_model(start: Start) -> Any:
    """First the head alone, then a second job on the same model trains all of it."""
    model = net()
    for layer in list(model)[:-1]:  # type: ignore[arg-type]
        layer.requires_grad_(False)

    def head(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.2)

    first = start(model, classify, head, example=BATCHES[0])
    losses = [first.step(batch).loss for batch in BATCHES[:3]]
    model.load_state_dict(first.state_dict())
    first.close()
    model.requires_grad_(True)
    second = started(start, model)
    losses += [second.step(batch).loss for batch in BATCHES[3:]]
    return finished(second, losses)


@scripted()
def two_trainings_at_once(start: Start) -> Any:
    """Two jobs in turn, of which one teaches the other through a loss that runs its model."""
    teacher, student = net(), seeded(lambda: nn.Sequential(nn.Linear(6, 4)))()
    first = started(start, teacher)

    def distilled(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            target = teacher(batch[0])
        return F.mse_loss(model(batch[0]), target)

    second = started(start, student, distilled)
    losses = []
    for batch in BATCHES:
        losses += [first.step(batch).loss, second.step(batch).loss]
    state = second.state_dict()
    second.close()
    first.close()
    return losses, state


# What only one rank does: in a single process everybody is the first.


@scripted()
def rate_lowered_on_the_first_rank(start: Start) -> Any:
    job, losses = started(start), []
    for step, batch in enumerate(BATCHES):
        if rank() == 0 and step == 3:
            job.optimizer.param_groups[0]["lr"] *= 0.1
        losses.append(job.step(batch).loss)
    return finished(job, losses)


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = layers(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / self.temperature


@scripted()
def setting_changed_on_the_first_rank(start: Start) -> Any:
    job, losses = started(start, seeded(Tempered)()), []
    for step, batch in enumerate(BATCHES):
        if rank() == 0 and step == 3:
            job.model.temperature = 2.0
        losses.append(job.step(batch).loss)
    return finished(job, losses)


@scripted()
def weights_loaded_on_the_first_rank(start: Start) -> Any:
    job, losses = started(start), []
    for step, batch in enumerate(BATCHES):
        if rank() == 0 and step == 3:
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.mul_(0.5)
        losses.append(job.step(batch).loss)
    return finished(job, losses)


@scripted()
def built_otherwise_on_the_first_rank(start: Start) -> Any:
    """Of equal layers, of which one is scaled by what a rank was told: in a single process by one."""
    model = seeded(Tempered)()
    model.temperature = 1.0 + rank()
    job = started(start, model)
    return finished(job, [job.step(batch).loss for batch in BATCHES])
