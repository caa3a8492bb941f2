"""Witness: the user's own Python on the whole batch, held against its parts, on the steps 1, 2, 4, 8, ...

Nothing can be derived of a module that runs the user's own Python. Where the plan says that it treats each sample by
itself (``per_sample``), it is watched: what it was given in a step is put together again from all microbatches and
replicas, and computed as one, without gradients and without random numbers, in float64. Its rows must be those that the
parts give. What it costs is a forward pass of the module on the whole batch in few steps out of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.errors import PeerLost, PolylaneError
from polylane.graph.export import at, reason_of
from polylane.graph.graph import Node
from polylane.graph.keying import on_a_copy
from polylane.graph.part import Part
from polylane.graph.precision import PROMOTED, Promoted
from polylane.graph.side_by_side import Still, equal
from polylane.graph.sizes import batch_dimension


@dataclass(frozen=True)
class Record:
    """One call of the user's own Python in a step.

    Attributes:
        node: which operator.
        part: the samples that it computed on.
        tensors: what it was given: parameters, buffers, and its inputs.
    """

    node: Node
    part: Part
    tensors: tuple[Tensor, ...]


Gather = Callable[[Tensor], Sequence[Tensor]]


def is_watched(step: int) -> bool:
    """Whether a step, counted from 0, is one of those on which there is a witness: 1, 2, 4, 8, ..."""
    return (step + 1) & step == 0


def witness(code: fx.Graph, records: Sequence[Record], gather: Gather, mean: bool, plan: str) -> None:
    """Hold every call against the same call on all samples.

    Args:
        code: the graph in which they are made.
        records: of one step, in the order of the microbatches.
        gather: the same tensor of every replica, of one dimension each; they may differ in length.
        mean: whether a loss that is computed inside is a mean over samples, and not (total, count).
        plan: the modules that the plan names.

    Raises:
        PolylaneError: the parts do not make up the whole; it names the module.
    """
    nodes = {str(n.meta["name"]): n for n in code.nodes if n.op == "call_function"}
    calls: dict[str, list[Record]] = {}
    for record in records:
        calls.setdefault(record.node.name, []).append(record)
    for name, own in calls.items():
        normalizes = bool(getattr(nodes[name].target, "normalizes", False))
        for group in [[r] for r in own] if normalizes else [own]:
            try:
                holds = _holds(nodes[name], group, gather, mean)
            except (PolylaneError, PeerLost):
                raise
            except Exception as error:
                module = f"{own[0].node.module or 'the model'}{at(own[0].node.source)}"
                raise PolylaneError(
                    f"per_sample={plan}: {module} cannot be watched, for it does not run in float64 "
                    f"({reason_of(error)}): leave it out of per_sample"
                ) from error
            if not holds:
                raise PolylaneError(_sentence(own[0], plan))


def _sentence(record: Record, plan: str) -> str:
    node, step = record.node, record.part.step + 1
    return (
        f"step {step}: {node.module or 'the model'}{at(node.source)} makes each sample depend on the others of its "
        f"batch, though per_sample={plan} says that it does not: leave it out of per_sample, or use data=1 and "
        "microbatches=1"
    )


def _holds(node: fx.Node, records: Sequence[Record], gather: Gather, mean: bool) -> bool:
    dims = [batch_dimension(n.meta.get("val")) for n in node.args[1]]  # type: ignore[union-attr]
    target: Any = node.target
    counting = [r for r in records if r.part.weight]
    # All take part in the sums of a module that normalizes, those too whose samples do not count.
    computed = [(r, _computed(target, r.part, _raised(r.tensors))) for r in records]
    parts = [values for r, values in computed if r.part.weight]
    whole_inputs = []
    for number, dim in enumerate(dims):
        own = [_raised(r.tensors)[number] for r in counting]
        like = _raised(records[0].tensors)[number]
        whole_inputs.append(like if dim is None else _joined(own, like, dim, gather))
    samples = int(sum(_gathered(torch.tensor([float(sum(r.part.samples for r in counting))]), gather)))
    first = replace(records[0].part, first=0, samples=samples, weight=1, sum_replicas=None, whole=None)
    whole = _computed(target, first, whole_inputs)
    vals = [node.meta["val"]] if isinstance(node.meta["val"], Tensor) else list(node.meta["val"])
    for number, val in enumerate(vals):
        own = [part[number] for part in parts]
        dim = batch_dimension(val)
        like = whole[number]
        if dim is not None:
            made = _joined(own, like.narrow(dim, 0, 0), dim, gather)
        elif not like.is_floating_point():
            continue
        else:
            share = [r.part.samples / samples if mean else 1.0 for r in counting]
            total = sum((s * x for s, x in zip(share, own, strict=True)), torch.zeros_like(like))
            made = torch.stack([t.view_as(like) for t in gather(total.flatten())]).sum(0)
        if not equal(like, made):
            return False
    return True


def _computed(target: Any, part: Part, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a copy of the module gives, so that neither its buffers nor what it keeps in Python are touched."""
    with torch.no_grad(), Promoted(), Still():
        result = on_a_copy(target)(part, list(tensors))
    return [result] if isinstance(result, Tensor) else list(result)


def _raised(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.to(PROMOTED.get(t.dtype, t.dtype), copy=True) for t in tensors]


def _gathered(value: Tensor, gather: Gather) -> list[float]:
    return [float(each) for each in gather(value)]


def _joined(own: Sequence[Tensor], like: Tensor, dim: int, gather: Gather) -> Tensor:
    """All samples' rows along a dimension, microbatch by microbatch, replica by replica.

    Args:
        own: this replica's rows of each microbatch that it has samples of.
        like: a tensor of that form.
    """
    rest = [n for d, n in enumerate(like.shape) if d != dim]
    mine = torch.cat([x.movedim(dim, 0) for x in own]) if own else like.movedim(dim, 0)[:0]
    every = [each.view(-1, *rest) if each.numel() else mine[:0] for each in gather(mine.contiguous().flatten())]
    return torch.cat(every).movedim(0, dim)
