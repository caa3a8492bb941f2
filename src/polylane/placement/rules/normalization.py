"""Normalizations: cut what is normalized alone; or what is normalized together, with statistics over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from polylane.placement.across import communicate, reduced_bytes
from polylane.placement.call import Call, Edit, Place, Strategy, Value
from polylane.placement.empty import sparing
from polylane.placement.letters import Letters, by_letters, letters_of
from polylane.placement.moments import GroupNorm, InstanceNorm, LayerNorm, OverParts, RmsNorm
from polylane.placement.placement import Cuts, Placement, Shard, divided, even
from polylane.placement.rules.registry import rule


def _inputs(call: Call, letters: Mapping[str, Letters]) -> list[Letters]:
    """The letters of all inputs, of which those with these names have some."""
    known = {value.index: letters[name] for name in letters if isinstance(value := call.arguments.get(name), Value)}
    return [known.get(value.index, [None] * value.dim) for value in call.inputs]


def _given(call: Call, names: Sequence[str]) -> list[Value]:
    return [value for name in names if isinstance(value := call.arguments.get(name), Value)]


def _sums(call: Call, rows: int, forward: int, backward: int) -> dict[str, Any]:
    """What a rank sends for statistics of ``rows``: so many sums forward, one message each; all backward in one."""
    size = max(call.outputs[0].dtype.itemsize, 4)
    return {"sent": reduced_bytes(rows, size, call.degree, forward + backward), "messages": forward + 1}


# ---- over features ---------------------------------------------------------------------------------------------------


@rule("layer_norm", composes=True)
def layer_norm(call: Call) -> Iterator[Strategy]:
    """All dimensions in front; normalized ones, and the weights with them."""
    yield from _in_front(call)
    yield from _features(call, LayerNorm(call.outputs[0].dtype), 2, 2)


@rule("rms_norm", composes=True)
def rms_norm(call: Call) -> Iterator[Strategy]:
    """All dimensions in front; normalized ones, and the weight with them."""
    yield from _in_front(call)
    yield from _features(call, RmsNorm(call.outputs[0].dtype), 1, 1)


@rule("native_layer_norm", "_fused_rms_norm")
def native(call: Call) -> Iterator[Strategy]:
    """All dimensions in front; the statistics are outputs."""
    yield from _in_front(call)


def _in_front(call: Call) -> Iterator[Strategy]:
    x = call["input"]
    behind = len(call["normalized_shape"])
    letters = [*letters_of(x)[: x.dim - behind], *[None] * behind]
    yield from by_letters(call, _inputs(call, {"input": letters}), [letters for _ in call.outputs])


def _features(call: Call, function: Any, forward: int, backward: int) -> Iterator[Strategy]:
    x = call["input"]
    front = x.dim - len(call["normalized_shape"])
    weights = _given(call, ("weight", "bias"))
    rows = math.prod(x.shape[:front])
    for dim in range(front, x.dim):
        places = [x.at(dim), call.outputs[0].at(dim), *(w.at(dim - front) for w in weights)]
        for cuts in call.layouts(*places):
            placed: dict[int, Placement] = {w.index: Shard(dim - front, cuts) for w in weights}
            yield call.strategy(
                "features",
                {x.index: Shard(dim, cuts), **placed},
                Shard(dim, cuts),
                local=partial(communicate, function=function),
                **_sums(call, rows, forward, backward),
            )


# ---- over channels and space -----------------------------------------------------------------------------------------


@rule("group_norm", composes=True)
def group_norm(call: Call) -> Iterator[Strategy]:
    """x (N, C, ...): samples; channels between groups; space, with every group's sums over all ranks."""
    x, weights = call["input"], _given(call, ("weight", "bias"))
    samples = ["n", *[None] * (x.dim - 1)]
    yield from by_letters(call, _inputs(call, {"input": samples}), [samples], names={"n": "samples"})
    unit = x.shape[1] // call["num_groups"]
    for cuts in _in_units(call, unit, x.at(1), call.outputs[0].at(1), *(w.at(0) for w in weights)):
        placed: dict[int, Placement] = {w.index: Shard(0, cuts) for w in weights}
        yield call.strategy("channels", {x.index: Shard(1, cuts), **placed}, Shard(1, cuts), local=_own_groups)
    function = GroupNorm(unit * math.prod(x.shape[2:]), call.outputs[0].dtype)
    yield from _space(call, function, x.shape[0] * call["num_groups"])


def _in_units(call: Call, unit: int, *places: Place) -> list[Cuts]:
    """Cuts of a dimension that cut through no unit."""
    size = call.inputs[0].shape[1]
    if not unit or size <= unit:
        return []
    found = {even(size, call.degree, unit): None}
    found.update(dict.fromkeys(cuts for cuts in call.layouts(*places) if divided(cuts, unit) is not None))
    return list(found)


def _own_groups(edit: Edit) -> None:
    assert edit.strategy is not None
    (cut,) = edit.strategy.outputs
    assert isinstance(cut, Shard)
    unit = edit.call["input"].shape[1] // edit.call["num_groups"]
    edit["num_groups"] = max(cut.length(edit.index) // unit, 1)


def _space(call: Call, function: Any, rows: int) -> Iterator[Strategy]:
    x = call["input"]
    for dim in range(2, x.dim):
        for cuts in call.layouts(x.at(dim), call.outputs[0].at(dim)):
            shard = Shard(dim, cuts)
            local = partial(communicate, function=function)
            yield call.strategy("space", {x.index: shard}, shard, local=local, **_sums(call, rows, 2, 2))


@rule("instance_norm", composes=True)
def instance_norm(call: Call) -> Iterator[Strategy]:
    """x (N, C, ...): samples, channels; space, with the sums over all ranks."""
    x = call["input"]
    own, running = bool(call["use_input_stats"]), call["running_mean"] is not None
    if own and running:  # written in place, over all samples
        return
    letters = letters_of(x) if not own else [*letters_of(x)[:2], *[None] * (x.dim - 2)]
    yield from map(sparing, by_letters(call, _per_channel(call, letters), [letters], names=_NAMES))
    if own:
        yield from _space(call, InstanceNorm(math.prod(x.shape[2:]), call.outputs[0].dtype), math.prod(x.shape[:2]))


_NAMES = {"a": "samples", "b": "channels"}  # the first two of the letters of an input


def _per_channel(call: Call, letters: Letters) -> list[Letters]:
    channels = letters[1:2]
    names = ("weight", "bias", "running_mean", "running_var")
    return _inputs(call, {"input": letters, **dict.fromkeys(names, channels)})


@rule("batch_norm", composes=True)
def batch_norm(call: Call) -> Iterator[Strategy]:
    """x (N, C, ...): channels, with their weights and running statistics; samples and space.

    In training the statistics of a part of the samples or of space are summed over the axis.
    """
    letters = letters_of(call["input"])
    training = bool(call["training"])
    every = "".join(letter for letter in letters if letter)
    inputs = _per_channel(call, letters)
    channels = letters[1] or ""
    others = every.replace(channels, "")
    yield from map(sparing, by_letters(call, inputs, [letters], names=_NAMES, skip=others))
    if not training:
        yield from by_letters(call, inputs, [letters], names=_NAMES, skip=channels)
    elif call.prefix:
        size = 4 * call["input"].shape[1] + 1
        sent = reduced_bytes(size, 8, call.degree, 1)
        for strategy in by_letters(call, inputs, [letters], names=_NAMES, skip=channels, local=_over_parts):
            yield replace(strategy, sent=sent, messages=2)


def _over_parts(edit: Edit) -> None:
    communicate(edit, OverParts(edit.target))


# ---- weights ---------------------------------------------------------------------------------------------------------


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(call: Call) -> Iterator[Strategy]:
    """v scaled to the norms g along a dimension (Salimans and Kingma, 2016): that dimension."""
    v, g, dim = call["v"], call["g"], call["dim"]
    if dim < 0:
        return
    for cuts in call.layouts(v.at(dim), g.at(dim), call.outputs[0].at(dim)):
        shard = Shard(dim, cuts)
        yield sparing(call.strategy("filters", {v.index: shard, g.index: shard}, shard))
