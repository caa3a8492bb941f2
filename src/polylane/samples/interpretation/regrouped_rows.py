"""Regrouped rows: rows in an order that data decides, as a mixture of experts has them, each still its own sample's.

Tokens that are sorted by expert, or found by a mask, stand in another order in the whole batch than one part after the
other; but each of them is a row of some part. Values of one such order correspond row by row, between the whole and
its parts:

    keys, numbers = sort(experts)              an order begins: numbers[j] is the token that stands at j
    x[numbers]                                 regrouped, if x has the rows that are numbered
    f(regrouped, replicated)                   regrouped, if f acts on each row by itself
    grouped product by the keys' counts        acts on each row by itself: its key chooses the weight
    zeros.index_add(0, numbers, regrouped)     rows of the samples again: each token's own are added to it
    regrouped[inverse of numbers]              rows of the samples again
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.nodes.memory import written_arguments
from polylane.placement.operator_view import OperatorNode
from polylane.placement.placement import REPLICATE, Cuts, Replicate, Shard, divide_cuts
from polylane.placement.rules.registry import rule_of
from polylane.placement.strategy import OperatorCall, TensorValue
from polylane.samples.interpretation.additivity import Groups, Inverse, Regrouped, State
from polylane.samples.interpretation.known_states import Derived, KnownStates
from polylane.samples.interpretation.replica_calls import COPYING, EXPANDING, REFORMING, has_same_numbers
from polylane.samples.interpretation.row_numbers import bound_of_columns, fits_rows
from polylane.samples.interpretation.transfer_functions import LIKE_SHAPED, derive_by_rules

# Row i of their result follows from row i of their inputs, if both have equally many rows along dimension 0.
_BY_ROW = {
    *("addmm", "cat", "chunk", "embedding", "gather", "glu", "index", "layer_norm", "linear", "log_softmax", "matmul"),
    *("mean", "mm", "rms_norm", "select", "slice", "softmax", "split", "split_with_sizes", "squeeze", "stack", "sum"),
    *("unbind", "unsqueeze"),
    *REFORMING,
    *EXPANDING,
}
_ADDING_ROWS = {"index_add", "scatter_add"}


def derive_regrouped(
    known_states: KnownStates, step: OperatorNode, replica_call: OperatorCall, node: fx.Node
) -> Derived:
    """Return the output states of an operator that regroups rows, acts on regrouped ones, or puts them back."""
    if written_arguments(node) or not step.input_keys:
        return None
    base, states = step.call.base, [known_states.states[key] for key in step.input_keys]
    if not has_same_numbers(step.call, replica_call):
        return _each_row(known_states, step, replica_call, node)
    if base in ("sort", "argsort"):
        return _sorted(known_states, step, node) or _inverse_by_sorting(known_states, step)
    if step.call.op == "aten.where.default" or base in ("nonzero", "nonzero_numpy"):
        return _found_across(known_states, step)
    if _is_grouped_product(step, states, node):
        return _grouped_product(known_states, step, states)
    if base in _ADDING_ROWS:
        return _added_to_own_rows(known_states, step, states)
    if base == "index_put":
        return _inverse_by_writing(known_states, step) or _added_to_own_rows(known_states, step, states)
    by_number = any(key in known_states.size_cuts for key in step.input_keys[1:])
    if base in ("index", "index_select") and by_number:
        return _taken(known_states, step, states)
    if base == "index" and isinstance(states[-1], Inverse):
        return _restored(states)
    if any(isinstance(state, Groups) for state in states):
        return _counted(step, states)
    if not any(isinstance(state, Regrouped) for state in states):
        return None
    if base in LIKE_SHAPED:
        placed = known_states.placements.get(step.output_keys[0])
        return None if placed is None else [placed]
    if base == "histc":
        return _group_sizes(known_states, step)
    if any(key in known_states.size_cuts for key in step.input_keys):
        return _divided_numbers(known_states, step, states)
    return _each_row(known_states, step, replica_call, node)


# ---- an order begins ----


def _sorted(known_states: KnownStates, step: OperatorNode, node: fx.Node) -> Derived:
    """Sort one number of each row: the keys in ascending order, and which row each was."""
    (key,), x = step.input_keys[:1], step.call.inputs[0]
    state = known_states.states[key]
    if x.dim != 1 or not isinstance(state, Shard) or key in known_states.size_cuts:
        return None
    output_state: State = Regrouped(state, step.name)
    numbers = step.output_keys[-1]
    known_states.size_cuts[numbers] = known_states.permutations[step.name] = state.cuts
    if len(step.output_keys) > 1 and not step.call.arguments.get("descending"):
        columns = bound_of_columns(node.all_input_nodes[0])
        if columns is not None:
            known_states.sorted_columns[step.output_keys[0]] = columns
    return [output_state] * len(step.output_keys)


def _found_across(known_states: KnownStates, step: OperatorNode) -> Derived:
    """Find a mask's true elements where the samples are not its first dimension: other numbers come first."""
    state = known_states.states[step.input_keys[0]]
    placed = [known_states.placements.get(key) for key in step.output_keys]
    if not isinstance(state, Shard) or state.dim == 0 or step.input_keys[0] in known_states.size_cuts:
        return None
    rows = placed[0]
    if not isinstance(rows, Shard) or len(placed) != step.call.inputs[0].dim:
        return None
    known_states.size_cuts[step.output_keys[state.dim]] = state.cuts
    return [Regrouped(rows, step.name)] * len(placed)


# ---- rows are taken, and put back ----


def _taken(known_states: KnownStates, step: OperatorNode, states: list[State]) -> Derived:
    """Take rows by their numbers: x[numbers] or x[numbers, other positions]."""
    numbers, other_states = states[1], states[2:]
    rows = known_states.placements.get(step.output_keys[0])
    if not isinstance(numbers, Regrouped) or rows != numbers.rows or step.call.inputs[1].dim != 1:
        return None
    if not _numbers_first(known_states, step) or step.input_keys[0] in known_states.size_cuts:
        return None
    is_aligned = all(other_state in (numbers, REPLICATE) for other_state in other_states)
    return [numbers] if is_aligned and states[0] == Shard(0, known_states.size_cuts[step.input_keys[1]]) else None


def _added_to_own_rows(known_states: KnownStates, step: OperatorNode, states: list[State]) -> Derived:
    """Add regrouped rows to the rows that they came from: sums do not depend on the order."""
    numbers, other_states = states[1], states[2:]
    adds = step.call.base in _ADDING_ROWS or step.call.arguments.get("accumulate") is True
    if not adds or not isinstance(numbers, Regrouped) or not _numbers_first(known_states, step):
        return None
    if not fits_rows(step.call):
        return None
    if any(key in known_states.size_cuts for key in (step.input_keys[0], *step.input_keys[2:])):
        return None
    is_aligned = all(other_state in (numbers, REPLICATE) for other_state in other_states)
    rows = Shard(0, known_states.size_cuts[step.input_keys[1]])
    return [rows] if is_aligned and states[0] == rows else None


def _numbers_first(known_states: KnownStates, step: OperatorNode) -> bool:
    """Return whether an operator looks along dimension 0 by row numbers, and by no others."""
    if step.call.arguments.get("dim", 0) % max(step.call.inputs[0].dim, 1) != 0:
        return False
    indices = step.call.arguments.get("indices", [step.call.arguments.get("index")])
    if not all(isinstance(value, TensorValue) and value.index == 1 + i for i, value in enumerate(indices)):
        return False  # "index" reads its value first, then the positions
    return [step.input_keys[value.index] in known_states.size_cuts for value in indices] == [True] + [False] * (
        len(indices) - 1
    )


def _restored(states: list[State]) -> Derived:
    """Read regrouped rows at the inverse of their order."""
    regrouped, inverse = states[0], states[-1]
    is_inverse = isinstance(regrouped, Regrouped) and isinstance(inverse, Inverse) and len(states) == 2
    return [inverse.rows] if is_inverse and regrouped == Regrouped(inverse.rows, inverse.order) else None  # type: ignore[union-attr]


def _permuting(known_states: KnownStates, key: Any) -> Inverse | None:
    """Return the inverse of a value that numbers every row once; None for any other value."""
    state, cuts = known_states.states.get(key), known_states.size_cuts.get(key)
    if not isinstance(state, Regrouped) or cuts is None or known_states.permutations.get(state.order) != cuts:
        return None
    return Inverse(state.order, state.rows)


def _inverse_by_sorting(known_states: KnownStates, step: OperatorNode) -> Derived:
    """Sort the numbers of all rows: where each of them stands."""
    inverse = _permuting(known_states, step.input_keys[0])
    if inverse is None or step.call.base != "argsort" or step.call.arguments.get("descending"):
        return None
    return [inverse]


def _inverse_by_writing(known_states: KnownStates, step: OperatorNode) -> Derived:
    """Write 0, 1, 2, ... at the numbers of all rows: all of the value is overwritten."""
    if len(step.input_keys) != 3 or step.call["accumulate"] or step.call.inputs[0].dim != 1:
        return None
    inverse, counted = _permuting(known_states, step.input_keys[1]), step.input_keys[2]
    counts = (
        inverse is not None and known_states.states[counted] == inverse.rows == known_states.states[step.input_keys[0]]
    )
    in_turn = inverse is not None and known_states.size_cuts.get(counted) == inverse.rows.cuts
    return [inverse] if counts and in_turn else None


# ---- acting on regrouped rows ----


def _each_row(known_states: KnownStates, step: OperatorNode, replica_call: OperatorCall, node: fx.Node) -> Derived:
    """Act on each row by itself: what the rules prove of rows in order is so of rows in any."""
    base, states = step.call.base, {key: known_states.states[key] for key in step.input_keys}
    orders = {state.order for state in states.values() if isinstance(state, Regrouped)}
    if any(key in known_states.size_cuts for key in states) or len(orders) != 1:
        return None
    if not all(isinstance(state, (Regrouped, Replicate)) for state in states.values()):
        return None
    pointwise = rule_of("aten.mul.Tensor")
    if step.call.prefix or (base not in _BY_ROW and rule_of(step.call.op) is not pointwise):
        return None
    (order,) = orders
    old_states = dict(known_states.states)
    known_states.states |= {key: state.rows for key, state in states.items() if isinstance(state, Regrouped)}
    output_states = derive_by_rules(known_states, step, replica_call, node)
    known_states.states = old_states
    counts = {state.rows for state in states.values() if isinstance(state, Regrouped)}
    if output_states is None or len(counts) != 1 or any(state not in counts for state in output_states):
        return None  # rows were joined or cut
    if base in COPYING and (columns := known_states.sorted_columns.get(step.input_keys[0])) is not None:
        known_states.sorted_columns[step.output_keys[0]] = columns
    return [Regrouped(state, order) for state in output_states if isinstance(state, Shard)]


def _divided_numbers(known_states: KnownStates, step: OperatorNode, states: list[State]) -> Derived:
    """Tell row and column of flat row numbers apart: numbers // columns, numbers % columns."""
    key, state = step.input_keys[0], states[0]
    if len(states) != 1 or not isinstance(state, Regrouped):
        return None
    columns, out = step.call.arguments.get("other"), step.output_keys[0]
    is_floor = step.call.base == "floor_divide" or step.call.arguments.get("rounding_mode") == "floor"
    if step.call.base in COPYING | REFORMING | EXPANDING:
        known_states.size_cuts[out] = known_states.size_cuts[key]
        return [state] if known_states.placements.get(out) == state.rows else None
    cuts: Cuts | None = None
    if isinstance(columns, int) and columns > 0 and (is_floor or step.call.base == "remainder"):
        cuts = divide_cuts(known_states.size_cuts[key], columns)
    if cuts is None:
        return None
    if is_floor:
        known_states.size_cuts[out] = cuts
    return [state]


# ---- products by group ----


def _group_sizes(known_states: KnownStates, step: OperatorNode) -> Derived:
    """Count sorted keys in bins: all of them, so that the bins are groups of rows that follow each other."""
    key, call = step.input_keys[0], step.call
    state, columns = known_states.states[key], known_states.sorted_columns.get(key)
    if columns is None or not isinstance(state, Regrouped) or call["min"] != 0 or call["max"] < columns - 1:
        return None
    return [Groups(state.order, ends=False)]


def _counted(step: OperatorNode, states: list[State]) -> Derived:
    """Add up the sizes of groups, or copy them."""
    groups = states[0]
    if len(states) != 1 or not isinstance(groups, Groups):
        return None
    if step.call.base == "cumsum":
        return [replace(groups, ends=True)] if not groups.ends else None
    return [groups] if step.call.base in COPYING else None


def _is_grouped_product(step: OperatorNode, states: list[State], node: fx.Node) -> bool:
    """Return whether an operator multiplies groups of rows, each with the weight of its group: torch's, or another."""
    if step.call.op.startswith("aten."):
        return step.call.base == "_grouped_mm"
    kinds = [type(state) for state in states]
    return kinds == [Regrouped, Replicate, Groups] and multiplies_groups(unwrap_settings(node.target))


@cache
def multiplies_groups(target: Any) -> bool:
    """Return whether a library's own operator computes a grouped product, found by trying it.

    Its implementation is not seen by the capture. It is called with random numbers, for groups of several sizes, empty
    ones among them, and each row is compared with the product that a grouped one has there.

    Args:
        target: the operator, as in the captured graph.
    """
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    random = torch.Generator().manual_seed(0)
    for ends in ((2, 2, 5, 7), (0, 3, 4, 7), (7, 7, 7, 7), (1, 2, 3, 7)):
        rows, weights = (torch.randn(s, dtype=torch.float64, generator=random) for s in ((7, 3), (4, 3, 5)))
        groups = torch.tensor(ends, dtype=torch.int32)
        expected = torch.stack([row @ weights[sum(i >= end for end in ends)] for i, row in enumerate(rows)])
        try:
            product = target(rows, weights, groups)
        except Exception:  # other arguments, or none that it can compute with
            return False
        if not (isinstance(product, Tensor) and product.shape == expected.shape and torch.allclose(product, expected)):
            return False
    return True


def _grouped_product(known_states: KnownStates, step: OperatorNode, states: list[State]) -> Derived:
    """Multiply each row by the weight of its group: the bin that the row's own key is in."""
    if len(states) != 3 or step.call.inputs[0].dim != 2 or step.call.inputs[1].dim != 3:
        return None
    rows, weights, groups = states
    grouped = isinstance(rows, Regrouped) and groups == Groups(rows.order, ends=True) and weights == REPLICATE
    return [rows] if grouped and step.input_keys[0] not in known_states.size_cuts else None
