"""Sharding rules of losses: by samples, elements, or classes; a mean over a sharded dimension sums over ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from string import ascii_lowercase

from polylane.placement.kernels.collective_op import all_reduce_bytes
from polylane.placement.kernels.empty_shards import covers_all_ranks
from polylane.placement.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Placement, Shard
from polylane.placement.rules.by_dimension import DimLabels, broadcast_labels, label_inputs, strategies_by_dimension
from polylane.placement.rules.registry import rule
from polylane.placement.rules.vocabulary import MEAN, NONE, SUM, ShardedClassLoss
from polylane.placement.strategy import OperatorCall, RankCall, Strategy, TensorValue

# Computed for every element independently, with all tensors broadcast.
ELEMENTWISE = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss", "poisson_nll_loss", "hinge_embedding_loss"),
    "margin_ranking_loss",
)
# Their backward pass divides a tensor's gradient by that tensor's own size, not by the number of losses: where a tensor
# is broadcast along the sharded dimension, the parts' gradients would not add up to the whole gradient.
_OWN_MEAN = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")


@rule(*ELEMENTWISE)
def elementwise(call: OperatorCall) -> Iterator[Strategy]:
    """All tensors broadcast together: any of their dimensions."""
    dim_labels = _all_dimensions(call)
    inputs = [broadcast_labels(value, dim_labels) for value in call.inputs]
    skip = ""
    if call.base in _OWN_MEAN and call["reduction"] == MEAN:
        differentiated = [labels for labels, value in zip(inputs, call.inputs, strict=True) if value.gradient]
        skip = "".join(letter for letter in dim_labels if any(letter not in labels for labels in differentiated))
    yield from _by_rows(call, inputs, dim_labels, skip=skip)


@rule("triplet_margin_loss")
def triplet(call: OperatorCall) -> Iterator[Strategy]:
    """Three tensors (..., features), broadcast: all dimensions but the last."""
    dim_labels = _all_dimensions(call)
    inputs = [broadcast_labels(value, dim_labels) for value in call.inputs]
    yield from _by_rows(call, [[*labels[:-1], None] if labels else labels for labels in inputs], dim_labels[:-1])


@rule("cosine_embedding_loss", "multi_margin_loss", "multilabel_margin_loss")
def by_samples(call: OperatorCall) -> Iterator[Strategy]:
    """Vectors (samples, features) with a target each (samples), or one vector: by samples."""
    x = call.inputs[0]
    if x.dim != 2:
        return
    weight = call.arguments.get("weight")
    rows = [value for value in call.inputs if value is not weight and value.dim and value.shape[0] == x.shape[0]]
    inputs = label_inputs(call, {value.index: ["a", *[None] * (value.dim - 1)] for value in rows})
    yield from filter(covers_all_ranks, _by_rows(call, inputs, ["a"]))


@rule("ctc_loss")
def ctc(call: OperatorCall) -> Iterator[Strategy]:
    """Scores (time, samples, classes), targets (samples, length) as a rectangle: by samples."""
    scores, targets = call["log_probs"], call["targets"]
    if scores.dim != 3 or targets.dim != 2:
        return
    shapes: dict[int, DimLabels] = {scores.index: [None, "a", None], targets.index: ["a", None]}
    inputs = [shapes.get(value.index, ["a"]) for value in call.inputs]
    yield from filter(covers_all_ranks, _by_rows(call, inputs, ["a"]))


def _all_dimensions(call: OperatorCall) -> list[str]:
    """Return a label for every dimension of all tensors broadcast together."""
    return list(ascii_lowercase[: max(value.dim for value in call.inputs)])


def _by_rows(
    call: OperatorCall,
    inputs: Sequence[DimLabels],
    dim_labels: Sequence[str],
    *,
    skip: str = "",
    local: Callable[[RankCall], None] | None = None,
) -> Iterator[Strategy]:
    """Yield shards of a dimension that the loss is summed over, or of the unreduced losses.

    Args:
        call: the loss with its argument "reduction".
        inputs: a label for every dimension of every input.
        dim_labels: labels of the losses before they are reduced.
        skip: labels that are not to be sharded.
        local: changes each rank's call; default: a mean is scaled by the share of the local samples.
    """
    output, summed = (dim_labels, "") if call["reduction"] == NONE else ((), "".join(dim_labels))
    yield from strategies_by_dimension(
        call, inputs, [output], names={"a": "batch"}, summed=summed, local=local or _scale_local_mean, skip=skip
    )


def _scale_local_mean(edit: RankCall) -> None:
    """Scale a mean over the local samples by their share of all; without local samples return a sum, which is 0."""
    shard = next(p for p in edit.strategy.inputs if isinstance(p, Shard))
    for name in ("input_lengths", "target_lengths"):  # of ctc_loss, where they are lists of numbers
        if name in edit.arguments and not isinstance(edit.call[name], TensorValue):
            edit[name] = [n for start, stop in shard.ranges(edit.index) for n in edit[name][start:stop]]
    if edit.call["reduction"] != MEAN:
        return
    length = shard.local_length(edit.index)
    if length:
        edit.append(operator.mul, length / shard.size)
    else:
        edit["reduction"] = SUM


# ---- one of several classes ------------------------------------------------------------------------------------------


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d", composes=True)
def of_classes(call: OperatorCall) -> Iterator[Strategy]:
    """Scores (C), (N, C) or (N, C, ...); targets are class indices, or for cross entropy probabilities of classes."""
    yield from _by_targets(call)
    yield from _by_classes(call)


def _has_probabilities(call: OperatorCall) -> bool:
    """Return whether targets are probabilities."""
    return bool(call["target"].dtype.is_floating_point)


def _class_dim(call: OperatorCall) -> int:
    return 0 if call["self"].dim == 1 else 1


def _by_targets(call: OperatorCall) -> Iterator[Strategy]:
    scores, target = call["self"], call["target"]
    labels: list[str | None] = [*ascii_lowercase[: scores.dim]]
    labels[_class_dim(call)] = None
    rows = [letter for letter in labels if letter is not None]
    inputs = label_inputs(call, {scores.index: labels, target.index: labels if _has_probabilities(call) else rows})
    mean = call["reduction"] == MEAN
    # With class indices the divisor is the number (or weight) of targets not ignored: counted over ranks in the kernel.
    counted = mean and not _has_probabilities(call)
    for strategy in _by_rows(call, inputs, rows, local=_divide_by_count if counted else None):
        yield replace(strategy, messages=1, sent=all_reduce_bytes(1, 8, call.degree, 1)) if counted else strategy


def _by_classes(call: OperatorCall) -> Iterator[Strategy]:
    scores, target, weight, dim = call["self"], call["target"], call["weight"], _class_dim(call)
    cross = call.base == "cross_entropy_loss"
    places = [scores.at(dim)]
    if _has_probabilities(call):
        places += [target.at(dim), *([weight.at(0)] if weight is not None else [])]
    samples = math.prod(scores.shape) // max(scores.shape[dim], 1)
    # Row values that are all-reduced: maximum, sum of exponentials and target logit (and the smoothing term).
    sums = 3 + (call.arguments.get("label_smoothing", 0) > 0) if not _has_probabilities(call) else 5
    for cuts in call.common_cuts(*places):
        placed: dict[int, Placement] = {scores.index: Shard(dim, cuts)}
        if _has_probabilities(call):
            placed[target.index] = Shard(dim, cuts)
            if weight is not None:
                placed[weight.index] = Shard(0, cuts)
        if cross:
            sent = all_reduce_bytes(samples, max(scores.dtype.itemsize, 4), call.degree, sums)
            messages = 3 if _has_probabilities(call) else 2
            yield call.strategy(
                "classes", placed, REPLICATE, default=REPLICATE, local=_shard_classes, sent=sent, messages=messages
            )
        else:
            # nll_loss is linear in its scores: no communication, the loss is a partial sum.
            yield call.strategy("classes", placed, PARTIAL, default=REPLICATE_PARTIAL_GRAD, local=_shard_classes)


def _replace_with_class_loss(edit: RankCall) -> ShardedClassLoss:
    """Return the kernel that replaces the operator; one axis may shard the classes, others the samples."""
    if isinstance(edit.target, ShardedClassLoss):
        return edit.target
    call = edit.call
    return ShardedClassLoss(
        call.base == "cross_entropy_loss", call["self"].shape[_class_dim(call)], call.outputs[0].dtype
    )


def _divide_by_count(edit: RankCall) -> None:
    edit.target = _replace_with_class_loss(edit)
    edit["counted"] = [*edit.arguments.get("counted", []), edit.axis]


def _shard_classes(edit: RankCall) -> None:
    ranges = edit.input_shard(edit.call["self"].index).ranges(edit.index)
    edit.target = replace(_replace_with_class_loss(edit), ranges=ranges)
    edit["vocabulary"] = edit.axis
