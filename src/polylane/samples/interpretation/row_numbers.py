"""Row numbers: positions of a value's own rows, which differ between a part and the whole, but name the same rows.

    numbers = arange(samples)       0 .. 6 in the whole, 0 .. 3 and 0 .. 2 in its parts
    x[numbers, labels]              each sample's own row in either

The functions here decide about one operator each, with the placement that its first output would have if samples
are sharded (``placement``; None where no rule gives one).
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from polylane.graph.nodes.facts import base_name, bind_arguments
from polylane.placement.operator_view import OperatorNode
from polylane.placement.placement import REPLICATE, Placement, Replicate, Shard
from polylane.placement.strategy import OperatorCall, TensorValue
from polylane.samples.interpretation.known_states import KnownStates
from polylane.samples.interpretation.replica_calls import COPYING, EXPANDING, REFORMING

# They give numbers of columns, never negative ones: the place of these among their results. All but the last two are
# below the length of the dimension that they look along.
_COLUMNS = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argmin": 0, "argsort": 0}
_COLUMNS |= {"arange": 0, "remainder": 0}

# They write or add rows at positions along dimension 0.
WRITING_ROWS = {"index_add", "index_copy", "index_put", "scatter", "scatter_add"}


def selects_own_rows(known_states: KnownStates, step: OperatorNode, placement: Placement | None) -> bool:
    """Return whether rows selected by a mask stay in sample order: mask and values have samples in dimension 0."""
    masks = [v for v in step.call.inputs if v.dtype is torch.bool]
    if len(masks) != 1:
        return False
    rows = [known_states.states[key] for key in step.input_keys]
    mask, x = masks[0], step.call.inputs[0]
    is_sharded = all(isinstance(p, Shard) and p.dim == 0 for p in rows)
    is_aligned = x.shape[: mask.dim] == mask.shape and (step.call.base == "index" or x.dim == mask.dim)
    return is_sharded and is_aligned and isinstance(placement, Shard) and placement.dim == 0


def finds_own_rows(known_states: KnownStates, step: OperatorNode) -> bool:
    """Return whether the indices of a mask's true elements are in sample order; those of dimension 0 are row numbers.

    The index table of nonzero is only known for one-dimensional masks, since it mixes all dimensions.
    """
    mask, state = step.call.inputs[0], known_states.states[step.input_keys[0]]
    if not isinstance(state, Shard) or state.dim != 0 or (step.call.base == "nonzero" and mask.dim != 1):
        return False
    known_states.size_cuts[step.output_keys[0]] = state.cuts
    return True


def reads_own_rows(known_states: KnownStates, step: OperatorNode, placement: Placement | None) -> bool:
    """Return whether an indexing by row numbers reads, for every sample, the sample's own row."""
    x, indices = step.input_keys[0], step.call["indices"]
    offset = next((i for i, value in enumerate(indices) if value is not None), 0)  # dimensions that are not indexed
    indices = indices[offset:]
    if x in known_states.size_cuts or not all(isinstance(i, TensorValue) for i in indices):
        return False
    numbered = [i for i, value in enumerate(indices) if step.input_keys[value.index] in known_states.size_cuts]
    if len(numbered) != 1:
        return False
    (at,) = numbered  # the dimension of x that is read by row numbers, as y[times, numbers] does where time comes first
    cuts = known_states.size_cuts[step.input_keys[indices[at].index]]
    if known_states.states[x] != Shard(offset + at, cuts):  # the numbers are of another tensor's rows
        return False
    placed = [(known_states.states[step.input_keys[i.index]], i.dim) for i in indices]
    wide = max(dims for _, dims in placed)  # indices are broadcast; their dimensions come in place of those indexed
    rows = [Shard(offset + p.dim + wide - dims, p.cuts) for p, dims in placed if isinstance(p, Shard)]
    return isinstance(placed[at][0], Shard) and all(row == placement for row in rows)


def numbers_blocks(known_states: KnownStates, step: OperatorNode, node: fx.Node, placement: Placement | None) -> bool:
    """Return whether an operator makes row numbers of blocks of rows, each of which has the rows of one sample.

        numbers * k             first rows of blocks of k; it records their distance
        ... + columns           rows of a value that has k for each sample, if all columns are from 0 to k - 1

    A part of the batch numbers its own rows from 0, so that in either the same rows are named.
    """
    call, keys, out = step.call, step.input_keys, step.output_keys[0]
    numbered = [key for key in keys if key in known_states.size_cuts]
    if len(numbered) != 1 or not isinstance(placement, Shard):
        return False
    (key,) = numbered
    rows, numbers = known_states.states[key], next(v for v, k in zip(call.inputs, keys, strict=True) if k == key)
    wide = call.outputs[0].dim
    if not isinstance(rows, Shard) or Shard(rows.dim + wide - numbers.dim, rows.cuts) != placement:
        return False
    stride, cuts = known_states.strides.get(key, 1), known_states.size_cuts[key]
    if call.base in ("mul", "multiply"):
        factor = next((v for v in call.arguments.values() if type(v) is int), 0)
        if len(keys) != 1 or stride != 1 or factor < 1:
            return False
        known_states.size_cuts[out], known_states.strides[out] = cuts, factor
        return True
    if call.base != "add" or call.arguments.get("alpha", 1) != 1 or len(keys) != 2 or stride < 2:
        return False
    other_node = next(n for n in node.all_input_nodes if known_states.key_of(n) != key)
    value, state = next((v, known_states.states[k]) for v, k in zip(call.inputs, keys, strict=True) if k != key)
    if isinstance(state, Shard) and Shard(state.dim + wide - value.dim, state.cuts) != placement:
        return False
    bound = bound_of_columns(other_node)
    if bound is None or bound > stride or not isinstance(state, (Shard, Replicate)):
        return False
    known_states.size_cuts[out] = tuple(tuple(stride * position for position in segment) for segment in cuts)
    return True


def bound_of_columns(node: fx.Node) -> int | None:
    """Return a number that all elements are below, for numbers of columns (never negative); None if unknown."""
    while base_name(node) in REFORMING | EXPANDING | COPYING | {"slice", "transpose", "permute"}:
        node = node.all_input_nodes[0]
    output_index = 0
    if node.target is operator.getitem:
        output_index, node = int(node.args[1]), node.args[0]  # type: ignore[arg-type, assignment]
    base = base_name(node)
    if node.op != "call_function" or base not in _COLUMNS or _COLUMNS[base] != output_index:
        return None
    arguments = bind_arguments(node)[1]
    if base == "arange":
        start, end, step = (
            arguments.get(name, default) for name, default in (("start", 0), ("end", None), ("step", 1))
        )
        fixed = isinstance(start, int) and isinstance(end, int) and isinstance(step, int)
        return max(end, 1) if fixed and start >= 0 and step > 0 else None  # type: ignore[type-var, operator]
    if base == "remainder":
        divisor, val = arguments.get("other"), node.meta.get("val")
        is_integer = isinstance(val, Tensor) and not val.is_floating_point()
        return divisor if is_integer and type(divisor) is int and divisor > 0 else None
    x, dim = arguments["self"], arguments.get("dim")
    size = None if dim is None else x.meta["val"].shape[dim]
    return size if isinstance(size, int) else None


def reads_own_bags(known_states: KnownStates, step: OperatorNode, placement: Placement | None) -> bool:
    """Return whether bags of equally many indices, those of a table's rows, are each sample's own.

    Bag i begins at index i * k, as torch says it of indices in two dimensions.
    """
    call = step.call
    table, indices, starts = (call[name] for name in ("weight", "indices", "offsets"))
    counted = call["scale_grad_by_freq"] and table.gradient
    if counted or call["include_last_offset"] or indices.dim != 1 or placement is None:
        return False
    stride = known_states.strides.get(step.input_keys[starts.index], 0)
    if (
        stride < 1
        or indices.count != stride * starts.count
        or known_states.states[step.input_keys[table.index]] != REPLICATE
    ):
        return False
    other_keys = [key for number, key in enumerate(step.input_keys) if number not in (table.index, starts.index)]
    rows = all(
        key not in known_states.size_cuts and known_states.states[key] == known_states.placements[key]
        for key in other_keys
    )
    return rows and all(isinstance(known_states.states[key], Shard) for key in other_keys)


def writes_own_rows(known_states: KnownStates, step: OperatorNode, placement: Placement | None) -> bool:
    """Return whether an operator writes at row numbers, and writes to every sample's rows the sample's own values."""
    x, indices = step.input_keys[0], step.call.arguments.get("indices", [step.call.arguments.get("index")])
    if step.call.arguments.get("dim", 0) % max(step.call.inputs[0].dim, 1) != 0 or known_states.states[x] != placement:
        return False
    if x in known_states.size_cuts or not all(isinstance(i, TensorValue) for i in indices):
        return False
    keys = [step.input_keys[i.index] for i in indices]
    if [key in known_states.size_cuts for key in keys] != [True, *[False] * (len(keys) - 1)]:
        return False
    positions = known_states.states[keys[0]]
    if (
        placement != Shard(0, known_states.size_cuts[keys[0]])
        or not isinstance(positions, Shard)
        or not fits_rows(step.call)
    ):
        return False
    other_keys = [key for key in step.input_keys[1:] if key not in keys]
    if any(key in known_states.size_cuts for key in other_keys):
        return False
    return positions.dim == 0 and all(
        known_states.states[key] in (positions, REPLICATE) for key in (*keys, *other_keys)
    )


def fits_rows(call: OperatorCall) -> bool:
    """Return whether an operator writes row i of its values where position i says: nothing is broadcast over rows."""
    if call.base in ("scatter", "scatter_add"):
        return True  # element by element
    indices = [index for index in call.arguments.get("indices", [call.arguments.get("index")]) if index is not None]
    values = call.arguments.get("values")
    has_row_shape = values is None or values.count == 1 or values.dim == call.inputs[0].dim - len(indices) + 1
    return has_row_shape and all(index.dim == 1 for index in indices)
