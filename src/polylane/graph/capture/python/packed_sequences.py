"""Packed sequences under export: batches of sequences of several lengths stay padded, and each sample has its own rows.

A PackedSequence mixes the samples of a batch, and its sizes depend on the lengths. While an export runs torch's two
functions give something else, which a recurrent layer takes just as well:

    pack_padded_sequence(x, lengths)      PackedSequence(rows, PaddedForm): the rows within the lengths, by sample
    lstm(packed)                          one operator on the padded x and the lengths
    pad_packed_sequence(packed)           what that operator gave, which is padded already

Rows come in another order than torch's; what depends on that order comes out different in the capture's self-check.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules import rnn as layers
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from polylane.graph.capture.python.python_operators import emit_call
from polylane.graph.operators.packed_recurrent import RECURRENT, PackedRecurrent


@dataclass(eq=False)
class RecurrentSite:
    """One call of recurrent layers on packed sequences.

    Attributes:
        kind: name of torch's operator, "lstm".
        states: how many states the layers have, a hidden one and perhaps a cell's.
        weights: how many tensors are their weights.
        settings: the further arguments of torch's operator: biases, layers, dropout, training, bidirectional.
        in_order: whether samples must come longest first.
    """

    kind: str
    states: int
    weights: int
    settings: tuple[Any, ...]
    in_order: bool

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        x, *states = tensors[: 1 + self.states]
        directions = 2 if self.settings[-1] else 1
        out = x.new_empty(x.shape[0], x.shape[1], directions * states[0].shape[-1])
        return [out, *(state.new_empty(state.shape) for state in states)]

    def write_operator(self, node: fx.Node, part: fx.Node, tensors: Sequence[fx.Node]) -> None:
        """Turn the exported node into the operator that runs: ``aten.lstm.input``, but for the lengths."""
        x, lengths = tensors[0], tensors[-1]
        states, weights = list(tensors[1 : 1 + self.states]), list(tensors[1 + self.states : -1])
        node.target = PackedRecurrent(self.kind)
        node.meta["op"] = f"aten.{self.kind}.input"
        node.args = (part, None, 0, x, states if self.kind == "lstm" else states[0], weights, *self.settings, True)
        node.kwargs = {"lengths": lengths, "in_order": self.in_order}


class PaddedForm:
    """In the place of a PackedSequence's ``batch_sizes``: the padded batches whose rows are within the lengths.

    Args:
        lengths: number of times of each sample.
        samples: number of samples, which may be symbolic.
        times: number of times of the padded batches.
        rows: positions of the rows within the lengths among all rows of a padded batch, sample by sample.
        in_order: whether samples must come longest first.
    """

    device = torch.device("cpu")  # which torch requires of batch_sizes

    def __init__(self, lengths: Tensor, samples: Any, times: Any, rows: Tensor, in_order: bool) -> None:
        self.lengths, self.samples, self.times, self.rows, self.in_order = lengths, samples, times, rows, in_order
        self._padded: list[tuple[Tensor, Tensor, bool]] = []  # rows, what they are the rows of, whether zero beyond

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the numbers of a PackedSequence's rows at each time cannot be followed (.{name})")

    def __getitem__(self, time: Any) -> Any:
        if not isinstance(time, int) or time != 0:
            raise TypeError("the numbers of a PackedSequence's rows at each time cannot be followed")
        return self.samples

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in RECURRENT or kwargs or not isinstance(args[1], cls):
            raise TypeError(f"{name} of a PackedSequence's batch_sizes cannot be followed")
        return args[1].run_layers(name, args[0], *args[2:])

    def rows_of(self, padded: Tensor, is_clean: bool) -> Tensor:
        """Return the rows of a padded batch that are within the lengths."""
        rows = padded.flatten(0, 1)[self.rows]
        self._padded.append((rows, padded, is_clean))
        return rows

    def find_padded(self, rows: Tensor) -> tuple[Tensor, bool]:
        """Return the padded batch of some rows, and whether it is zero beyond the lengths."""
        entry = next(((padded, is_clean) for packed, padded, is_clean in self._padded if packed is rows), None)
        if entry is not None:
            return entry
        empty = rows.new_zeros(self.samples * self.times, *rows.shape[1:])
        return empty.index_put((self.rows,), rows).unflatten(0, (self.samples, self.times)), True

    def run_layers(self, kind: str, rows: Tensor, hx: Any, weights: Sequence[Tensor], *settings: Any) -> Any:
        """Write recurrent layers into the graph, and return what torch's operator would: rows, and the last states."""
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        site = RecurrentSite(kind, len(states), len(weights), settings, self.in_order)
        out, *last_states = emit_call(site, [self.find_padded(rows)[0], *states, *weights, self.lengths])
        return (self.rows_of(out, is_clean=True), *last_states)

    def find_longest(self) -> Any:
        """Return the largest length: the number of times, if the batch says so, or else the number that it says."""
        largest = self.lengths.max()
        if largest == self.times:
            return self.times
        return int(largest)


def resize_times(padded: Tensor, times: Any) -> Tensor:
    """Return a padded batch, (samples, times, ...), of another number of times: longer by zeros, or shorter."""
    if statically_known_true(padded.shape[1] == times):
        return padded
    missing = times - padded.shape[1]
    return F.pad(padded, (*[0, 0] * (padded.dim() - 2), 0, missing)) if missing > 0 else padded[:, :times]


class _Packing:
    """torch's functions for packed sequences, during one export."""

    def __init__(self, pack: Callable[..., Any], pad: Callable[..., Any]) -> None:
        self._pack, self._pad = pack, pad
        self._rows: list[tuple[Tensor, Tensor, Any, Tensor]] = []  # given lengths, as integers, times, rows within

    def pack(self, x: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> PackedSequence:
        if not isinstance(x, FakeTensor) or not isinstance(lengths, FakeTensor):
            packed: PackedSequence = self._pack(x, lengths, batch_first, enforce_sorted)
            return packed
        padded = x if batch_first else x.transpose(0, 1)
        int_lengths, times, rows = self._rows_within(lengths, padded)
        form = PaddedForm(int_lengths, padded.shape[0], times, rows, enforce_sorted)
        padded = resize_times(padded, times)
        return PackedSequence(form.rows_of(padded, is_clean=False), form)  # type: ignore[arg-type]

    def _rows_within(self, lengths: Tensor, padded: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Return lengths as integers, a number of times, and the rows within: the same for all of one tensor's."""
        for key, *entry in self._rows:
            if key is lengths:
                return tuple(entry)
        int_lengths, times = lengths.to(torch.int64), padded.shape[1]
        mask = torch.arange(times, device=padded.device) < int_lengths.to(padded.device)[:, None]
        rows = mask.flatten().nonzero().flatten()
        self._rows.append((lengths, int_lengths, times, rows))
        return int_lengths, times, rows

    def pad(
        self, packed: PackedSequence, batch_first: bool, padding_value: float, total_length: int | None
    ) -> tuple[Tensor, Tensor]:
        form: Any = packed.batch_sizes
        if not isinstance(form, PaddedForm):
            result: tuple[Tensor, Tensor] = self._pad(packed, batch_first, padding_value, total_length)
            return result
        padded, is_clean = form.find_padded(packed.data)
        if total_length is None or not statically_known_true(total_length == form.times):
            longest = form.find_longest()
            if total_length is not None and total_length < longest:
                raise ValueError(f"total_length={total_length} is less than the longest sequence, {longest}")
            times = longest if total_length is None else total_length
            padded = resize_times(padded, times)
        if padding_value != 0.0 or not is_clean:
            within = torch.arange(padded.shape[1], device=padded.device) < form.lengths.to(padded.device)[:, None]
            padded = padded.masked_fill(~within.unflatten(1, (-1, *[1] * (padded.dim() - 2))), padding_value)
        return padded if batch_first else padded.transpose(0, 1), form.lengths


# The export that is running; torch's functions have its code then, which finds it here.
_RUNNING: list[_Packing] = []


def running() -> _Packing:
    """Return the packing of the export that is running."""
    return _RUNNING[-1]


# Their code runs in the place of torch's, with its globals: none of this file's names are there.
def _pack_code(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    from polylane.graph.capture.python.packed_sequences import running

    return running().pack(input, lengths, batch_first, enforce_sorted)


def _pad_code(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> Any:
    from polylane.graph.capture.python.packed_sequences import running

    return running().pad(sequence, batch_first, padding_value, total_length)


def _whole_number(value: Any) -> Any:
    """``int``, but a symbolic size stays one; Python's own would fix it to the example's."""
    return value if isinstance(value, torch.SymInt) else int(value)


@contextmanager
def packed_sequences_padded() -> Iterator[None]:
    """Context manager: during export, packed sequences stay padded batches, wherever their functions are called."""
    replaced: list[tuple[Any, Any]] = [(rnn.pack_padded_sequence, _pack_code), (rnn.pad_packed_sequence, _pad_code)]
    codes = [of.__code__ for of, _ in replaced]
    _RUNNING.append(_Packing(*(types.FunctionType(of.__code__, of.__globals__) for of, _ in replaced)))
    for of, replacement in replaced:
        of.__code__ = replacement.__code__
    try:
        with patch.object(layers, "int", _whole_number, create=True):
            yield
    finally:
        for (of, _), code in zip(replaced, codes, strict=True):
            of.__code__ = code
        _RUNNING.pop()
