"""Random numbers that decide which way Python goes (``if torch.rand([]) < p: skip the layer``): one for a whole step.

Such a number is no sample's: it is a function of the seed, of the step and of its place among the numbers of the step,
so that all workers know it before the step, and go the same way. A graph is captured for each way that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.counter_rng import salt_of
from polylane.graph.operators.keyed_random import rand, randn

_KINDS: dict[str, Callable[..., Tensor]] = {"rand": rand, "randn": randn}
# What decides before a step is known: the number in the middle, with which what is rare does not happen.
_MIDDLES = {"rand": 0.5, "randn": 0.0}


@dataclass(frozen=True)
class StepDraws:
    """The numbers of one step.

    Attributes:
        seed: seed of all random numbers of the training.
        step: index of the step, from 0.
    """

    seed: int
    step: int


@dataclass(frozen=True)
class AskedDraw:
    """One of a step's numbers.

    Attributes:
        kind: name of torch's function, "rand".
        place: how many were drawn before it.
        size: shape of the number, of one element.
        dtype: the number's floating type.
    """

    kind: str
    place: int
    size: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, draws: StepDraws | None) -> Tensor:
        """Return the number in a step; the middle one where no step is known."""
        if draws is None:
            return torch.full(self.size, _MIDDLES[self.kind], dtype=self.dtype)
        part = SampleSlice(1, step=draws.step, seed=draws.seed)
        return _KINDS[self.kind](part, salt_of(f"asked {self.place}"), None, self.size, dtype=self.dtype)


def is_asked_draw(func: Any, result: Any) -> bool:
    """Return whether a call of torch's has drawn a single number, which may decide a branch."""
    single = isinstance(result, Tensor) and all(isinstance(size, int) and size == 1 for size in result.shape)
    return single and getattr(func, "__name__", "") in _KINDS


class _Replay(TorchFunctionMode):
    def __init__(self, draws: StepDraws | None) -> None:
        super().__init__()
        self._draws, self._place = draws, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))  # torch's generator moves on as ever
        if not is_asked_draw(func, result):
            return result
        number = AskedDraw(func.__name__, self._place, tuple(result.shape), result.dtype)(self._draws)
        self._place += 1
        return number.to(result.device)


@contextmanager
def draws_replayed(draws: StepDraws | None) -> Iterator[None]:
    """Context manager: inside, the single numbers that torch draws are those of a step; None: the middle ones."""
    with _Replay(draws):
        yield
