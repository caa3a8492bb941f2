"""Row numbers: positions of a value's own rows, which differ between a part and the whole, but name the same rows.

    numbers = arange(samples)       0 .. 6 in the whole, 0 .. 3 and 0 .. 2 in its parts
    x[numbers, labels]              each sample's own row in either

The functions here are asked about one operator each, with the placement that its first output would have if samples
are sharded (``placement``; None where no rule gives one).
"""

from __future__ import annotations

import torch

from polylane.placement.operator_view import OperatorNode
from polylane.placement.placement import REPLICATE, Placement, Shard
from polylane.placement.strategy import OperatorCall, TensorValue
from polylane.samples.interpretation.known_states import KnownStates

# They write or add rows at positions along dimension 0.
WRITING_ROWS = {"index_add", "index_copy", "index_put", "scatter", "scatter_add"}


def selects_own_rows(known: KnownStates, step: OperatorNode, placement: Placement | None) -> bool:
    """Return whether rows selected by a mask stay in sample order: mask and values have samples in dimension 0."""
    masks = [v for v in step.call.inputs if v.dtype is torch.bool]
    if len(masks) != 1:
        return False
    rows = [known.states[key] for key in step.input_keys]
    mask, x = masks[0], step.call.inputs[0]
    first = all(isinstance(p, Shard) and p.dim == 0 for p in rows)
    same = x.shape[: mask.dim] == mask.shape and (step.call.base == "index" or x.dim == mask.dim)
    return first and same and isinstance(placement, Shard) and placement.dim == 0


def finds_own_rows(known: KnownStates, step: OperatorNode) -> bool:
    """Return whether the indices of a mask's true elements are in sample order; those of dimension 0 are row numbers.

    The index table of nonzero is only known for one-dimensional masks, since it mixes all dimensions.
    """
    mask, state = step.call.inputs[0], known.states[step.input_keys[0]]
    if not isinstance(state, Shard) or state.dim != 0 or (step.call.base == "nonzero" and mask.dim != 1):
        return False
    known.size_cuts[step.output_keys[0]] = state.cuts
    return True


def reads_own_rows(known: KnownStates, step: OperatorNode, placement: Placement | None) -> bool:
    """Return whether an indexing by row numbers reads, for every sample, the sample's own row."""
    x, indices = step.input_keys[0], step.call["indices"]
    if x in known.size_cuts or not all(isinstance(i, TensorValue) for i in indices):
        return False
    if [step.input_keys[i.index] in known.size_cuts for i in indices] != [True, *[False] * (len(indices) - 1)]:
        return False
    cuts = known.size_cuts[step.input_keys[indices[0].index]]
    if known.states[x] != Shard(0, cuts):  # the numbers are of another tensor's rows
        return False
    placed = [(known.states[step.input_keys[i.index]], i.dim) for i in indices]
    wide = max(dims for _, dims in placed)  # indices are broadcast; their dimensions come first
    rows = [Shard(p.dim + wide - dims, p.cuts) for p, dims in placed if isinstance(p, Shard)]
    return isinstance(placed[0][0], Shard) and all(row == placement for row in rows)


def reads_own_bags(known: KnownStates, step: OperatorNode, placement: Placement | None) -> bool:
    """Return whether bags of equally many indices, those of a table's rows, are each sample's own.

    Bag i begins at index i * k, as torch says it of indices in two dimensions.
    """
    call = step.call
    table, indices, starts = (call[name] for name in ("weight", "indices", "offsets"))
    counted = call["scale_grad_by_freq"] and table.gradient
    if counted or call["include_last_offset"] or indices.dim != 1 or placement is None:
        return False
    stride = known.strides.get(step.input_keys[starts.index], 0)
    if stride < 1 or indices.count != stride * starts.count or known.states[step.input_keys[table.index]] != REPLICATE:
        return False
    others = [key for number, key in enumerate(step.input_keys) if number not in (table.index, starts.index)]
    rows = all(key not in known.size_cuts and known.states[key] == known.placements[key] for key in others)
    return rows and all(isinstance(known.states[key], Shard) for key in others)


def writes_own_rows(known: KnownStates, step: OperatorNode, placement: Placement | None) -> bool:
    """Return whether an operator writes at row numbers, and writes to every sample's rows the sample's own values."""
    x, indices = step.input_keys[0], step.call.arguments.get("indices", [step.call.arguments.get("index")])
    if step.call.arguments.get("dim", 0) % max(step.call.inputs[0].dim, 1) != 0 or known.states[x] != placement:
        return False
    if x in known.size_cuts or not all(isinstance(i, TensorValue) for i in indices):
        return False
    keys = [step.input_keys[i.index] for i in indices]
    if [key in known.size_cuts for key in keys] != [True, *[False] * (len(keys) - 1)]:
        return False
    positions = known.states[keys[0]]
    if placement != Shard(0, known.size_cuts[keys[0]]) or not isinstance(positions, Shard) or not fits_rows(step.call):
        return False
    others = [key for key in step.input_keys[1:] if key not in keys]
    if any(key in known.size_cuts for key in others):
        return False
    return positions.dim == 0 and all(known.states[key] in (positions, REPLICATE) for key in (*keys, *others))


def fits_rows(call: OperatorCall) -> bool:
    """Return whether an operator writes row i of its values where position i says: nothing is broadcast over rows."""
    if call.base in ("scatter", "scatter_add"):
        return True  # element by element
    indices = [each for each in call.arguments.get("indices", [call.arguments.get("index")]) if each is not None]
    values = call.arguments.get("values")
    whole = values is None or values.count == 1 or values.dim == call.inputs[0].dim - len(indices) + 1
    return whole and all(each.dim == 1 for each in indices)
