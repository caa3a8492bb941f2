"""Trainings that look innocent at first: what changes later is in the user's Python, not in the loss.

Each is small and ordinary for some steps. Then a counter runs out, a cache is hit, a schedule goes on, a layer begins
or ends, something is written by hand: what real training code has in places that no loss shows.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import json
import os
import tempfile
import threading
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from tests.equivalence.trainings.training import (
    ALONE,
    MICROBATCHES,
    PLANS,
    STATE,
    Training,
    classified,
    classify,
    seeded,
    training,
)

INNOCENT: list[str] = []
ANYWHERE = (ALONE, *PLANS)
STEPS = 7


def innocent(make: Callable[[], Training]) -> Callable[[], Training]:
    """Enter a training as one that looks innocent on its first batches."""
    INNOCENT.append(make.__name__)
    return training(make)


def even_batches() -> list[tuple[Tensor, Tensor]]:
    """Of one size but the last."""
    return [classified(step, 8 if step < STEPS - 1 else 5) for step in range(STEPS)]


def layers(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def innocent_training(
    model: Callable[[], nn.Module], loss: Any = classify, refusable: tuple[str, ...] = ANYWHERE, **how: Any
) -> Training:
    return Training(seeded(model), loss, even_batches, STATE, refusable, isolated=True, **how)


# Counters, caches and schedules ---------------------------------------------------------------------------------------


class Growing(nn.Module):
    """A block more takes part after every second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.passes = nn.Linear(6, 8), nn.Linear(8, 4), 0
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        for block in self.blocks[: 1 + self.passes // 2]:
            y = y + torch.tanh(block(y))
        self.passes += 1
        return self.last(y)


@innocent
def progressive_growing() -> Training:
    return innocent_training(Growing, in_turn=True)


class Staged(nn.Module):
    """The script says how many blocks take part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.depth = nn.Linear(6, 8), nn.Linear(8, 4), 1
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        for block in self.blocks[: self.depth]:
            y = y + torch.tanh(block(y))
        return self.last(y)


@innocent
def depth_by_the_script() -> Training:
    def before(model: Any, step: int) -> None:
        model.depth = 1 + step // 2

    return innocent_training(Staged, refusable=(), before=before)


class Cached(nn.Module):
    """Keeps a centre for each batch size that it meets: of the first batch of that size."""

    def __init__(self) -> None:
        super().__init__()
        self.centres: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.centres:
            self.centres[len(x)] = x.detach().mean(0)
        return x - self.centres[len(x)]


@innocent
def cached_by_size() -> Training:
    return innocent_training(lambda: layers(Cached()), in_turn=True)


PHASE = {"epoch": 0}


@functools.cache
def temperature(epoch: int) -> float:
    return 1.0 + 0.5 * epoch


@innocent
def schedule_in_a_cached_function() -> Training:
    def before(model: Any, step: int) -> None:
        PHASE["epoch"] = step // 3

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]) / temperature(PHASE["epoch"]), batch[1])

    return innocent_training(layers, loss, (), before=before)


FACTORS = itertools.chain([1.0, 1.0, 1.0, 1.0], itertools.repeat(3.0))


@innocent
def schedule_in_an_iterator() -> Training:
    """A factor for every step comes from an iterator of the module."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return classify(model, batch) * next(FACTORS)

    return innocent_training(layers, loss, in_turn=True)


@innocent
def schedules_in_a_table() -> Training:
    """Iterators in a dictionary of an object, of which two go over the same list."""
    values = [1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 2.0, 2.0]
    schedules = types.SimpleNamespace(of={"main": zip(itertools.count(), values, strict=False), "aux": iter(values)})

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits = model(batch[0])
        main, penalty = next(schedules.of["main"])[1], next(schedules.of["aux"])
        return main * F.cross_entropy(logits, batch[1]) + 0.1 * penalty * logits.square().mean()

    return innocent_training(layers, loss, in_turn=True)


@innocent
def second_loader_in_the_loss() -> Training:
    """Samples without labels come from a loader of the loss's own, one batch a step."""
    loader = iter(DataLoader([sample[0] for step in range(40) for sample in [classified(step, 1)]], batch_size=None))

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return classify(model, batch) + 0.1 * model(next(loader)).square().mean()

    return innocent_training(layers, loss)


def ramp() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value *= 1.5


class Ramped(nn.Module):
    """A generator object says how far a residual counts."""

    def __init__(self) -> None:
        super().__init__()
        self.ramp, self.inner = ramp(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + next(self.ramp) * torch.tanh(self.inner(x))

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a generator cannot be copied


@innocent
def schedule_in_a_generator() -> Training:
    return innocent_training(lambda: layers(Ramped()), in_turn=True)


@innocent
def annealed_by_a_cell() -> Training:
    """A closure counts in a cell, which only the loss reads."""
    calls = 0

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + (0.3 * logits.square().mean() if calls > 4 else 0.0)

    return innocent_training(layers, loss, in_turn=True)


class Averaged:
    """Divides the loss by the mean of its last values."""

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=3)

    def __call__(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        value = classify(model, batch)
        scale = sum(self.last) / len(self.last) if self.last else 1.0
        self.last.append(value.item())
        return value / scale


@innocent
def normalized_by_its_history() -> Training:
    return innocent_training(layers, Averaged(), in_turn=True)


FREQUENCY: Counter[int] = Counter()


@innocent
def weights_by_labels_so_far() -> Training:
    """Classes weigh by how often they were seen until now."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        weights = torch.tensor([1.0 / (1 + FREQUENCY[label]) for label in range(4)], dtype=torch.float64)
        FREQUENCY.update(batch[1].tolist())
        return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights[batch[1]]).mean()

    return innocent_training(layers, loss, in_turn=True)


class Bank(nn.Module):
    """Pulls towards the hardest sample that it has met, of which it keeps the features."""

    def __init__(self) -> None:
        super().__init__()
        self.hardest: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x - 0.1 * self.hardest[-1] if len(self.hardest) > 2 else x
        self.hardest.append(x.detach()[x.detach().norm(dim=1).argmax()])
        return y


@innocent
def memory_of_hard_samples() -> Training:
    return innocent_training(lambda: layers(Bank()), in_turn=True)


# What the script changes between steps --------------------------------------------------------------------------------


class Switched(nn.Module):
    """Reads a thread's setting, a context variable, a class's attribute, and a nested configuration."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.read, self.inner = read, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.read(self) * torch.tanh(self.inner(x))


LOCAL = threading.local()
LOCAL.factor = 0.5


@innocent
def setting_of_a_thread() -> Training:
    def before(model: Any, step: int) -> None:
        LOCAL.factor = 0.5 if step < 3 else 2.0

    return innocent_training(lambda: layers(Switched(lambda module: LOCAL.factor)), refusable=(), before=before)


FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=0.5)


@innocent
def context_variable() -> Training:
    def before(model: Any, step: int) -> None:
        FACTOR.set(0.5 if step < 3 else 2.0)

    return innocent_training(lambda: layers(Switched(lambda module: FACTOR.get())), refusable=(), before=before)


class Scaled(nn.Module):
    factor = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * type(self).factor


@innocent
def attribute_of_a_class() -> Training:
    def before(model: Any, step: int) -> None:
        Scaled.factor = 0.5 if step < 3 else 2.0

    return innocent_training(lambda: layers(Scaled()), refusable=(), before=before)


@dataclass
class Options:
    weights: dict[str, list[float]] = field(default_factory=lambda: {"aux": [0.0, 1.0]})


OPTIONS = types.SimpleNamespace(loss=(Options(),))


@innocent
def nested_options() -> Training:
    """A number in a list in a dictionary in a dataclass in a tuple in a namespace."""

    def before(model: Any, step: int) -> None:
        OPTIONS.loss[0].weights["aux"][0] = 0.0 if step < 3 else 0.5

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + OPTIONS.loss[0].weights["aux"][0] * logits.square().mean()

    return innocent_training(layers, loss, (), before=before)


@innocent
def switched_by_the_environment() -> Training:
    def before(model: Any, step: int) -> None:
        os.environ["AUXILIARY"] = "0" if step < 3 else "1"

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits = model(batch[0])
        penalty = logits.square().mean() if os.getenv("AUXILIARY", "0") == "1" else 0.0
        return F.cross_entropy(logits, batch[1]) + penalty

    return innocent_training(layers, loss, (), before=before)


@innocent
def options_read_from_a_file() -> Training:
    """The loss looks into a file that the script writes: options that can be changed while it runs."""
    path = os.path.join(tempfile.mkdtemp(), "options.json")

    def before(model: Any, step: int) -> None:
        with open(path, "w") as file:
            json.dump({"penalty": 0.0 if step < 3 else 0.5}, file)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        with open(path) as file:
            penalty = json.load(file)["penalty"]
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + penalty * logits.square().mean()

    before(None, 0)
    return innocent_training(layers, loss, before=before)


@innocent
def switched_by_a_file() -> Training:
    """A file that is there or not: a switch of people who watch a run."""
    path = os.path.join(tempfile.mkdtemp(), "penalize")

    def before(model: Any, step: int) -> None:
        if step == 3:
            open(path, "w").close()
        elif step == 0 and os.path.exists(path):  # of an earlier run
            os.remove(path)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + (0.3 * logits.square().mean() if os.path.exists(path) else 0.0)

    return innocent_training(layers, loss, before=before)


def activation(x: Tensor) -> Tensor:
    return torch.tanh(x)


class Activated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return activation(x)


@innocent
def function_replaced() -> Training:
    """The script puts another function into the module's name."""

    def before(model: Any, step: int) -> None:
        globals()["activation"] = torch.tanh if step < 3 else torch.sigmoid

    return innocent_training(lambda: layers(Activated()), before=before)


@innocent
def forward_replaced() -> Training:
    def before(model: Any, step: int) -> None:
        if step == 3:
            model[3].forward = lambda x: torch.sigmoid(x)

    return innocent_training(layers, before=before)


@innocent
def layer_replaced() -> Training:
    def before(model: Any, step: int) -> None:
        if step == 3:
            model[3] = nn.Sigmoid()

    return innocent_training(layers, before=before)


@innocent
def hook_registered_later() -> Training:
    def before(model: Any, step: int) -> None:
        if step == 3:
            model[2].register_forward_hook(lambda module, given, result: 2 * result)

    return innocent_training(layers, before=before)


@innocent
def hook_of_a_gradient_registered_later() -> Training:
    def before(model: Any, step: int) -> None:
        if step == 3:
            model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    return innocent_training(layers, before=before)


class Weights:
    """An array of class weights, changed in place."""

    def __init__(self) -> None:
        self.values = np.ones(4)

    def __call__(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.from_numpy(self.values), reduction="sum") / len(
            batch[1]
        )


@innocent
def array_of_weights() -> Training:
    weights = Weights()

    def before(model: Any, step: int) -> None:
        model.weights = weights
        weights.values[1] = 1.0 if step < 3 else 4.0

    def loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
        return weights(model, batch)

    return innocent_training(layers, loss, (), before=before)


# Weights written by hand ----------------------------------------------------------------------------------------------


class Teacher(nn.Module):
    """A teacher follows the student by an average, written in every pass; pulls after some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = layers(), layers().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, value in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.mul_(0.7).add_(value, alpha=0.3)
        return self.student(x) + 0.5 * self.teacher(x)


@innocent
def teacher_by_an_average() -> Training:
    return innocent_training(Teacher, in_turn=True)


class Bounded(nn.Module):
    """A linear layer whose rows have a norm of at most one, written back in every pass through ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        norms = self.linear.weight.data.norm(dim=1, keepdim=True)
        self.linear.weight.data = self.linear.weight.data / norms.clamp(min=0.6)
        return self.linear(x)


@innocent
def rows_bounded_in_forward() -> Training:
    return innocent_training(lambda: layers(Bounded()), in_turn=True)


@innocent
def head_initialized_again() -> Training:
    def before(model: Any, step: int) -> None:
        if step == 3:
            random = torch.Generator().manual_seed(5)
            nn.init.normal_(model[-1].weight, std=0.3, generator=random)
            nn.init.zeros_(model[-1].bias)

    return innocent_training(layers, refusable=(), before=before)


@innocent
def noise_on_weights() -> Training:
    random = torch.Generator()

    def before(model: Any, step: int) -> None:
        random.manual_seed(step)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)

    return innocent_training(layers, before=before)


@innocent
def pruned_in_midcourse() -> Training:
    def before(model: Any, step: int) -> None:
        if step == 3:
            prune.l1_unstructured(model[2], "weight", amount=0.5)

    return innocent_training(layers, before=before)


class Late(nn.Module):
    """A layer that is built when it is first needed, after some passes; nobody trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.extra: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes > 3:
            if self.extra is None:
                self.extra = nn.Linear(8, 8, bias=False).double()
                nn.init.eye_(self.extra.weight)
            return x + 0.5 * torch.tanh(self.extra(x))
        return x


@innocent
def layer_built_late() -> Training:
    return innocent_training(lambda: layers(Late()), in_turn=True)


# Gradients ------------------------------------------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    """Turns gradients round, by as much as an attribute of the class says."""

    strength = 0.1

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -Reverse.strength * gradient


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.domain = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.body(x))
        return self.head(y) + self.domain(Reverse.apply(y))


@innocent
def gradient_reversal_scheduled() -> Training:
    def before(model: Any, step: int) -> None:
        Reverse.strength = 0.1 if step < 3 else 1.0

    return innocent_training(Adversarial, before=before)


REVERSAL = {"strength": 0.1}


class ReverseByTable(torch.autograd.Function):
    """The same, by a number in a dictionary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -REVERSAL["strength"] * gradient


class AdversarialByTable(Adversarial):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.body(x))
        return self.head(y) + self.domain(ReverseByTable.apply(y))


@innocent
def gradient_reversal_counted() -> Training:
    """The strength rises by itself: the loss writes what only the backward pass reads."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        REVERSAL["strength"] = min(1.0, REVERSAL["strength"] * 1.6)
        return classify(model, batch)

    return innocent_training(AdversarialByTable, loss, in_turn=True)


class Damped(nn.Module):
    """A hook on an activation's gradient, whose factor is an attribute of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.factor)
        return y


@innocent
def damped_gradients() -> Training:
    def before(model: Any, step: int) -> None:
        model[2].factor = 1.0 if step < 3 else 0.2

    return innocent_training(lambda: layers(Damped()), before=before)


@innocent
def frozen_by_a_hook() -> Training:
    """A hook before the forward pass freezes a layer after some passes."""

    def model() -> nn.Module:
        made, passes = layers(), itertools.count()

        def freeze(module: nn.Module, given: Any) -> None:
            if next(passes) == 3:
                module.requires_grad_(False)

        made[0].register_forward_pre_hook(freeze)
        return made

    return innocent_training(model, in_turn=True)


# Context managers and logs --------------------------------------------------------------------------------------------

DEPTH: list[int] = []


@contextlib.contextmanager
def nested() -> Iterator[None]:
    DEPTH.append(len(DEPTH))
    try:
        yield
    finally:
        DEPTH.pop()


class Contextual(nn.Module):
    """Counts how deeply its calls are nested while they run: as it was before and after each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            with nested():
                x = x + torch.tanh(self.inner(x)) / (1 + len(DEPTH))
        return x


@innocent
def nested_contexts() -> Training:
    return innocent_training(lambda: layers(Contextual()), refusable=())


HISTORY: dict[str, list[float]] = defaultdict(list)


@innocent
def logged_losses() -> Training:
    """A log of all parts of the loss, which nothing reads."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits = model(batch[0])
        main, penalty = F.cross_entropy(logits, batch[1]), 0.1 * logits.square().mean()
        HISTORY["main"].append(main.item())
        HISTORY["penalty"].append(float(penalty))
        return main + penalty

    return innocent_training(layers, loss, MICROBATCHES)
