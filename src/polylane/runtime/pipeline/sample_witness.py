"""Per-sample check: compares the user's own Python on the whole batch with its parts, on the steps 1, 2, 4, 8, ...

Nothing can be derived about a module that runs the user's own Python. Where the plan says that it treats each sample by
itself (``per_sample``), it is checked at run time: its inputs in a step are gathered from all microbatches and replicas
and computed as one batch, without gradients and random numbers, in float64. The rows of the result must equal those of
the parts. The cost is a forward pass of the module on the whole batch, in few steps out of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.errors import PeerLost, PolylaneError
from polylane.graph.capture.assign_keys import copy_python_call
from polylane.graph.capture.export import format_line, reason_of
from polylane.graph.graph import Node
from polylane.graph.precision import PROMOTED, Promoted
from polylane.graph.sample_slice import SampleSlice
from polylane.graph.symbolic_sizes import batch_dimension
from polylane.program.program import Program
from polylane.runtime.transport.protocol import Transport
from polylane.samples.split_runs import WithoutRandomness, equal_within
from polylane.schedule.action import ActionKind


@dataclass(frozen=True)
class WitnessedCall:
    """One call of the user's own Python in a step.

    Attributes:
        node: the operator of the graph that was called.
        part: the samples that it computed on.
        tensors: copies of its arguments: parameters, buffers, then inputs.
    """

    node: Node
    part: SampleSlice
    tensors: tuple[Tensor, ...]


Gather = Callable[[Tensor], Sequence[Tensor]]


def is_witnessed_step(step: int) -> bool:
    """Return whether calls are checked in a step, counted from 0: in the first, second, fourth, eighth, ..."""
    return (step + 1) & step == 0


def is_witnessed(program: Program, step: int, microbatches: int, samples: int, is_replica_local: bool) -> bool:
    """Return whether calls are checked in a step of a program; the same on all replicas.

    Args:
        program: the worker's program.
        step: number of the step, from 0.
        microbatches: number of microbatches that this worker computes on.
        samples: number of samples of the batch, over all replicas.
        is_replica_local: whether the replica takes steps of its own.
    """
    replicas = len(program.replicas)
    trains = any(action.kind is ActionKind.STEP for action in program.actions)
    if microbatches < 2 and (is_replica_local or replicas == 1):
        return False  # the part is the whole
    # Comparing is collective: of replicas in turn all need a microbatch.
    return trains and is_witnessed_step(step) and not (program.takes_turns and samples < replicas)


def gather_flat(transport: Transport, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
    """Gather a tensor of one dimension from every rank of a group; lengths may differ."""
    own = torch.tensor([tensor.numel()], device=tensor.device)
    sizes = transport.all_gather(own, ranks).wait().tolist()
    return list(transport.all_gather(tensor.flatten(), ranks, sizes).wait().split(sizes))


def check_calls(code: fx.Graph, records: Sequence[WitnessedCall], gather: Gather, mean: bool, plan: str) -> None:
    """Compare every call with the same call on all samples; collective over the replicas.

    Args:
        code: the captured graph in which the calls are made.
        records: calls of one step, in the order of the microbatches.
        gather: gathers a tensor of one dimension from every replica; lengths may differ.
        mean: whether a loss that is computed inside is a mean over samples, and not (total, count).
        plan: names of the modules in the plan's ``per_sample``, for errors.

    Raises:
        PolylaneError: the parts do not make up the whole; it names the module.
    """
    nodes = {str(n.meta["name"]): n for n in code.nodes if n.op == "call_function"}
    calls: dict[str, list[WitnessedCall]] = {}
    for record in records:
        calls.setdefault(record.node.name, []).append(record)
    for name, own in calls.items():
        # Batch normalization takes statistics of a microbatch over all replicas, so each microbatch is its own whole.
        normalizes = bool(getattr(nodes[name].target, "normalizes", False))
        for group in [[r] for r in own] if normalizes else [own]:
            try:
                holds = _matches_whole_batch(nodes[name], group, gather, mean)
            except (PolylaneError, PeerLost):
                raise
            except Exception as error:
                module = f"{own[0].node.module or 'the model'}{format_line(own[0].node.source)}"
                raise PolylaneError(
                    f"per_sample={plan}: {module} cannot be watched, for it does not run in float64 "
                    f"({reason_of(error)}): leave it out of per_sample"
                ) from error
            if not holds:
                raise PolylaneError(_describe_dependence(own[0], plan))


def _describe_dependence(record: WitnessedCall, plan: str) -> str:
    node, step = record.node, record.part.step + 1
    return (
        f"step {step}: {node.module or 'the model'}{format_line(node.source)} makes each sample depend on the "
        "others of its "
        f"batch, though per_sample={plan} says that it does not: leave it out of per_sample, or use data=1 and "
        "microbatches=1"
    )


def _matches_whole_batch(node: fx.Node, records: Sequence[WitnessedCall], gather: Gather, mean: bool) -> bool:
    dims = [batch_dimension(n.meta.get("val")) for n in node.args[1]]  # type: ignore[union-attr]
    target: Any = node.target
    counting = [r for r in records if r.part.weight]
    # Padding samples take part in the collective sums of a module that normalizes, but not in the comparison.
    computed = [(r, _run_copy(target, r.part, _promote_tensors(r.tensors))) for r in records]
    parts = [values for r, values in computed if r.part.weight]
    whole_inputs = []
    for number, dim in enumerate(dims):
        own = [_promote_tensors(r.tensors)[number] for r in counting]
        like = _promote_tensors(records[0].tensors)[number]
        whole_inputs.append(like if dim is None else _gather_rows(own, like, dim, gather))
    own_samples = torch.full((1,), float(sum(r.part.samples for r in counting)), device=computed[0][1][0].device)
    samples = int(sum(map(float, gather(own_samples))))
    first = replace(records[0].part, first=0, samples=samples, weight=1, sum_replicas=None, whole=None)
    whole = _run_copy(target, first, whole_inputs)
    vals = [node.meta["val"]] if isinstance(node.meta["val"], Tensor) else list(node.meta["val"])
    # An output with rows must have the same rows; one without is a loss, whose parts add up, weighted by samples if it
    # is a mean. Integer outputs without rows are counts or flags, which need not add up.
    for number, val in enumerate(vals):
        own = [part[number] for part in parts]
        dim = batch_dimension(val)
        like = whole[number]
        if dim is not None:
            made = _gather_rows(own, like.narrow(dim, 0, 0), dim, gather)
        elif not like.is_floating_point():
            continue
        else:
            share = [r.part.samples / samples if mean else 1.0 for r in counting]
            total = sum((s * x for s, x in zip(share, own, strict=True)), torch.zeros_like(like))
            made = torch.stack([t.view_as(like) for t in gather(total.flatten())]).sum(0)
        if not equal_within(like, made):
            return False
    return True


def _run_copy(target: Any, part: SampleSlice, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run a copy of the module, so that neither its buffers nor its Python state are changed."""
    with torch.no_grad(), Promoted(), WithoutRandomness():
        result = copy_python_call(target)(part, list(tensors))
    return [result] if isinstance(result, Tensor) else list(result)


def _promote_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.to(PROMOTED.get(t.dtype, t.dtype), copy=True) for t in tensors]


def _gather_rows(own: Sequence[Tensor], like: Tensor, dim: int, gather: Gather) -> Tensor:
    """Gather all samples' rows along a dimension, replica by replica, microbatch by microbatch in each.

    This is not the order of the batch, which does not matter: inputs and outputs are gathered in the same order.

    Args:
        own: this replica's rows of each microbatch that it has samples of.
        like: a tensor with the same sizes of the other dimensions.
        dim: the dimension of the samples.
        gather: gathers a tensor of one dimension from every replica.
    """
    rest = [n for d, n in enumerate(like.shape) if d != dim]
    mine = torch.cat([x.movedim(dim, 0) for x in own]) if own else like.movedim(dim, 0)[:0]
    every = [each.view(-1, *rest) if each.numel() else mine[:0] for each in gather(mine.contiguous().flatten())]
    return torch.cat(every).movedim(0, dim)
