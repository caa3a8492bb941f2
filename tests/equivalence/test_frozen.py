"""What a capture would freeze: Python state, Python's random numbers, clocks; trained as the plain loop, or refused."""

from __future__ import annotations

import cProfile
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.verify.verify import verify
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import (
    Pairs,
    Trained,
    assert_same,
    batch_of,
    classify,
    plainly,
    sgd,
    trained,
    workers,
)

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
    return fork_workers(lambda _: work(), 1)[0]


@pytest.mark.parametrize(("name", "plan"), subsets.one_in(3, subsets.pairs(STATE, ["data=1", "data=2"]), several=True))
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


@pytest.mark.parametrize("plan", subsets.except_slow(["data=1", "data=2", "pipeline=2"], ["data=1", "pipeline=2"]))
def test_neither_preparing_nor_evaluating_counts(plan: str) -> None:
    model = between(built(Counter), nn.Linear(8, 8), built(Counter))

    def work(job: Job) -> tuple[list[float], list[float]]:
        evaluated = [job.evaluate(BATCHES[0])]
        losses = [job.step(batch).loss for batch in BATCHES]
        assert job.evaluate(BATCHES[1]) == job.evaluate(BATCHES[1])
        return losses, evaluated

    expected = plainly(model, BATCHES)
    for losses, _ in workers(work, model, plan, example=BATCHES[0]):
        assert losses == pytest.approx(expected.losses, rel=1e-9)
    assert [each.calls for each in model.modules() if isinstance(each, Counter)] == [0, 0]


class Reads(nn.Module):
    """Reads what another module counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counter, self.fc = Counter(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.counter(x)
        return self.fc(y) if self.counter.calls > 3 else y


def test_who_reads_what_another_counts_is_in_the_same_leaf() -> None:
    model = between(built(Reads))
    graph = capture(model, classify, BATCHES[0])
    assert [note.split()[0] for note in graph.notes] == ["1"]
    assert_same(trained(model, "data=1", BATCHES)[0], plainly(model, BATCHES), 1e-9)


class Shared(nn.Module):
    """One module at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.between, self.head = Counter(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4)
        self.first = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(self.between(self.inner(self.first(x)))))
        return y


class Clock(Inner):
    def factor(self, x: Tensor) -> Any:
        return 1.0 if time.time() > 0 else 2.0


@pytest.mark.parametrize(
    ("make", "plan", "told"),
    [
        (Counter, "microbatches=2", r"microbatches=2: 1 writes self.calls \(.*test_frozen.py:\d+\) in every call"),
        (Counter, "data=2,pipeline=2,microbatches=2", "1 writes self.calls"),
        (Clock, "data=2", r"1 reads the clock, time.time \(.*test_frozen.py:\d+\)"),
        (Clock, "microbatches=2", "reads the clock"),
    ],
)
def test_what_would_count_otherwise_is_refused(make: Any, plan: str, told: str) -> None:
    with pytest.raises(PolylaneError, match=told):
        compile_training(between(built(make)), build_objectives(classify, sgd, None), BATCHES[0], plan)


def test_one_counter_on_two_stages_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(PolylaneError, match=r"inner writes self.calls .* in calls on stages 0, 1"):
        compile_training(
            Shared().double(),
            build_objectives(classify, sgd, None),
            BATCHES[0],
            "pipeline=2",
            seconds=lambda graph, *_: tuple(1.0 if node.op == "leaf" else 1e-3 for node in graph.nodes),
        )


def test_a_clock_runs_on_one_worker() -> None:
    model = between(built(Clock))
    assert_same(trained(model, "pipeline=2,microbatches=1", BATCHES)[0], plainly(model, BATCHES), 1e-9)


# Random numbers of Python and numpy --------------------------------------------------------------------------------


class Drops(Inner):
    def factor(self, x: Tensor) -> Any:
        return 0.0 if random.random() < 0.5 else 1.0


class Noisy(Inner):
    def factor(self, x: Tensor) -> Any:
        return float(np.random.rand()) + np.random.randint(3)


class Mixed(Inner):
    def factor(self, x: Tensor) -> Any:
        return random.choice([1, 2, 3]) + np.random.normal() + F.dropout(torch.ones_like(x))


@pytest.mark.parametrize("name", subsets.one_in(3, ["Drops", "Noisy", "Mixed"], first=2))
def test_python_draws_the_same_on_every_worker(name: str) -> None:
    model = between(built({"Drops": Drops, "Noisy": Noisy, "Mixed": Mixed}[name]), nn.Linear(8, 8))

    def work(job: Job) -> tuple[list[float], dict[str, Tensor]]:
        random.seed(job.world.rank)  # the user's own stream has nothing to do with it, and goes on
        np.random.seed(job.world.rank)
        before = random.getstate(), np.random.get_state()[1].tolist()
        losses = [job.step(batch).loss for batch in BATCHES]
        assert before == (random.getstate(), np.random.get_state()[1].tolist())
        return losses, job.state_dict()

    ((expected, state),) = workers(work, model, "data=1", example=BATCHES[0])
    assert len({round(loss, 6) for loss in expected}) == len(expected)
    for plan in ("data=2", "pipeline=2,microbatches=1"):
        for losses, weights in workers(work, model, plan, example=BATCHES[0]):
            assert_same(Trained(losses, weights), Trained(expected, state), 1e-9)


def test_python_draws_anew_in_every_step() -> None:
    model = between(built(Drops))
    graph = capture(model, classify, BATCHES[0])
    assert any("draws from Python's random (" in note and "test_frozen.py:" in note for note in graph.notes)

    def still(parameters: Pairs) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters), lr=0.0)

    (losses,) = workers(lambda job: [job.step(BATCHES[0]).loss for _ in range(12)], model, "data=1", optimizer=still)
    assert len(set(losses)) == 2


# What is no state ----------------------------------------------------------------------------------------------------


class Caches(Inner):
    """Builds a mask once, keeps its last output, and warns once."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.last: Tensor | None = None
        self.warned, self.sizes = False, dict[int, float]()

    def factor(self, x: Tensor) -> Any:
        if self.mask is None:
            self.mask = torch.linspace(0, 1, 8, dtype=x.dtype)
        self.warned = True
        self.sizes.setdefault(x.dim(), 2.0)
        self.last = x * self.mask
        return self.mask * self.sizes[x.dim()]


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.drop(self.norm(self.fc(x)))
        return self.kept


@pytest.mark.parametrize("make", [Caches, Timed])
def test_caches_that_settle_are_no_state(make: Callable[[], nn.Module]) -> None:
    graph = capture(between(built(make)), classify, BATCHES[0])
    assert not graph.notes
    assert all(node.op != "leaf" for node in graph.nodes)


def test_models_of_a_library_keep_no_state() -> None:
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    gpt2 = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    for config in (llama, gpt2):
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.randint(0, 50, (4, 8))
        graph = capture(model, lambda model, batch: model(batch).logits.square().mean(), tokens)
        assert not graph.notes
        assert all(node.op != "leaf" for node in graph.nodes)


# Losses ------------------------------------------------------------------------------------------------------------


class Annealed:
    """A loss that is an object and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        return classify(model, batch) * (1 + self.calls / 4)


def counting_loss() -> Callable[..., Tensor]:
    calls = [0]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls[0] += 1
        return classify(model, batch) * (1 + calls[0] / 4)

    return loss


def on_the_model(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Counts on an attribute of the model."""
    model.steps = getattr(model, "steps", 0) + 1  # type: ignore[assignment]
    return classify(model, batch) * (1 + model.steps / 4)  # type: ignore[operator]


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (Annealed, "Annealed.calls"),
    "closure": (counting_loss, "calls of counting_loss.<locals>.loss"),
    "attribute": (lambda: on_the_model, "self.steps"),
}


@pytest.mark.parametrize("plan", subsets.one_in(3, ["data=1", "data=2"], first=1))
@pytest.mark.parametrize("name", LOSSES)
def test_losses_keep_state_as_in_the_plain_loop(name: str, plan: str) -> None:
    make, what = LOSSES[name]
    model = between()
    expected: Trained = in_a_process(lambda: plainly(model, BATCHES, loss=make()))
    loss = make()
    graph = capture(model, loss, BATCHES[0])
    assert graph.is_opaque and f"writes {what} (" in graph.notes[0] and "test_frozen.py:" in graph.notes[0]
    for worker in trained(model, plan, BATCHES, loss=loss):
        assert_same(worker, expected, 1e-9)


@pytest.mark.parametrize("make", subsets.one_in(3, [Counter, Drops, Mutates]))
def test_a_proof_counts_as_a_training_does(make: Callable[[], nn.Module]) -> None:
    model = between(built(make), nn.Linear(8, 8))
    loss = counting_loss() if make is Counter else classify
    verdict = verify(model, build_objectives(loss, sgd, None)["loss"], BATCHES, "data=2")
    assert verdict.passed, verdict


def test_a_profiler_goes_on() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    capture(between(), classify, BATCHES[0])
    sum([1])
    profiler.disable()
    assert any("sum" in str(entry.code) for entry in profiler.getstats())
