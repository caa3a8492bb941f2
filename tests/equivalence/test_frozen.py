"""What a capture would freeze: Python state, Python's random numbers, clocks; trained as the plain loop, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polylane.graph.capture import capture
from training import Trained, assert_same, batch_of, classify, plainly, trained

BATCHES = [batch_of(8, seed) for seed in range(7)]
CALLS = [0]
STEPS = 0


class Inner(nn.Module):
    """A layer whose factor depends on what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def factor(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.factor(x)
        return y


class Counter(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def factor(self, x: Tensor) -> Any:
        self.calls += 1
        return 2.0 if self.calls > 4 else 1.0


class Appends(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def factor(self, x: Tensor) -> Any:
        self.seen.append(len(self.seen))
        return 1.0 + len(self.seen) / 4


class Writes(Inner):
    """Into a numpy array, a dict and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.table, self.plain = np.zeros(3), {"a": {"n": 0}}, torch.zeros(2, dtype=torch.float64)

    def factor(self, x: Tensor) -> Any:
        self.array[1] += 1
        self.table["a"]["n"] += 1
        self.plain.add_(0.5)
        return 1.0 + float(self.array.sum()) * self.table["a"]["n"] * float(self.plain.sum()) / 100


class OfTheClass(Inner):
    calls = 0

    def factor(self, x: Tensor) -> Any:
        OfTheClass.calls += 1
        return 1.0 + OfTheClass.calls / 4


class Mutates(Inner):
    """A global, and a list that is one."""

    def factor(self, x: Tensor) -> Any:
        global STEPS
        STEPS += 1
        CALLS[0] += 1
        return 1.0 + STEPS / 4 + CALLS[0] / 8


class Defaults(Inner):
    def factor(self, x: Tensor, seen: list[int] = []) -> Any:  # noqa: B006
        seen.append(1)
        return 1.0 + len(seen) / 4


class OwnGenerator(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(3)

    def factor(self, x: Tensor) -> Any:
        return 1.0 + self.numbers.random()


def enclosed() -> Inner:
    calls = 0

    class Enclosed(Inner):
        def factor(self, x: Tensor) -> Any:
            nonlocal calls
            calls += 1
            return 1.0 + calls / 4

    return Enclosed()


def hooked() -> nn.Module:
    calls: list[int] = []
    module = nn.Linear(8, 8)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * (1 + len(calls) / 4)

    module.register_forward_hook(hook)
    return module


def between(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 4)).double()


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """Made after torch's seed, so that all have the same weights."""
    torch.manual_seed(1)
    return make()


STATE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "counter": (Counter, "self.calls"),
    "list": (Appends, "self.seen"),
    "contents": (Writes, "self.array"),
    "class": (OfTheClass, "OfTheClass.calls"),
    "globals": (Mutates, "the global STEPS"),
    "default": (Defaults, "the default seen of Defaults.factor"),
    "generator": (OwnGenerator, "self.numbers"),
    "closure": (enclosed, "calls of enclosed.<locals>.Enclosed.factor"),
    "hook": (hooked, "calls of hooked.<locals>.hook"),
}


@pytest.fixture(autouse=True)
def _as_at_first() -> Any:
    """What the cases keep outside of their models."""
    global STEPS
    STEPS, CALLS[0], OfTheClass.calls = 0, 0, 0
    assert Defaults.factor.__defaults__ is not None
    Defaults.factor.__defaults__[0].clear()


def in_a_process(work: Callable[[], Any]) -> Any:
    """What the plain loop does to globals stays with it."""
    from polylane.runtime.launch import fork

    return fork(lambda _: work(), 1)[0]


@pytest.mark.parametrize("plan", ["data=1", "data=2"])
@pytest.mark.parametrize("name", STATE)
def test_python_state_is_that_of_the_plain_loop(name: str, plan: str) -> None:
    make, _ = STATE[name]
    model = between(built(make))
    expected: Trained = in_a_process(lambda: plainly(model, BATCHES))
    frozen: Trained = in_a_process(lambda: plainly(model, BATCHES[:1] * 7))
    assert len(set(frozen.losses)) > 2  # the plain loop moves
    for worker in trained(model, plan, BATCHES):
        assert_same(worker, expected, 1e-9)


@pytest.mark.parametrize("name", STATE)
def test_python_state_is_named_with_its_line(name: str) -> None:
    make, what = STATE[name]
    graph = capture(between(built(make)), classify, BATCHES[0])
    (note,) = [note for note in graph.notes if "is a leaf" in note]
    assert note.startswith("1 is a leaf, kept whole: it ")
    assert f"{what} (" in note and "test_frozen.py:" in note
