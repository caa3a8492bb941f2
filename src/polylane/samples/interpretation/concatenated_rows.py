"""Concatenated rows: sequences of several lengths put one after the other, beside a tensor of their lengths.

A connectionist temporal classification (CTC) may take its targets so: a mask selects the true elements of a table
[samples, length], and the sums of the mask's rows say how many are each sample's. A part's selection is its rows' of
the whole's, and its lengths are its samples', so that the loss of each sample is the same in either.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from polylane.graph.nodes.facts import base_name, bind_arguments
from polylane.graph.symbolic_sizes import data_dependent_symbols
from polylane.placement.operator_view import OperatorNode
from polylane.placement.placement import Shard
from polylane.samples.interpretation.additivity import Additive, State
from polylane.samples.interpretation.known_states import Derived, KnownStates
from polylane.samples.interpretation.ragged import same_formula

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


def derive_concatenated(known_states: KnownStates, step: OperatorNode, node: fx.Node) -> Derived:
    """Return the output state of a CTC loss whose targets are concatenated."""
    if step.call.base != "ctc_loss" or any(key in known_states.size_cuts for key in step.input_keys):
        return None
    named = bind_arguments(node)[1]
    scores, targets, *lengths = (named[name] for name in ("log_probs", "targets", "input_lengths", "target_lengths"))
    if not all(isinstance(value, fx.Node) for value in (targets, *lengths)) or targets.meta["val"].dim() != 1:
        return None
    states = [known_states.states.get(known_states.key_of(value)) for value in (scores, targets, *lengths)]
    if scores.meta["val"].dim() != 3 or not all(_is_sharded(s, d) for s, d in zip(states, (1, 0, 0, 0), strict=True)):
        return None
    mask = _selecting_mask(known_states, targets)
    if mask is None or not _counts_rows(mask, lengths[1]):
        return None
    placed = known_states.placements.get(step.output_keys[0])
    states_by_reduction: dict[int, State | None] = {_NONE: placed, _MEAN: Additive(1), _SUM: Additive(0)}
    return [states_by_reduction[step.call["reduction"]]]


def _is_sharded(state: Any, dim: int) -> bool:
    return isinstance(state, Shard) and state.dim == dim


def _selecting_mask(known_states: KnownStates, targets: fx.Node) -> fx.Node | None:
    """Return the table's mask that selects all targets; None if they are not one mask's."""
    symbols = set(data_dependent_symbols(targets.meta["val"]))
    masks = [known_states.masks.get(symbol) for symbol in symbols]
    mask = masks[0] if len(masks) == 1 else None
    return mask if mask is not None and mask.meta["val"].dim() == 2 else None


def _counts_rows(mask: fx.Node, lengths: fx.Node) -> bool:
    """Return whether lengths are how many elements of each row of a mask are true."""
    while base_name(lengths) in ("to", "_to_copy", "detach", "contiguous"):
        lengths = lengths.args[0]  # type: ignore[assignment]
    if base_name(lengths) != "sum":
        return False
    arguments = bind_arguments(lengths)[1]
    return (
        arguments.get("dim") in ([-1], [1]) and not arguments.get("keepdim") and same_formula(arguments["self"], mask)
    )
