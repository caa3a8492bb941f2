"""Origins: from which parameters, and which of their elements, tensors are computed; taint tracking, by dispatch modes.

mode = Origins({"weight": 12})
with mode, SeenArrays(mode):
    mode.mark("weight", gradient)       aligned   weight
    step = 0.1 * gradient               aligned   weight     element by element
    norm = gradient.norm()              whole     weight     from any element
    norm.item()                         reads     weight     by Python, with the line
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from polylane.graph.nodes.memory import storage_id
from polylane.graph.python_state.own_objects import innermost_line

# Operators that give tensors to Python, below and above dispatch.
_READS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})
_ARRAYS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
# Operators without torch's tag "pointwise" whose result has, at every element, what their inputs have at the same.
_ALIGNED = frozenset({"_to_copy", "copy_", "masked_fill_", "masked_fill", "lift_fresh"})
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"})
_REDUCING = frozenset({"_foreach_norm", "_foreach_max"})

# What Python reads in the place of a number in the first, second and third step.
ANSWERS: tuple[Callable[[Any], Any], ...] = (
    lambda value: math.inf if isinstance(value, float) else not value if isinstance(value, bool) else value + 1_000_000,
    lambda value: math.nan if isinstance(value, float) else not value if isinstance(value, bool) else -value - 1,
    lambda value: type(value)(0),
)


@dataclass(frozen=True)
class Origin:
    """The parameters from whose values and gradients a tensor is computed.

    Attributes:
        aligned: names of those whose elements each decide the tensor's element at the same place, and no other.
        whole: names of those of which any element may decide any.
        line: the user's line that computed with several parameters; "" where there is one.
    """

    aligned: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    line: str = ""

    @cached_property
    def names(self) -> frozenset[str]:
        return self.aligned | self.whole

    def __or__(self, other: Origin) -> Origin:
        whole_names = self.whole | other.whole
        return Origin((self.aligned | other.aligned) - whole_names, whole_names, self.line or other.line)


_NOWHERE = None, Origin()  # of what is computed from no parameter


class Origins(TorchDispatchMode):
    """Follows the origins of all tensors through operators.

    Args:
        sizes: number of elements of each parameter, by name.
        sparse: names of the parameters whose gradients are sparse.
        altered: names of the parameters of which Python reads other numbers than there are.

    Attributes:
        number: number of the step.
        reads: origins of the numbers that Python has read, each with the line that read it.
        draws: line of the first operator that drew random numbers.
    """

    def __init__(self, sizes: Mapping[str, int], sparse: Collection[str], altered: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes, self.sparse, self._altered = sizes, sparse, altered
        # By the storage's address, with what keeps that from being used again: a weak reference, or a sparse tensor.
        self._origins: dict[int, tuple[Any, Origin]] = {}
        self._marks = {name: Origin(frozenset({name})) for name in sizes}
        self.reads: list[Origin] = []
        self.draws, self.number = "", 0

    def mark(self, name: str, tensor: Tensor) -> None:
        """Record that a tensor is a parameter, or its gradient."""
        self._record(tensor, self._marks[name])

    def forget(self, parameters: Sequence[Tensor], values: Tensor) -> Tensor:
        """Return sums for an optimizer that asks for those over all holders of a parameter, which all of them get."""
        sums = values.clone()
        self._origins.pop(_key(sums), None)
        return sums

    def origin_of(self, tensor: Tensor) -> Origin:
        return self._origins.get(_key(tensor), _NOWHERE)[1]

    def read(self, tensors: Iterable[Tensor]) -> bool:
        """Record that Python reads tensors; return whether it is to get other numbers."""
        origin = self._join(tensors, is_aligned=False)
        if origin.names:
            self.reads.append(Origin(whole=origin.names, line=_find_line()))
        return bool(origin.names) and origin.names.issubset(self._altered)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kind = func(*args, **(kwargs or {})), _describe_operator(func)
        if kind.reads:
            return ANSWERS[self.number](result) if self.read(_find_tensors(args)) else result
        if kind.draws and not self.draws:
            self.draws = _find_line() or "?"
        for inputs, written, outputs in _match_places(kind, args, kwargs or {}, result):
            origin = self._join(inputs, _is_aligned(inputs) if kind.is_masked else kind.is_aligned)
            known_keys = {_key(tensor) for tensor in (*inputs, *written)}
            for tensor in written:
                is_all = tensor.layout is torch.strided and tensor.nbytes == tensor.untyped_storage().nbytes()
                self._record(tensor, origin if is_all else origin | self.origin_of(tensor))
            for tensor in outputs:
                if _key(tensor) not in known_keys:  # else it is a view, or what was written
                    self._record(tensor, origin)
        return result

    def _record(self, tensor: Tensor, origin: Origin) -> None:
        if not (origin.names or _key(tensor) in self._origins):
            return
        spread = {n for n in origin.aligned if not self._is_laid_out(tensor, n)}
        if spread:
            origin = Origin(origin.aligned - spread, origin.whole | spread, origin.line)
        is_strided = tensor.layout is torch.strided
        self._origins[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()) if is_strided else tensor, origin

    def _join(self, tensors: Iterable[Tensor], is_aligned: bool) -> Origin:
        joined = _NOWHERE[1]
        for tensor in tensors:
            origin = self.origin_of(tensor)
            far = {n for n in origin.aligned if not (is_aligned and self._is_laid_out(tensor, n))}
            if far := {n for n in far if self.sizes[n] > 1 and n not in self.sparse}:
                origin = Origin(origin.aligned - far, origin.whole | far, origin.line)
            if origin.names:
                joined = joined | origin if joined.names and joined is not origin else origin
        several = len(joined.names) > 1 and not joined.line
        return Origin(joined.aligned, joined.whole, _find_line()) if several else joined

    def _is_laid_out(self, tensor: Tensor, name: str) -> bool:
        """Return whether a tensor has an element for each of a parameter's, in the same order."""
        if self.sizes[name] == 1 or name in self.sparse:
            return True
        return tensor.layout is torch.strided and tensor.numel() == self.sizes[name] and tensor.is_contiguous()


class SeenArrays(TorchFunctionMode):
    """Sees tensors become lists and arrays, which no dispatch mode does."""

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self._origins = origins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ARRAYS and self._origins.read(args[:1]):
            tensor = args[0].detach().clone()
            args = (tensor.fill_(ANSWERS[self._origins.number](tensor.new_zeros(()).item())), *args[1:])
        return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> int:
    return storage_id(tensor) if tensor.layout is torch.strided else id(tensor)


@dataclass(frozen=True)
class _Operator:
    """What is to be known of an operator.

    Attributes:
        names: names of its arguments, in order.
        changed: names of the arguments that it writes.
        ignored: names of the arguments whose values do not count.
        is_aligned: whether each element of its results depends on the elements of its inputs at the same place.
        is_masked: whether that is so for a mask and a number alone.
        is_on_lists: whether it works on lists of tensors, place by place.
        reads: whether it gives a number to Python.
        draws: whether it draws random numbers.
    """

    names: tuple[str, ...]
    changed: frozenset[str]
    ignored: frozenset[str]
    is_aligned: bool
    is_masked: bool
    is_on_lists: bool
    reads: bool
    draws: bool


@cache
def _describe_operator(func: Any) -> _Operator:
    name, arguments = func._schema.name.partition("::")[2], func._schema.arguments
    names = tuple(a.name for a in arguments)
    changed = frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    ignored = changed if name in _OVERWRITING else changed & {"out"}
    if name.endswith("_like") or name.startswith("new_"):
        ignored = frozenset(names)
    on_lists = name.startswith(("_foreach_", "_fused_"))
    aligned = name not in _REDUCING if on_lists else torch.Tag.pointwise in func.tags or name in _ALIGNED
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return _Operator(names, changed, ignored, aligned, name == "index_put_", on_lists, func in _READS, draws)


def _is_aligned(inputs: Sequence[Tensor]) -> bool:
    """Return whether ``tensor[mask] = number`` has a mask for each of the tensor's elements, and one number."""
    tensor, *masks, value = inputs
    return value.numel() == 1 and all(m.dtype is torch.bool and m.shape == tensor.shape for m in masks)


def _match_places(
    kind: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Yield inputs, written tensors and results of an operator: of one on lists, those at each place of the lists."""
    inputs = {**dict(zip(kind.names, args, strict=False)), **kwargs}
    lists = {n for n, v in inputs.items() if kind.is_on_lists and isinstance(v, (list, tuple)) and _find_tensors(v[:1])}
    results = result if isinstance(result, (list, tuple)) else [result]
    for index in range(len(inputs[next(iter(lists))])) if lists else (None,):
        at = inputs if index is None else {n: v[index] if n in lists else v for n, v in inputs.items()}
        yield (
            _find_tensors([v for n, v in at.items() if n not in kind.ignored]),
            _find_tensors([at[n] for n in kind.changed if n in at]),
            _find_tensors(results if index is None else results[index : index + 1]),
        )


def _find_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists."""
    tensors = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _find_tensors(value)
    return tensors


def _find_line() -> str:
    """Return the innermost of the user's lines that are running."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame: FrameType | None = frame.f_back  # type: ignore[no-redef]
    return innermost_line(frames[::-1])
