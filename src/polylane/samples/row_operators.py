"""Operators on rows, and on what is alike: whether the rows of a batch's parts are the whole batch's, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from polylane.graph.inplace import writes
from polylane.graph.keying import PerPart
from polylane.graph.precision import innermost
from polylane.graph.sizes import Size
from polylane.graph.twins import functional_name
from polylane.placement.call import Call, Strategy, Value
from polylane.placement.placement import REPLICATE, Partial, Placement, Shard
from polylane.placement.rules.registry import strategies
from polylane.placement.view import Step, bound, with_candidates
from polylane.samples.additivity import REPLICAS, ROW_EACH, WHOLE, Additive, power_of_size, proportional
from polylane.samples.known_states import Derived, KnownStates
from polylane.samples.ragged import is_ragged, of_one_mask
from polylane.samples.replica_calls import (
    EXPANDING,
    REFORMING,
    as_replicas,
    cuts_of,
    gives_its_own,
    made_of,
    plain_placements,
    selects,
)

# They give the places at which a mask is true.
_FINDING = {"nonzero", "nonzero_numpy"}
# They give elements of what they take, wherever they put them.
MOVING = {*REFORMING, *EXPANDING, "alias", "clone", "contiguous", "detach", "permute", "slice", "to", "transpose"}
# One number all over, or none yet, in any size.
_FILLED = {"empty", "full", "ones", "zeros"}
# Numbers by a key, of which every sample has its own, or all have the same.
_DRAWN = {"rand", "randint", "randn", "randperm"}


def derive_rows(known: KnownStates, step: Step, own: Call, node: fx.Node) -> Derived:
    """An operator on rows, and on what is alike."""
    if not of_one_mask(node.all_input_nodes, known.masks):
        return None  # rows that two masks selected need not be as many in a part
    base, in_order = step.call.base, [known.lies.get(key) for key in step.gives]
    if any(lies is None for lies in in_order):
        return None
    if base in REFORMING and step.call.inputs[0].count != step.call.outputs[0].count:
        return None  # it holds for another number of samples
    if not step.reads and base in _FILLED:
        return _filled(step, own, node, in_order)
    if not step.reads and base in _DRAWN:
        return in_order if _draws_alike(step, own, node, in_order[0]) else None
    if not step.reads and base == "arange" and step.call.arguments != own.arguments:
        known.numbers |= dict.fromkeys(step.gives, ROW_EACH)
        first, stride = step.call.arguments.get("start", 0), step.call.arguments.get("step", 1)
        return in_order if (first, step.call["end"], stride) == (0, WHOLE, 1) else None
    numbered = [key in known.numbers for key in step.reads]
    if base == "index" and any(numbered):
        return in_order if _from_own_rows(known, step, in_order[0]) else None
    if any(numbered):
        if len(numbered) == 1:
            known.numbers |= dict.fromkeys(step.gives, known.numbers[step.reads[0]])
        if base not in MOVING or len(numbered) > 1:
            return None
    if base in _FINDING or step.call.op == "aten.where.default":
        return in_order if _found(known, step) else None
    if selects(step.call):
        return in_order if _selected(known, step, in_order[0]) else None
    return derive_by_rules(known, step, own, node)


def _filled(step: Step, own: Call, node: fx.Node, in_order: Sequence[Placement | None]) -> Derived:
    if {**step.call.arguments, "size": ()} == {**own.arguments, "size": ()}:
        return in_order
    value = bound(node, node.args, node.kwargs)[1].get("fill_value")
    others = {**step.call.arguments, "size": (), "fill_value": 0} == {**own.arguments, "size": (), "fill_value": 0}
    power = power_of_size(value) if isinstance(value, fx.Node) and isinstance(value.target, Size) else None
    return [proportional(power)] if power is not None and others and in_order == [REPLICATE] else None


def _draws_alike(step: Step, own: Call, node: fx.Node, lies: Placement | None) -> bool:
    """Whether a part draws, of numbers that no value has a say in, those of its own samples."""
    if not step.call.prefix or isinstance(innermost(node.target), PerPart):
        return False
    same = {**step.call.arguments, "size": ()} == {**own.arguments, "size": ()}
    return same and node.args[2] == (lies.dim if isinstance(lies, Shard) else None)


def derive_by_rules(known: KnownStates, step: Step, own: Call, node: fx.Node) -> Derived:
    given = [known.states[key] for key in step.reads]
    call = as_functional(known, step, node)
    for strategy in strategies(call):
        if plain_placements(strategy.inputs) != given:
            continue
        if any(isinstance(p, Partial) for p in strategy.outputs):
            if all(isinstance(p, Partial) for p in strategy.outputs):
                power = _power_of_sum(node, call, own, strategy)
                if power is not None:
                    return [Additive(power)] * len(step.gives)
        elif gives_its_own(strategy, call, own) and as_replicas(node, call, own, strategy):
            return plain_placements(strategy.outputs)
    return None


def as_functional(known: KnownStates, step: Step, node: fx.Node) -> Call:
    call = with_candidates(step.call, cuts_of(step, known.states))
    if writes(node):
        call = replace(call, op=functional_name(node) or call.op, written=frozenset())
    return call


def _power_of_sum(node: fx.Node, call: Call, own: Call, strategy: Strategy) -> int | None:
    """With which power parts are additive where a rule gives two ranks a summand each; None: with none."""
    if any(a.shape != b.shape for a, b in zip(call.outputs, own.outputs, strict=True)):
        return None
    if isinstance(innermost(node.target), PerPart) or not call.op.startswith("aten."):
        return None
    if call.prefix and any(isinstance(p, Shard) for p in strategy.inputs) and node.args[2] is None:
        return None  # the numbers drawn are not the samples' own
    made = [made_of(node, call, own, strategy, rank) for rank in range(REPLICAS)]
    if all(each is not None and each.same for each in made):
        return 0
    ragged = any(is_ragged(n.meta.get("val")) for n in node.all_input_nodes)
    if not ragged and all(each is not None and each.share_of_mean for each in made):
        return 1
    return None


def _selected(known: KnownStates, step: Step, lies: Placement | None) -> bool:
    """Whether rows that a mask selects come sample after sample: both have their samples first."""
    masks = [v for v in step.call.inputs if v.dtype is torch.bool]
    if len(masks) != 1:
        return False
    rows = [known.states[key] for key in step.reads]
    mask, x = masks[0], step.call.inputs[0]
    first = all(isinstance(p, Shard) and p.dim == 0 for p in rows)
    same = x.shape[: mask.dim] == mask.shape and (step.call.base == "index" or x.dim == mask.dim)
    return first and same and isinstance(lies, Shard) and lies.dim == 0


def _found(known: KnownStates, step: Step) -> bool:
    """Whether the places at which a mask is true come sample after sample; in the first dimension, numbers of rows.

    One table of all dimensions' places (nonzero) is known for masks of one dimension alone.
    """
    mask, state = step.call.inputs[0], known.states[step.reads[0]]
    if not isinstance(state, Shard) or state.dim != 0 or (step.call.base == "nonzero" and mask.dim != 1):
        return False
    known.numbers[step.gives[0]] = state.cuts
    return True


def _from_own_rows(known: KnownStates, step: Step, lies: Placement | None) -> bool:
    """Whether what stands at some positions stands, of every sample, in the row that has the sample's number."""
    x, indices = step.reads[0], step.call["indices"]
    if x in known.numbers or not all(isinstance(i, Value) for i in indices):
        return False
    if [step.reads[i.index] in known.numbers for i in indices] != [True, *[False] * (len(indices) - 1)]:
        return False
    cuts = known.numbers[step.reads[indices[0].index]]
    if known.states[x] != Shard(0, cuts):  # they number the rows of something else
        return False
    placed = [(known.states[step.reads[i.index]], i.dim) for i in indices]
    wide = max(dims for _, dims in placed)  # they are broadcast to each other, and their dimensions come first
    rows = [Shard(p.dim + wide - dims, p.cuts) for p, dims in placed if isinstance(p, Shard)]
    return isinstance(placed[0][0], Shard) and all(row == lies for row in rows)
