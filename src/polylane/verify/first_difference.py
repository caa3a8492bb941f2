"""Where two runs part ways: the first node whose value by the plan is not the whole model's, or the first gradient.

Both sides run a pass again and keep all values of it. Where those agree, they keep the gradients of all values: a
backward pass goes from the loss to the inputs, and what goes wrong on its way stays wrong in all that comes after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.batch import clone_leaves, flatten, sample_count, sampled_leaves, split_bounds, take_samples
from polylane.graph.capture.export import snapshot_model
from polylane.graph.capture.functionalize import is_unfilled
from polylane.graph.graph import Node
from polylane.graph.rounding_noise import TRIES, nudge_values, rounding_floor
from polylane.graph.sample_slice import SampleSlice
from polylane.placement.placement import gradient_placement
from polylane.plan.sync import SUM
from polylane.runtime.pipeline.bound_program import ModelTensors
from polylane.runtime.workers.fork import fork_workers
from polylane.runtime.workers.world import World
from polylane.sharding.layout import Layout, assemble_parts
from polylane.verify.relative_error import error_scale, relative_error
from polylane.verify.value_trace import BackwardGradients, ForwardValues, ValueTrace, trace_pass
from polylane.verify.whole_graph import add_batch_counts, run_graph


@dataclass(frozen=True)
class StepDifference:
    """What differs after a step.

    Attributes:
        step: its number.
        gradients, buffers, updates: names of parameters and buffers.
        memory: by parameter, an entry of its optimizer's state; options of the optimizer under "".
        loss_differs: whether that of the step does.
        averaged: weights and buffers that replicas agree on after a step of their own, or in the end.
        replica: of a plan whose replicas go apart, whose step it is; None for all of them.
    """

    step: int = 0
    gradients: Collection[str] = ()
    buffers: Collection[str] = ()
    updates: Collection[str] = ()
    memory: Mapping[str, str] = field(default_factory=dict)
    loss_differs: bool = False
    averaged: Collection[str] = ()
    replica: int | None = None


def find_first_difference(
    prepared: CompiledTraining, batch: Any, seed: int, wrong: StepDifference, tolerance: float
) -> str:
    """Run the forward pass of a step again, on both sides, and say at which node they part ways.

    Args:
        prepared: whose model has the weights and buffers that the step began with.
        batch: of that step.
        wrong: what was seen to differ after it.
    """
    if not prepared.plan.sync.is_plain_sum:  # how replicas agree has no part in a pass, which here is the first one
        prepared = replace(prepared, plan=prepared.plan.model_copy(update={"sync": SUM}))
    restore = snapshot_model(prepared.model, *(o.loss for o in prepared.objectives.values()))
    for microbatch, node in find_differing_nodes(prepared, batch, seed, wrong.step, tolerance, backward=False):
        return _describe_node(node, f"microbatch {microbatch}" + _describe_step(wrong))
    at = -1, 0  # of the last node whose value's gradient differs, and in which microbatch
    restore()
    if wrong.gradients and not wrong.buffers:
        found = find_differing_nodes(prepared, batch, seed, wrong.step, tolerance, backward=True)
        place = {node.name: number for number, node in enumerate(prepared.main_partition.graph.nodes)}
        at = max(((place[node.name], microbatch) for microbatch, node in found), default=at)
    return describe_later_difference(prepared, wrong, *at)


def describe_later_difference(
    prepared: CompiledTraining, wrong: StepDifference, last: int = -1, microbatch: int = 0
) -> str:
    """Where they part ways if every forward value agrees, in the order in which a step goes on.

    Args:
        prepared: with the graph.
        wrong: what was seen to differ after the step.
        last: number of the last node of whose value the gradient differs, where that was looked at; -1 for none.
        microbatch: in which it does.
    """
    step, nodes = f"step {wrong.step + 1}", prepared.main_partition.graph.nodes
    forward, passes = f"every forward value of {step} agrees; ", f"every forward value and gradient of {step} agrees: "
    if prepared.plan.sync.is_replica_local:  # no value of theirs was looked at
        forward = step + (": " if wrong.replica is None else f" of replica {wrong.replica}: ")
        passes = forward + "every gradient agrees; "
    for node in nodes:
        for name in node.buffers:
            if name in wrong.buffers:
                return f"{forward}the buffer {name} differs after it, of {_describe_node(node, '')}"
    if wrong.gradients:
        first = _find_first_gradient(nodes, wrong, last, microbatch)
        return f"{forward}the first gradient that differs, from the loss backwards, is that of {first}"
    for node in nodes:
        for name in node.parameters:
            if name in wrong.memory or name in wrong.updates:
                entry = f": its optimizer's {wrong.memory[name]} differs" if name in wrong.memory else ""
                return f"{passes}what differs is an update, first that of {name}, in {_describe_node(node, '')}{entry}"
    if wrong.memory:
        return f"{passes}what differs is the optimizer's {next(iter(wrong.memory.values()))}"
    if wrong.loss_differs:
        return f"{passes}what differs is the loss that is told"
    for node in nodes:
        for name in (*node.parameters, *node.buffers):
            if name in wrong.averaged:
                agreed = (
                    "what replicas agree on" if prepared.plan.sync.is_replica_local else "what workers put together"
                )
                where = f"first {name}, in {_describe_node(node, '')}"
                return f"every update of {step} agrees; what differs is {agreed} after it, {where}"
    names = ", ".join([*wrong.buffers, *wrong.updates, *wrong.averaged][:1])
    return f"{forward}what differs is {names or 'the weights of the whole model'}"


def _find_first_gradient(nodes: Sequence[Node], wrong: StepDifference, last: int, microbatch: int) -> str:
    """The first gradient that is wrong, from the loss backwards.

    That of a value is there before the pass goes through its node; that of a parameter is complete only when the pass
    has gone through the first node that reads it.
    """
    complete = dict[str, int]()
    for number, node in reversed(list(enumerate(nodes))):
        complete |= dict.fromkeys(node.parameters, number)
    number, name = max(((complete[n], n) for n in wrong.gradients if n in complete), default=(-1, ""))
    if number < 0 and last < 0:
        return next(iter(wrong.gradients))
    if number > last:
        uses = [node for node in nodes if name in node.parameters]
        return f"{name}, in {' and '.join(_describe_node(node, '') for node in uses)}"
    value = nodes[last]
    readers = " and ".join(_describe_node(node, "") for node in nodes if value.name in node.inputs)
    read = f"which {readers} reads" if readers else "with which a backward pass begins"
    return f"the value of {_describe_node(value, '')}, {read}, microbatch {microbatch}"


def _describe_step(wrong: StepDifference) -> str:
    return f", step {wrong.step + 1}" if wrong.step else ""


def find_differing_nodes(
    prepared: CompiledTraining, batch: Any, seed: int, step: int, tolerance: float, backward: bool
) -> Iterator[tuple[int, Node]]:
    """The nodes of whose values, or their gradients, the plan has others: microbatch, node, in the order of the graph.

    The model's buffers move with the microbatches, as they do in a step.
    """
    layouts, stage_of = prepared.layouts_of(prepared.main_partition), prepared.main_partition.stage_of
    traces = fork_workers(
        lambda context: trace_pass(prepared, World.join(), batch, seed, step, backward), prepared.plan.workers
    )
    for microbatch, seen, floors in _reference_values(prepared, batch, seed, step, backward):
        for node in (
            n for n in prepared.main_partition.graph.nodes if not n.recomputable
        ):  # sizes may count a replica's own samples
            those = [t for t in traces if t.stage == stage_of[node.name]]
            parts = [t for t in those if (microbatch, node.name) in t.values]
            if node.name not in seen or not parts or is_unfilled(node.op):
                continue
            if backward and any(t.weights[microbatch] for t in those if (microbatch, node.name) not in t.values):
                continue  # an operator handed on what it was given: somebody else has that gradient
            lies = _ValuePlacement(layouts[stage_of[node.name]], backward)
            scale = error_scale(0.0, floors[node.name], tolerance)
            if not _matches_reference(node, seen[node.name], parts, lies, microbatch, tolerance, scale):
                yield microbatch, node


def _reference_values(
    prepared: CompiledTraining, batch: Any, seed: int, step: int, backward: bool
) -> Iterator[tuple[int, dict[str, Tensor], dict[str, float]]]:
    """Every value of one worker's pass, by node name, microbatch by microbatch, and what rounding makes of it.

    Args:
        prepared: whose model is run; its buffers move with the microbatches.
        batch, seed, step: on what.
        backward: the gradients of the values.
    """
    leaves, _ = flatten(batch)
    samples = sample_count(leaves)
    tensors = ModelTensors(prepared.model, [o.loss for o in prepared.objectives.values()], torch.device("cpu"))

    code = prepared.main_partition.graph.code
    filled = [(i, a, b) for i, (a, b) in enumerate(split_bounds(samples, prepared.plan.microbatches)) if a < b]
    parts = [SampleSlice(b - a, a, samples, i, step, seed) for i, a, b in filled]
    counted = add_batch_counts(
        code, tensors, parts, [take_samples(leaves, a, b) for _, a, b in filled], sampled_leaves(leaves)
    )
    part_of = {part.microbatch: part for part in counted}

    def run(start: int, stop: int, microbatch: int) -> dict[str, Tensor]:
        look, own = (
            BackwardGradients() if backward else ForwardValues(),
            take_samples(clone_leaves(leaves), start, stop),
        )
        with torch.set_grad_enabled(backward):
            loss = run_graph(code, tensors, own, part_of[microbatch], look)
        if backward and loss[0].requires_grad:
            share = (stop - start if prepared.main_partition.graph.loss_is_mean else 1) / samples
            torch.autograd.backward([loss[0]], [torch.full_like(loss[0], share)])
        return look.values

    for microbatch, (start, stop) in enumerate(split_bounds(samples, prepared.plan.microbatches)):
        if start == stop:
            continue
        again = list[dict[str, Tensor]]()
        for attempt in range(TRIES):
            restore = snapshot_model(prepared.model, *(o.loss for o in prepared.objectives.values()))
            nudge_values(prepared.model.parameters(), attempt)
            again.append(run(start, stop, microbatch))
            restore()
        seen = run(start, stop, microbatch)
        floors = {n: rounding_floor(value, [each[n] for each in again if n in each]) for n, value in seen.items()}
        yield microbatch, seen, floors
    for parameter in tensors.parameters().values():
        parameter.grad = None


def _describe_node(node: Node, where: str) -> str:
    line = f" ({node.source})" if node.source else ""
    return f"{node.name}{line}{', ' + where if where else ''}"


@dataclass(frozen=True)
class _ValuePlacement:
    """How values, or their gradients, lie on the ranks of a mesh.

    Attributes:
        layout: of a stage; None where no operator is split.
        is_gradient: it is the gradients.
    """

    layout: Layout | None
    is_gradient: bool

    def assemble_value(self, name: str, values: Mapping[tuple[int, ...], Tensor], samples: int) -> Tensor:
        """A node's value from those of the ranks, by their coordinates."""
        if self.layout is None:
            return next(iter(values.values()))
        state = self.layout.state(name, samples)
        degrees = tuple(split.degree for split in self.layout.splits.values())
        return assemble_parts(values, tuple(map(gradient_placement, state)) if self.is_gradient else state, degrees)


def _assemble_replicas(
    traces: Sequence[ValueTrace], lies: _ValuePlacement, microbatch: int, name: str
) -> list[ValueTrace]:
    """Of every replica that computed something, one trace, with the node's value put together from its mesh."""
    meshes: dict[int, dict[tuple[int, ...], ValueTrace]] = {}
    for each in traces:
        if each.weights[microbatch]:
            meshes.setdefault(each.replica, {})[tuple(each.coordinates.values())] = each
    result = []
    for replica in sorted(meshes):
        mesh = meshes[replica]
        one = next(iter(mesh.values()))
        values = {at: each.values[microbatch, name] for at, each in mesh.items()}
        own = {(microbatch, name): lies.assemble_value(name, values, one.samples[microbatch])}
        result.append(ValueTrace(one.stage, replica, {}, own, one.weights, one.samples))
    return result


def _sort_values(value: Tensor) -> Tensor:
    return value if value.is_complex() else value.flatten().sort().values


def _matches_reference(
    node: Node,
    expected: Tensor,
    traces: Sequence[ValueTrace],
    lies: _ValuePlacement,
    microbatch: int,
    tolerance: float,
    scale: float,
) -> bool:
    """Whether the replicas' values are the whole's: side by side, equal, or parts of a sum or mean.

    Args:
        scale: errors are relative to it, where the value is smaller.
    """
    ordered = _assemble_replicas(traces, lies, microbatch, node.name)
    values = [t.values[microbatch, node.name] for t in ordered]
    if node.batch_dim is not None:
        together = torch.cat(values, node.batch_dim) if expected.dim() else values[0]
        if together.shape != expected.shape:
            return False
        if relative_error(expected, together, scale) <= tolerance:
            return True
        # Samples that lie within another dimension come in another order.
        return relative_error(_sort_values(expected), _sort_values(together), scale) <= tolerance
    if all(v.shape == expected.shape and relative_error(expected, v, scale) <= tolerance for v in values):
        return True
    if any(v.shape != expected.shape or not v.is_floating_point() for v in values):
        return len(values) > 1
    samples = [t.samples[microbatch] for t in ordered]
    mean = sum(v * n for v, n in zip(values, samples, strict=True)) / sum(samples)
    total = torch.stack(list(values)).sum(0)
    return any(relative_error(expected, torch.as_tensor(each), scale) <= tolerance for each in (mean, total))
