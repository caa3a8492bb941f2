"""Per-sample check: compares the user's own Python on the whole batch with its parts, on the steps 1, 2, 4, 8, ...

Nothing can be derived about a module that runs the user's own Python. Where the plan says that it treats each sample by
itself (``per_sample``), it is checked at run time: its inputs in a step, and the gradients of the loss with respect to
its results, are gathered from all microbatches and replicas, and it is computed as one batch, forward and backward,
without random numbers, in float64. The rows of the results must equal those of the parts, and so must the rows of the
inputs' gradients; the parts' gradients of its weights must add up to the whole's. The cost is a forward and a backward
pass of the module on the whole batch, and on the parts once more, in few steps out of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.errors import OTHERS_FAILED, PolylaneError
from polylane.graph.graph import Node
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.nodes.user_lines import format_line, reason_of
from polylane.graph.sample_lists import SampleList
from polylane.graph.sparse_gradients import densify
from polylane.graph.symbolic_sizes import batch_dimension
from polylane.program.program import Program
from polylane.runtime.plain_data.serialization import decode, encode
from polylane.runtime.transport.protocol import Transport
from polylane.samples.batch_division import suggest_no_per_sample
from polylane.samples.python_passes import (
    PythonCall,
    PythonPasses,
    find_unequal_gradient,
    promote_tensors,
    run_passes,
)
from polylane.samples.split_runs import equal_within
from polylane.schedule.action import ActionKind


@dataclass(frozen=True)
class WitnessedCall:
    """One call of the user's own Python in a step.

    Attributes:
        node: the operator of the graph that was called.
        part: the samples that it computed on.
        tensors: copies of its arguments: parameters, buffers, then inputs.
        differentiable: indices of the arguments that a gradient flows back to.
        leaves: indices of those among them that begin autograd's graph: parameters.
        cotangents: copies of the gradients that came back for its results, by index, once its backward pass has run.
    """

    node: Node
    part: SampleSlice
    tensors: tuple[Tensor, ...]
    differentiable: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    cotangents: dict[int, Tensor] = field(default_factory=dict)


def record_call(node: Node, part: SampleSlice, tensors: Sequence[Tensor]) -> WitnessedCall:
    """Record a call of the user's own Python that is about to be made."""
    passed = tuple(i for i, t in enumerate(tensors) if t.requires_grad and torch.is_grad_enabled())
    leaves = tuple(i for i in passed if tensors[i].is_leaf)
    return WitnessedCall(node, part, tuple(t.detach().clone() for t in tensors), passed, leaves)


def record_gradients(record: WitnessedCall, results: Any) -> None:
    """Have a call's record receive the gradients of its results when its backward pass runs."""

    def keep(index: int) -> Callable[[Tensor], None]:
        def receive(gradient: Tensor) -> None:
            record.cotangents[index] = densify(gradient).detach().clone()

        return receive

    for index, result in enumerate([results] if isinstance(results, Tensor) else results):
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(keep(index))


Gather = Callable[[Tensor], Sequence[Tensor]]


def is_witnessed_step(step: int) -> bool:
    """Return whether calls are checked in a step, counted from 0: in the first, second, fourth, eighth, ..."""
    return (step + 1) & step == 0


def is_witnessed(program: Program, step: int, microbatches: int, samples: int, is_replica_local: bool) -> bool:
    """Return whether calls are checked in a step of a program; the same on all replicas.

    Args:
        program: the actions of this worker, in order.
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
    length = torch.tensor([tensor.numel()], device=tensor.device)
    sizes = transport.all_gather(length, ranks).wait().tolist()
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
    for name, node_records in calls.items():
        # Batch normalization takes statistics of a microbatch over all replicas, so each microbatch is its own whole.
        normalizes = bool(getattr(getattr(nodes[name].target, "own", None), "normalizes", False))
        for group in [[r] for r in node_records] if normalizes else [node_records]:
            try:
                unlike = _Comparison(nodes[name], group, gather, mean).find_difference()
            except (PolylaneError, *OTHERS_FAILED):
                raise
            except Exception as error:
                module = f"{node_records[0].node.module or 'the model'}{format_line(node_records[0].node.source)}"
                raise PolylaneError(
                    f"per_sample={plan}: {module} cannot be watched, for it does not run in float64 "
                    f"({reason_of(error)}): leave it out of per_sample"
                ) from error
            if unlike:
                raise PolylaneError(_describe_dependence(node_records[0], unlike, plan, len(node_records)))


def _describe_dependence(record: WitnessedCall, unlike: str, plan: str, microbatches: int) -> str:
    node, step = record.node, record.part.step + 1
    return (
        f"step {step}: {node.module or 'the model'}{format_line(node.source)} makes {unlike} depend on the others of "
        f"its batch, though per_sample={plan} says that it does not: {suggest_no_per_sample(microbatches)}"
    )


class _Comparison:
    """The calls of one node in a step, compared with one call on all samples; collective over the replicas.

    Args:
        node: the node of the graph that runs the user's own Python.
        records: its calls on this worker, in the order of the microbatches; each replica has one at least.
        gather: gathers a tensor of one dimension from every replica.
        mean: whether a loss that is computed inside is a mean over samples.
    """

    def __init__(self, node: fx.Node, records: Sequence[WitnessedCall], gather: Gather, mean: bool) -> None:
        self._node, self._records, self._gather, self._mean = node, records, gather, mean
        self._target: Any = node.target
        inputs: Any = node.args[1]
        self._input_dims = [batch_dimension(n.meta.get("val")) for n in inputs]
        self._vals = [node.meta["val"]] if isinstance(node.meta["val"], Tensor) else list(node.meta["val"])
        # Padding samples take part in the collective sums of a module that normalizes, but not in the comparison.
        self._parts = [(r, run_passes(self._part_call(r))) for r in records]
        self._counting = [(r, passes) for r, passes in self._parts if r.part.weight]
        sizes = torch.tensor([sum(r.part.samples for r, _ in self._counting), len(self._counting)], dtype=torch.float64)
        self._samples, self._calls = map(int, self._sum_replicas(sizes).tolist())

    def find_difference(self) -> str:
        """Return what of a sample depends on the others, for the sentence on it; "" if nothing does."""
        call = self._whole_call()
        full_passes = run_passes(call)
        matching = [self._output_matches(i, full_passes) for i in range(len(self._vals))]
        gradients = {i: self._make_gradient(i, like) for i, like in full_passes.gradients.items()}
        if not all(matching):
            return "each sample"
        return "" if find_unequal_gradient(call, full_passes, gradients) is None else "the gradient of each sample"

    def _part_call(self, record: WitnessedCall) -> PythonCall:
        return PythonCall(
            self._target, record.part, record.tensors, record.differentiable, record.leaves, record.cotangents
        )

    def _whole_call(self) -> PythonCall:
        """Return the call on all samples, in the order in which rows are gathered."""
        first_record = self._records[0]
        part = replace(first_record.part, first=0, samples=self._samples, weight=1, sum_replicas=None, whole=None)
        tensors = promote_tensors(first_record.tensors)
        for i, dim in enumerate(self._input_dims):
            if dim is not None:
                parts = [promote_tensors([r.tensors[i]])[0] for r, _ in self._counting]
                tensors[i] = _gather_rows(parts, tensors[i], dim, self._gather)
        # Of parts with other samples other arguments may have a gradient: those of all count.
        flags = torch.zeros(2, max(len(self._input_dims), len(self._vals)), dtype=torch.float64)
        for record, _ in self._counting:
            flags[0, list(record.differentiable)] = 1
            flags[1, list(record.cotangents)] = 1
        passed, reached = (self._sum_replicas(flags) > 0).tolist()
        indices = tuple(i for i, flag in enumerate(passed) if flag)
        cotangents = {i: self._make_cotangent(i) for i, flag in enumerate(reached) if flag}
        return PythonCall(self._target, part, tensors, indices, first_record.leaves, cotangents)

    def _make_cotangent(self, index: int) -> Tensor:
        """Return the gradient of a result of the call on all samples.

        Of rows it is the parts' rows; of a mean each part has its share of it, of a sum (the total of
        ``polylane.Mean``) each has all of it.
        """
        dim = batch_dimension(self._vals[index])
        like = torch.zeros_like(self._parts[0][1].outputs[index])
        parts = [
            r.cotangents[index].to(like.dtype) if index in r.cotangents else torch.zeros_like(p.outputs[index])
            for r, p in self._counting
        ]
        if dim is not None:
            return _gather_rows(parts, like.narrow(dim, 0, 0), dim, self._gather)
        total = self._sum_replicas(sum(parts, like))
        return total if self._mean else total / self._calls

    def _output_matches(self, index: int, full_passes: PythonPasses) -> bool:
        """Return whether a result of the parts makes up the whole's.

        One with rows must have the same rows; one without is a loss, whose parts add up, weighted by samples if it is a
        mean. Integers without rows are counts or flags, which need not add up.
        """
        dim, like = batch_dimension(self._vals[index]), full_passes.outputs[index]
        parts = [passes.outputs[index] for _, passes in self._counting]
        if dim is not None:
            return equal_within(like, _gather_rows(parts, like.narrow(dim, 0, 0), dim, self._gather))
        if not like.is_floating_point():
            return True
        share = [r.part.samples / self._samples if self._mean else 1.0 for r, _ in self._counting]
        total = sum((s * x for s, x in zip(share, parts, strict=True)), torch.zeros_like(like))
        return equal_within(like, self._sum_replicas(total))

    def _make_gradient(self, index: int, like: Tensor) -> Tensor:
        """Return an argument's gradient, as the parts make it up: rows, or a sum."""
        dim = self._input_dims[index]
        parts = [
            p.gradients[index] if index in p.gradients else torch.zeros_like(r.tensors[index], dtype=like.dtype)
            for r, p in self._counting
        ]
        if dim is not None:
            return _gather_rows(parts, like.narrow(dim, 0, 0), dim, self._gather)
        return self._sum_replicas(sum(parts, torch.zeros_like(like)))

    def _sum_replicas(self, tensor: Tensor) -> Tensor:
        summand = tensor.to(self._records[0].tensors[0].device) if self._records[0].tensors else tensor
        return torch.stack([flat.view_as(summand) for flat in self._gather(summand.flatten())]).sum(0)


def _gather_rows(parts: Sequence[Tensor], like: Tensor, dim: int, gather: Gather) -> Tensor:
    """Gather all samples' rows along a dimension, replica by replica, microbatch by microbatch in each.

    This is not the order of the batch, which does not matter: inputs and outputs are gathered in the same order.

    Args:
        parts: this replica's rows of each microbatch that it has samples of.
        like: a tensor with the same sizes of the other dimensions.
        dim: the dimension of the samples.
        gather: gathers a tensor of one dimension from every replica.
    """
    if isinstance(like, SampleList):
        lists = torch.cat([part for part in parts if isinstance(part, SampleList)]) if parts else like[:0]
        return _gather_lists(lists, like, gather)
    row_shape = [n for d, n in enumerate(like.shape) if d != dim]
    rows = torch.cat([x.movedim(dim, 0) for x in parts]) if parts else like.movedim(dim, 0)[:0]
    all_rows = [flat.view(-1, *row_shape) if flat.numel() else rows[:0] for flat in gather(rows.contiguous().flatten())]
    return torch.cat(all_rows).movedim(0, dim)


def _gather_lists(lists: Tensor, like: SampleList, gather: Gather) -> Tensor:
    """Gather the samples of lists, replica by replica."""
    entries = lists.entries if isinstance(lists, SampleList) else []
    data = gather(torch.frombuffer(bytearray(encode(entries)), dtype=torch.uint8).to(lists.device))
    rows = gather(lists.as_subclass(Tensor))
    pairs = zip(data, rows, strict=True)
    return torch.cat([SampleList.of(decode(d.cpu().numpy().tobytes()), like.kind, r) for d, r in pairs])
