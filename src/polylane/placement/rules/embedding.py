"""Sharding rules of embeddings: by features, by rows of the table (the vocabulary), or by indices."""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_lowercase

from polylane.placement.placement import PARTIAL, REPLICATE_PARTIAL_GRAD, Placement, Shard
from polylane.placement.rules.by_dimension import label_inputs, strategies_by_dimension
from polylane.placement.rules.registry import rule
from polylane.placement.rules.vocabulary import lookup
from polylane.placement.strategy import OperatorCall, RankCall, Strategy


@rule("embedding")
def embedding(call: OperatorCall) -> Iterator[Strategy]:
    """Table (v, f), indices (...) -> (..., f); by vocabulary as in Shoeybi et al., Megatron-LM, section 3.

    A table with a sparse gradient stays whole: ranks exchange its rows, and an update moves those that were touched.
    """
    table, indices = call["weight"], call["indices"]
    sparse = _sparse(call)
    rows = [c for c in ascii_lowercase if c not in "fv"][: indices.dim]
    # scale_grad_by_freq counts an index over all indices, which no rank with a part of them knows.
    counted = call["scale_grad_by_freq"] and table.gradient
    inputs = label_inputs(call, {table.index: [None, "f"], indices.index: rows})
    skip = ("".join(rows) if counted else "") + ("f" if sparse else "")
    yield from strategies_by_dimension(call, inputs, [[*rows, "f"]], names={"f": "features"}, skip=skip)
    if counted or sparse:
        return
    for cuts in call.common_cuts(table.at(0)):
        shard = Shard(0, cuts)
        # work=1.0: every rank looks up all indices, and masks those that it does not have.
        yield call.strategy("vocabulary", {table.index: shard}, PARTIAL, local=_look_up_locally, work=1.0)


def _sparse(call: OperatorCall) -> bool:
    """Return whether the table's gradient is a sparse tensor."""
    return bool(call["sparse"] and call["weight"].gradient)


def _look_up_locally(edit: RankCall) -> None:
    shard = edit.input_shard(edit.call["weight"].index)
    ranges = shard.ranges(edit.index)
    edit.replace(lookup, ranges, shard.size, edit.call["padding_idx"], edit["weight"], edit["indices"])


@rule("embedding_bag")
def embedding_bag(call: OperatorCall) -> Iterator[Strategy]:
    """Table (v, f) -> bags (b, f), with what the backward pass needs; by features."""
    table = call["weight"]
    if _sparse(call):
        return
    for cuts in call.common_cuts(table.at(1), call.outputs[0].at(1)):
        # The index of the maximum (mode "max") is known per feature; other outputs are per bag or per index, and whole.
        targets: list[Placement] = [Shard(1, cuts) if out.dim == 2 else REPLICATE_PARTIAL_GRAD for out in call.outputs]
        yield call.strategy("features", {table.index: Shard(1, cuts)}, targets)
