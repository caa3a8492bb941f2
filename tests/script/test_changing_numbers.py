"""Numbers that change from step to step are inputs of the tape, where the function computes the same with a tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.deferred import DeferredTensor
from polylane.script.model_results import ModelCall
from polylane.script.recorded_calls import Use
from polylane.script.recording import Recording


def anneal(prepare: Callable[..., Any], dtype: torch.dtype) -> list[float]:
    """A loss with annealed weights, a step count, and tensors that the script writes between steps."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 3)).to(dtype)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer)
    numbers, random = list[float](), torch.Generator().manual_seed(3)
    scale, shift = torch.tensor(0.5, dtype=dtype), torch.zeros(3, dtype=dtype)
    for step in range(5):
        x, y = torch.randn(6, 4, generator=random).to(dtype), torch.randint(0, 3, (6,), generator=random)
        scores = model(x)
        size = scores.pow(2).mean()
        loss = F.cross_entropy(scores / (1 + 0.3 * step), y) + size * (step / 5) + scores.sum() * step * 1e-3
        loss = loss + scale * size + (scores * shift).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scale.mul_(0.9)
        shift.add_(0.1)
        numbers += [loss.item(), size.item()]
    if hasattr(model, "_polylane_loop"):
        assert len({tape.number for tape in model._polylane_loop.runner.tapes.tapes.values()}) == 2
    return numbers


def test_annealed_weights_take_two_tapes_and_give_the_plain_loop_s_bits() -> None:
    expected = anneal(lambda *objects: objects, torch.float32)
    assert anneal(lambda *objects: polylane.prepare(*objects, plan="data=1"), torch.float32) == expected


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "data=2,microbatches=2", "pipeline=2,microbatches=2"])
def test_annealed_weights_give_the_plain_loop_s_numbers_under_a_plan(plan: str) -> None:
    expected = anneal(lambda *objects: objects, torch.float64)

    def run(context: WorkerContext) -> list[float]:
        return anneal(partial(polylane.prepare, plan=plan), torch.float64)

    for numbers in fork_workers(run, 2):
        assert numbers == pytest.approx(expected, rel=1e-12, abs=1e-12)


class Recorded:
    """Calls of one line, recorded with a number that changes; what its place in them holds."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.recording = Recording(self, [nn.Linear(4, 3).to(dtype)], {})
        self.scores = self.recording.record(None, [torch.zeros(2, 4, dtype=dtype)], {}, ModelCall(0))

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.recording.record(func, args, kwargs)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError("nothing is computed here")

    def take_argument(self, tensor: Tensor) -> Tensor:
        return tensor

    def backward(self, root: DeferredTensor, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is computed here")


CALLS: list[tuple[str, Callable[[Tensor, Any], Tensor], list[Any], Any]] = [
    ("a float weighs a matrix", lambda s, n: s * n, [0.1, 0.2, 0.3], torch.float64),
    ("a float weighs a loss", lambda s, n: s.mean() * n, [0.1, 0.2], torch.float32),
    ("a count divides", lambda s, n: s / n, [1, 2, 3], torch.int64),
    ("a count is added to counts", lambda s, n: s.argmax(1) + n, [1, 2], torch.int64),
    ("a float times integers", lambda s, n: s.argmax(1) * n, [0.5, 0.7], torch.float32),
    ("a probability of dropout", lambda s, n: F.dropout(s, n), [0.1, 0.2], None),
    ("smoothed labels", lambda s, n: F.cross_entropy(s, torch.tensor([0, 1]), label_smoothing=n), [0.1, 0.2], None),
    ("a dimension", lambda s, n: s.sum(n), [0, 1], None),
    ("a size", lambda s, n: s.view(n, -1), [2, 3], None),
    ("a row", lambda s, n: s.narrow(0, n, 1), [0, 1], None),
    ("a flag", lambda s, n: s.mean(0, keepdim=n), [False, True], None),
]


@pytest.mark.parametrize(("call", "numbers", "dtype"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_a_number_is_an_input_from_its_second_value_on(call: Any, numbers: list[Any], dtype: Any) -> None:
    recorded = Recorded()
    results = [call(recorded.scores, number) for number in numbers]
    places = [[x for x in r.call.leaves if isinstance(x, Use) and not x.tensor.dim()] for r in results]
    assert [len(place) for place in places] == [0, *[0 if dtype is None else 1] * (len(numbers) - 1)]
    for place, number in zip(places[1:], numbers[1:], strict=True):
        assert all(x.tensor.dtype == dtype and x.tensor.item() == torch.tensor(number, dtype=dtype) for x in place)
    plain = [call(torch.randn(2, 3), number) for number in numbers]
    assert [(r.shape, r.dtype) for r in results] == [(p.shape, p.dtype) for p in plain]


def test_a_constant_with_many_values_is_told_once() -> None:
    recorded = Recorded()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            F.dropout(recorded.scores, 0.1 * step)
    (warning,) = caught
    assert str(warning.message).startswith("dropout is called with another number from step to step (/")
