"""The user's own Python on one replica's samples: keyed random numbers, and batch statistics over all replicas.

What captured graphs do node by node is done here by dispatch modes as operators run, for code without a graph: leaves,
    opaque models, and training loops of the user's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.counter_rng import salt_of
from polylane.graph.operators.keyed_random import KEYED
from polylane.graph.operators.sync_batch_norm import batch_norm, batch_norm_arguments


def _sample_dim(part: SampleSlice, shape: Sequence[int]) -> int | None:
    """Return 0 if the first dimension is a multiple of the samples, so that its rows belong to them; otherwise None."""
    return 0 if len(shape) and part.samples and shape[0] and shape[0] % part.samples == 0 else None


# In-place random operators, and the keyed operators whose numbers they take.
_IN_PLACE = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.bernoulli_.Tensor": "aten.bernoulli.Tensor",
    "aten.uniform_.default": "aten.uniform.default",
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.exponential_.default": "aten.exponential.default",
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
        op, kwargs = str(func), kwargs or {}
        if op not in _IN_PLACE and op not in _FRESH:
            return func(*args, **kwargs)
        shape = args[0].shape if isinstance(args[0], Tensor) else next(a for a in args if isinstance(a, (list, tuple)))
        # torch leaves out last arguments that have their default value.
        left_out = [a.default_value for a in func._schema.arguments[len(args) :] if not a.kwarg_only]
        options = {key: value for key, value in kwargs.items() if key != "generator" and value is not None}
        draw = KEYED[_IN_PLACE.get(op, op)]
        numbers = draw(self._part, self._salt(), _sample_dim(self._part, shape), *args, *left_out, **options)
        return args[0].copy_(numbers) if op in _IN_PLACE else numbers

    def _salt(self) -> int:
        return salt_of(f"{self._name}:{next(self._calls)}")


class _SyncBatchNormMode(TorchFunctionMode):
    """Batch normalizations in training see the samples of all replicas."""

    def __init__(self, part: SampleSlice) -> None:
        super().__init__()
        self._part = part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.batch_norm and (arguments := batch_norm_arguments(args, kwargs))["training"]:
            return batch_norm(self._part, arguments.pop("input"), **arguments)
        return func(*args, **(kwargs or {}))


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
