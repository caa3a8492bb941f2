"""The user's own Python on one replica's samples: keyed random numbers, and batch statistics over all replicas.

What captured graphs do node by node is done here by dispatch modes as operators run, for code without a graph: leaves,
    opaque models, and training loops of the user's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from polylane.graph.operators import keyed_random as keyed
from polylane.graph.operators.counter_rng import salt_of
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.graph.sample_slice import SampleSlice

_Filler = Callable[[SampleSlice, int, int | None, Tensor, Sequence[Any], dict[str, Any]], Tensor]


def _sample_dim(part: SampleSlice, shape: Sequence[int]) -> int | None:
    """Return 0 if the first dimension is a multiple of the samples, so that its rows belong to them; otherwise None."""
    return 0 if len(shape) and part.samples and shape[0] and shape[0] % part.samples == 0 else None


def _bernoulli(
    part: SampleSlice, salt: int, dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    return keyed.bernoulli(part, salt, dim, x, args[0] if args else kwargs.get("p", 0.5))


def _uniform(
    part: SampleSlice, salt: int, dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    low, high = args[0] if args else 0.0, args[1] if len(args) > 1 else 1.0
    return keyed.uniform_like(part, salt, dim, x, kwargs.get("from", low), kwargs.get("to", high))


def _normal(
    part: SampleSlice, salt: int, dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    mean = args[0] if args else kwargs.get("mean", 0.0)
    std = args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    return keyed.normal_like(part, salt, dim, x, mean, std)


def _exponential(
    part: SampleSlice, salt: int, dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    return keyed.exponential(part, salt, dim, x, args[0] if args else kwargs.get("lambd", 1.0))


# In-place random operators: their numbers are drawn by key and copied.
_IN_PLACE: dict[str, _Filler] = {
    "aten.bernoulli_.float": _bernoulli,
    "aten.bernoulli_.Tensor": _bernoulli,
    "aten.uniform_.default": _uniform,
    "aten.normal_.default": _normal,
    "aten.exponential_.default": _exponential,
}
# Random operators that return a new tensor: their keyed versions take the same arguments.
_FRESH = (
    "aten.rand.default",
    "aten.randn.default",
    "aten.randint.default",
    "aten.randint.low",
    "aten.rand_like.default",
    "aten.randn_like.default",
    "aten.bernoulli.default",
    "aten.bernoulli.p",
)


class _KeyedRandomMode(TorchDispatchMode):
    """Random operators inside draw by key; the n-th of a pass has the n-th salt."""

    def __init__(self, part: SampleSlice, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._part, self._name, self._calls = part, name, itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = str(func)
        if op in _IN_PLACE:
            target = args[0]
            numbers = _IN_PLACE[op](
                self._part,
                self._salt(),
                _sample_dim(self._part, target.shape),
                target,
                args[1:],
                _drop_generator(kwargs),
            )
            return target.copy_(numbers)
        if op in _FRESH:
            shape = (
                args[0].shape if isinstance(args[0], Tensor) else next(a for a in args if isinstance(a, (list, tuple)))
            )
            kwargs = {key: value for key, value in _drop_generator(kwargs).items() if value is not None}
            return keyed.KEYED[op](self._part, self._salt(), _sample_dim(self._part, shape), *args, **kwargs)
        return func(*args, **kwargs)

    def _salt(self) -> int:
        return salt_of(f"{self._name}:{next(self._calls)}")


def _drop_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "generator"}


class _SyncBatchNormMode(TorchFunctionMode):
    """Batch normalizations in training see the samples of all replicas."""

    def __init__(self, part: SampleSlice) -> None:
        super().__init__()
        self._part = part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        return batch_norm(self._part, input, weight, bias, running_mean, running_var, True, momentum, eps)


@contextmanager
def running_as_slice(part: SampleSlice, name: str) -> Iterator[None]:
    """Context manager: the user's Python inside runs as one slice of a batch.

    Args:
        part: the replica's local samples, with step and seed.
        name: keeps the random numbers of this call apart from those of other calls.
    """
    with ExitStack() as stack:
        stack.enter_context(_KeyedRandomMode(part, name))
        if part.sum_replicas is not None:
            stack.enter_context(_SyncBatchNormMode(part))
        yield
