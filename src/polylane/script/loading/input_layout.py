"""Input layouts: along which dimension each tensor that a script gives to a tape has the samples of the batch.

    script                                  samples along
    x (batch, ...), y (batch,)              dimension 0 of both
    x (length, batch), h (layers, batch, w) dimension 1 of both
    y (length * batch,), a view of these    dimension 1 of y viewed as (length, batch)

Programs take batches with samples along dimension 0: a layout moves them there, and the tape moves them back in its
first steps, so that the script's own code sees the tensors that it gave. Which layout holds is said by the script, or
proposed here by lengths that agree, and proven of the captured graph before it is taken. A batch that no layout is
proven for is one sample: every replica computes all of it, and the script's user is told.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from polylane.errors import CallsDiffer, PolylaneError
from polylane.script.loading.loaded_batch import LoadedRows, NotDivided, TapeInput, shape_of

T = TypeVar("T")

BatchDim = int | Callable[[Tensor], int | None]

MOST_LAYOUTS = 6  # layouts of one tape that are tried, each by a capture


class InputLayout(NamedTuple):
    """Where one input has its samples.

    Attributes:
        dim: dimension of the samples, 0 for a number as well; None: it belongs to the batch as a whole.
        factored_as: position of the input as whose first two dimensions, such as (length, samples), dimension 0 is
            viewed before; None: it stays as it is.
    """

    dim: int | None
    factored_as: int | None = None


@dataclass(frozen=True)
class TapeLayout:
    """Where the inputs of a tape have their samples.

    Attributes:
        inputs: layout of every input; None: what a sample is is not known, and the batch is a single one.
    """

    inputs: tuple[InputLayout, ...] | None

    @property
    def is_plain(self) -> bool:
        """Whether every input has its samples along dimension 0, or is a number."""
        return self.inputs is not None and all(layout == InputLayout(0) for layout in self.inputs)

    def arrange(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the leaves of a batch: inputs with samples in dimension 0, then the others in one row of their own."""
        if self.inputs is None:
            return [tensor[None] for tensor in inputs] or [torch.zeros(1)]
        return [_move_samples_first(inputs, i, self.inputs[i]) for i in self._order]

    def arrange_rows(self, inputs: Sequence[TapeInput], positions: Sequence[int]) -> tuple[list[Tensor], list[bool]]:
        """Return the leaves of the samples at some positions of a batch, which is where loaded rows have been read.

        Returns:
            the leaves, and whether each is divided with the samples; none where loaded rows are not samples.
        """
        leaves, split, shapes = list[Tensor](), list[bool](), shape_of(inputs)
        for i in [] if self.inputs is None else self._order:
            assert self.inputs is not None
            value, layout = inputs[i], self.inputs[i]
            if isinstance(value, LoadedRows) and not value.batch.is_whole:
                if layout != InputLayout(0):
                    return [], []
                split.append(True)
                leaves.append(value.take(positions))
                continue
            leaf = _move_samples_first(shapes, i, layout)
            split.append(layout.dim is not None and leaf.dim() > 0)
            leaves.append(leaf[list(positions)] if split[-1] else leaf)
        return leaves, split

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether tensors of other sizes than those that it was found for have as many samples each."""
        if self.inputs is None:
            return False
        for tensor, layout in zip(inputs, self.inputs, strict=True):
            if layout.factored_as is not None and len(tensor) != inputs[layout.factored_as].shape[:2].numel():
                return False
        leaves = self.arrange(inputs)
        divided = sum(layout.dim is not None for layout in self.inputs)
        return len({len(leaf) for leaf in leaves[:divided] if leaf.dim()}) <= 1

    def restore(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs from the leaves of a batch, or of a part of it."""
        if self.inputs is None:
            return [leaf[0] for leaf in leaves]
        restored = {i: _move_samples_back(leaf, self.inputs[i]) for i, leaf in zip(self._order, leaves, strict=True)}
        return [restored[i] for i in range(len(leaves))]

    @property
    def _order(self) -> list[int]:
        # Of the first leaf the number of samples is read.
        assert self.inputs is not None
        return sorted(range(len(self.inputs)), key=lambda i: self.inputs[i].dim is None)  # type: ignore[index]


UNDIVIDED = TapeLayout(None)


def _move_samples_first(inputs: Sequence[Tensor], position: int, layout: InputLayout) -> Tensor:
    tensor = inputs[position]
    if not tensor.dim():
        return tensor
    if layout.dim is None:
        return tensor[None]
    if layout.factored_as is not None:
        tensor = tensor.unflatten(0, inputs[layout.factored_as].shape[:2])
    return tensor.movedim(layout.dim, 0)


def _move_samples_back(leaf: Tensor, layout: InputLayout) -> Tensor:
    if layout.dim is None:
        return leaf[0]
    moved = leaf.movedim(0, layout.dim).contiguous() if layout.dim else leaf
    return moved if layout.factored_as is None else moved.flatten(0, 1)


def propose_layouts(
    inputs: Sequence[Tensor], batch_dim: BatchDim | None = None, loaded: Collection[int] = ()
) -> list[TapeLayout]:
    """Return the layouts that the inputs of a tape may have, the likeliest first; none where there is no sample.

    Args:
        inputs: what the script gives to the tape.
        batch_dim: what the script says; None: nothing.
        loaded: positions of tensors of loaders' batches, which have a row for each sample.
    """
    shapes = [tuple(tensor.shape) for tensor in inputs]
    if batch_dim is not None:
        return _said_layouts(inputs, batch_dim)
    main = next((shape for shape in shapes if shape), ())
    factors = [{length for i in _find_factored(shape, shapes) for length in shapes[i][:2]} for shape in shapes]
    lengths = Counter(length for shape, pair in zip(shapes, factors, strict=True) for length in {*shape[:3], *pair})
    # Lengths of several tensors, or of the first one; of those that are found equally often, dimension 0 of the first.
    if loaded:
        lengths = Counter(len(inputs[i]) for i in loaded)
        main = shapes[min(loaded)]
    candidates = [length for length, count in lengths.items() if length > 1 and (count > 1 or length in main[:2])]
    candidates.sort(key=lambda length: (-lengths[length], main.index(length) if length in main else len(main)))
    proposed = dict[TapeLayout, None]()
    for length in candidates:
        for prefer in (_dimension_zero, _dimension_one, _of_states):
            layouts = [_locate(shape, length, shapes, prefer) for shape in shapes]
            squares = [shape != main and len(shape) == 2 and set(shape) == {length} for shape in shapes]
            # A square of lengths may be a mask of no sample's; beside a loader's batch all else may be weights.
            weights = [bool(loaded and shape) and i not in loaded for i, shape in enumerate(shapes)]
            for masks in ((False,) * len(shapes), squares, weights):
                chosen = (InputLayout(None) if m else layout for layout, m in zip(layouts, masks, strict=True))
                proposed[TapeLayout(tuple(chosen))] = None
    return [*proposed][:MOST_LAYOUTS]


def _dimension_zero(shape: Sequence[int]) -> int:
    return 0


def _dimension_one(shape: Sequence[int]) -> int:
    return 1


def _of_states(shape: Sequence[int]) -> int:
    return 1 if len(shape) > 2 else 0


def _locate(
    shape: Sequence[int], samples: int, shapes: Sequence[Sequence[int]], prefer: Callable[[Sequence[int]], int]
) -> InputLayout:
    """Return where a tensor of a shape has that many samples: along the preferred dimension, or another.

    Args:
        shape: that of the tensor.
        samples: how many samples the batch has.
        shapes: those of all inputs.
        prefer: returns the preferred dimension of a shape.
    """
    if not shape:
        return InputLayout(0)
    at = prefer(shape)
    if at < len(shape) and shape[at] == samples:
        return InputLayout(at)
    if samples in shape[:3]:
        return InputLayout(list(shape).index(samples))
    for i in _find_factored(shape, shapes):
        if samples in shapes[i][:2]:
            at = prefer(shapes[i])
            return InputLayout(at if shapes[i][at] == samples else list(shapes[i]).index(samples), i)
    return InputLayout(None)


def _find_factored(shape: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the positions of inputs whose first two dimensions as one are the first of a shape."""
    pairs = (tuple(candidate[:2]) for candidate in shapes)
    return [i for i, pair in enumerate(pairs) if len(pair) == 2 and min(pair) > 1 and shape[:1] == (pair[0] * pair[1],)]


def _said_layouts(inputs: Sequence[Tensor], batch_dim: BatchDim) -> list[TapeLayout]:
    def dim_of(tensor: Tensor) -> int | None:
        dim = batch_dim(tensor) if callable(batch_dim) else batch_dim
        return None if dim is None or not -tensor.dim() <= dim < tensor.dim() else dim % tensor.dim()

    dims = [dim_of(tensor) for tensor in inputs]
    main_at = next((i for i, dim in enumerate(dims) if dim is not None), None)
    if main_at is None:
        return []
    main, at = inputs[main_at], dims[main_at]
    if at is None or main.shape[at] < 2:
        return []
    samples, shapes = main.shape[at], [tuple(tensor.shape) for tensor in inputs]
    layouts = list[InputLayout]()
    for tensor, dim in zip(inputs, dims, strict=True):
        if not tensor.dim():
            layouts.append(InputLayout(0))
        elif dim is not None and tensor.shape[dim] == samples:
            layouts.append(InputLayout(dim))
        elif factored := [i for i in _find_factored(tensor.shape, shapes) if _has_samples(shapes[i], dims[i], samples)]:
            layouts.append(InputLayout(dims[factored[0]], factored[0]))
        else:
            layouts.append(InputLayout(None))
    return [TapeLayout(tuple(layouts))]


def _has_samples(shape: Sequence[int], dim: int | None, samples: int) -> bool:
    return dim is not None and dim < 2 and shape[dim] == samples


def try_layouts(
    attempts: Sequence[tuple[TapeLayout, Callable[[], T]]], divides: bool, line: str, reads_batches: bool = False
) -> tuple[TapeLayout, T]:
    """Return the first layout whose attempt succeeds, and its result.

    Args:
        attempts: layouts, the likeliest first, each with a function that compiles for it; on all workers alike.
        divides: whether the plan divides batches, so that the user is told of one that it does not divide.
        line: file and line of the script where the tape ends.
        reads_batches: whether the tape computes from a loader's batches before a model is called.

    Raises:
        NotDivided: no layout is left, and what is computed before a model is called may be why.
        PolylaneError: that of the last layout, where none is left: it asks least of the batch.
    """
    reasons = list[PolylaneError]()
    for layout, attempt in attempts:
        try:
            result = attempt()
        except CallsDiffer:  # workers have parted, whatever is compiled
            raise
        except PolylaneError as error:
            reasons.append(error)
            continue
        if layout == UNDIVIDED and divides:
            _note_undivided(line, str(reasons[0]) if reasons else _NO_LENGTH)
        return layout, result
    if reads_batches:
        raise NotDivided(f"{line} is not computed sample by sample: {reasons[0] if reasons else _NO_LENGTH}")
    raise reasons[-1]


_NO_LENGTH = "its tensors have no length in common"
_NOTED = set[str]()


def _note_undivided(line: str, reason: str) -> None:
    if line not in _NOTED:
        _NOTED.add(line)
        warnings.warn(
            f"every replica computes the whole batch ({line}), for nothing shows how samples divide it: {reason}; "
            "if they are along another dimension than 0, say so: polylane.prepare(..., batch_dim=1), or a function "
            "that returns the dimension for each tensor",
            stacklevel=2,
        )


def count_common(inputs: Sequence[InputLayout], other_inputs: Sequence[InputLayout]) -> int:
    """Return how many of the first inputs are laid out alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(inputs, other_inputs, strict=False)))
