"""Split test: run an example batch whole and in two unequal parts, in float64.

Is the loss a mean over samples? And are the gradients sums of the parts', where the user's own Python makes them?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.capture.export import Loss, ModelWithLoss
from polylane.graph.flops import tensors_of
from polylane.graph.graph import Graph, Node
from polylane.graph.rounding_noise import TRIES, rounding_floor
from polylane.samples.batch_layout import describe_divided_buffer, describe_place
from polylane.samples.split_gradients import describe_unequal_gradients
from polylane.samples.split_runs import PartFails, SplitRun, equal_within, make_runs, mean_of_parts, run_split


def splits_exactly(graph: Graph, model: nn.Module, loss: Loss, leaves: Sequence[Any]) -> str | None:
    """Test whether a batch may be split: losses and gradients of the parts make up the whole's, and buffers end equal.

    Args:
        graph: captured from ``model`` and ``loss``.
        model: the user's model with its values, which are not changed.
        loss: the user's loss function or module.
        leaves: flat inputs of an example batch.

    Returns:
        None if splitting is exact, or cannot be tried (on the meta device); else one sentence for the user that names
        the first node whose parts do not make up the whole.
    """
    model_with_loss = ModelWithLoss(model, loss, lambda flat: flat)
    if any(parameter.is_meta for parameter in model_with_loss.parameters()):
        return None
    if _describe_difference(graph, make_runs(graph, model_with_loss, leaves)) is not None:
        # It may be rounding alone (the mean of normalized values, say): repeat with nudged runs to measure it.
        unlike = _describe_difference(graph, make_runs(graph, model_with_loss, leaves, again=TRIES))
        if unlike is not None:
            return unlike
    if not any(node.is_own_python for node in graph.nodes):
        return None
    return describe_unequal_gradients(graph, make_runs(graph, model_with_loss, leaves, again=TRIES))


def _describe_difference(graph: Graph, runs: list[SplitRun]) -> str | None:
    """Return what differs between the whole batch and its parts, as a sentence; None if nothing does."""
    sizes = [run.part.samples for run in runs[1:]]
    differing: list[Node] = []

    def look(node: Node, value: Any, parts: list[Any], floors: list[float]) -> None:
        tensors = zip(tensors_of(value), floors, *map(tensors_of, parts), strict=False)
        if not all(_parts_combine(tensor, part_tensors, sizes, floor) for tensor, floor, *part_tensors in tensors):
            differing.append(node)

    try:
        outputs = run_split(graph, runs, look)
    except PartFails as failure:
        return str(failure)
    # Only the outputs decide; a node that differs on the way just names the place. A recomputable one (a mask, a
    # size) is seldom the cause.
    if not _outputs_combine(graph.loss_is_mean, outputs, sizes):
        first_node = (differing or [graph.nodes[-1]])[0]
        return _explain_not_a_mean(next((n for n in differing if not n.recomputable), first_node))
    for name, buffer in runs[0].tensors_by_role["buffer"].items():
        reach = rounding_floor(buffer, [run.tensors_by_role["buffer"][name] for run in runs[0].nudged_runs])
        if not all(equal_within(buffer, run.tensors_by_role["buffer"][name], reach) for run in runs[1:]):
            writer = next((n for n in reversed(graph.nodes) if name in n.buffers), graph.nodes[-1])
            return describe_divided_buffer(name, writer)
    return None


def _outputs_combine(mean: bool, outputs: list[list[Tensor]], sizes: list[int]) -> bool:
    batch, *parts = outputs
    if mean:
        return equal_within(batch[0], mean_of_parts([part[0] for part in parts], sizes))
    total, count = batch[:2]
    return equal_within(total / count, sum(part[0] for part in parts) / sum(part[1] for part in parts))


def _parts_combine(value: Tensor, parts: list[Tensor], sizes: list[int], reach: float) -> bool:
    """Return whether parts make up the whole: concatenated, equal, summed, averaged, or permuted."""
    if all(part.shape == value.shape for part in parts):
        number = value.dtype != torch.bool
        return (
            all(equal_within(value, part, reach) for part in parts)
            or (number and equal_within(value, sum(parts), reach))
            or (number and equal_within(value, mean_of_parts(parts, sizes), reach))
        )
    along = [d for d in range(value.dim()) if any(p.shape[d] != value.shape[d] for p in parts)]
    if len(along) == 1 and sum(p.shape[along[0]] for p in parts) == value.shape[along[0]]:
        return equal_within(value, torch.cat(parts, along[0]), reach) or _same_elements(value, parts)
    return False


def _same_elements(value: Tensor, parts: list[Tensor]) -> bool:
    if value.is_complex():
        return False
    return equal_within(value.flatten().sort().values, torch.cat([p.flatten() for p in parts]).sort().values)


def _explain_not_a_mean(node: Node) -> str:
    site = describe_place(node)
    if not node.shape and not node.is_own_python:
        return (
            f"the loss is not a mean over samples: {node.name} {site} does not add up over the parts of a batch "
            "as a mean or a polylane.Mean(total, count) does (an average over what does not count alike, a sum, a "
            "maximum)"
        )
    note = ", or draws on state of its own (Python's random, a counter)" if node.op == "leaf" else ""
    return (
        f"the loss is not a mean over samples: {node.name} {site} makes each sample depend on the others "
        f"of its batch{note}"
    )
