"""First difference between plan and reference: the first node whose value differs, or else the first gradient.

Both sides run a pass again and keep all its values. Where those are equal, they keep the gradients of all values: a
backward pass goes from the loss to the inputs, so that a wrong gradient makes all that follow it wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.batch import clone_leaves, flatten, sample_count, sampled_leaves, split_bounds, take_samples
from polylane.graph.graph import Node
from polylane.graph.nodes.facts import is_unfilled
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.rounding_noise import TRIES, nudge_values, rounding_floor
from polylane.placement.placement import gradient_placement
from polylane.plan.sync import SUM
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.sharding.layout import Layout, assemble_parts
from polylane.verify.record import ComparedTraining
from polylane.verify.rounding_floor import error_scale, relative_error
from polylane.verify.value_trace import KeptValues, ValueTrace, trace_pass
from polylane.verify.whole_graph import add_batch_counts, run_graph


@dataclass(frozen=True)
class StepDifference:
    """What differs after a step.

    Attributes:
        step: number of the step, from 0.
        gradients: names of parameters whose gradients differ.
        buffers: names of buffers that differ after the passes.
        updates: names of parameters whose updates differ.
        memory: by parameter, the key in the optimizer's state that differs; options of the optimizer under "".
        loss_differs: whether the loss of the step differs.
        averaged: weights and buffers that differ after replicas averaged them, or in the gathered state at the end.
        replica: the replica whose step it is, where replicas have weights of their own; None for all of them.
    """

    step: int = 0
    gradients: Collection[str] = ()
    buffers: Collection[str] = ()
    updates: Collection[str] = ()
    memory: Mapping[str, str] = field(default_factory=dict)
    loss_differs: bool = False
    averaged: Collection[str] = ()
    replica: int | None = None


def find_first_difference(training: ComparedTraining, wrong: StepDifference) -> str:
    """Run the passes of a step again on both sides, and describe the first node at which they differ.

    Args:
        training: the training, whose model has the weights and buffers with which the step began.
        wrong: the differences that were seen after the step.
    """
    # Synchronization has no part in a single pass. Without it the trace needs no servers and no sharded weights.
    prepared = training.compiled_for(wrong.step)
    training = replace(training, prepared=prepared)
    if not prepared.plan.sync.is_plain_sum:
        prepared = replace(prepared, plan=prepared.plan.model_copy(update={"sync": SUM}))
        training = replace(training, prepared=prepared)
    restore = training.snapshot()
    for microbatch, node in find_differing_nodes(training, wrong.step, backward=False):
        step = f", step {wrong.step + 1}" if wrong.step else ""
        return _describe_node(node, f"microbatch {microbatch}{step}")
    # (graph position, microbatch) of the last node whose value has a wrong gradient: the first one on the way back.
    at = -1, 0
    restore()
    if wrong.gradients and not wrong.buffers:
        differing_nodes = find_differing_nodes(training, wrong.step, backward=True)
        positions = {node.name: number for number, node in enumerate(prepared.main_partition.graph.nodes)}
        at = max(((positions[node.name], microbatch) for microbatch, node in differing_nodes), default=at)
    return describe_later_difference(prepared, wrong, *at)


def describe_later_difference(
    prepared: CompiledTraining, wrong: StepDifference, index: int = -1, microbatch: int = 0, traced: bool = True
) -> str:
    """Describe what differs first where every forward value is equal, in the order of a step's phases.

    The order is: buffers, gradients, optimizer state and updates, the loss, averages of replicas.

    Args:
        prepared: the training, compiled for the plan, with the graph whose nodes are named.
        wrong: the differences that were seen after the step.
        index: graph position of the last node whose value has a wrong gradient, where these were compared; -1 for none.
        microbatch: number of the microbatch in which that gradient is wrong.
        traced: whether the values of all operators were compared; never where replicas have weights of their own.
    """
    step, nodes = f"step {wrong.step + 1}", prepared.main_partition.graph.nodes
    forward, passes = f"every forward value of {step} agrees; ", f"every forward value and gradient of {step} agrees: "
    if prepared.plan.sync.is_replica_local or not traced:
        forward = step + (": " if wrong.replica is None else f" of replica {wrong.replica}: ")
        passes = forward + "every gradient agrees; "
    for node in nodes:
        for name in node.buffers:
            if name in wrong.buffers:
                return f"{forward}the buffer {name} differs after it, of {_describe_node(node, '')}"
    if wrong.gradients:
        first_gradient = _find_first_gradient(nodes, wrong, index, microbatch)
        return f"{forward}the first gradient that differs, from the loss backwards, is that of {first_gradient}"
    for node in nodes:
        for name in node.parameters:
            if name in wrong.memory or name in wrong.updates:
                entry = f": its optimizer's {wrong.memory[name]} differs" if name in wrong.memory else ""
                return f"{passes}what differs is an update, first that of {name}, in {_describe_node(node, '')}{entry}"
    if wrong.memory:
        return f"{passes}what differs is the optimizer's {next(iter(wrong.memory.values()))}"
    if wrong.loss_differs:
        return f"{passes}what differs is the reported loss"
    for node in nodes:
        for name in (*node.parameters, *node.buffers):
            if name in wrong.averaged:
                agreed = (
                    "what replicas agree on" if prepared.plan.sync.is_replica_local else "what workers put together"
                )
                location = f"first {name}, in {_describe_node(node, '')}"
                return f"every update of {step} agrees; what differs is {agreed} after it, {location}"
    names = ", ".join([*wrong.buffers, *wrong.updates, *wrong.averaged][:1])
    return f"{forward}what differs is {names or 'the weights of the whole model'}"


def _find_first_gradient(nodes: Sequence[Node], wrong: StepDifference, index: int, microbatch: int) -> str:
    """Describe the first gradient that is wrong, from the loss backwards.

    The gradient of a value is complete before the backward pass goes through its node; that of a parameter only when
    the pass has gone through the first node in graph order that reads it.
    """
    complete = dict[str, int]()
    for number, node in reversed(list(enumerate(nodes))):
        complete |= dict.fromkeys(node.parameters, number)
    number, name = max(((complete[n], n) for n in wrong.gradients if n in complete), default=(-1, ""))
    if number < 0 and index < 0:
        return next(iter(wrong.gradients))
    # The larger position comes first on the way back: a parameter after the last wrong value was wrong before it.
    if number > index:
        uses = [node for node in nodes if name in node.parameters]
        return f"{name}, in {' and '.join(_describe_node(node, '') for node in uses)}"
    value = nodes[index]
    readers = " and ".join(_describe_node(node, "") for node in nodes if value.name in node.inputs)
    read = f"which {readers} reads" if readers else "with which a backward pass begins"
    return f"the value of {_describe_node(value, '')}, {read}, microbatch {microbatch}"


def find_differing_nodes(training: ComparedTraining, step: int, backward: bool) -> Iterator[tuple[int, Node]]:
    """Yield (microbatch, node) where the plan's value of the node, or its gradient, differs; in the order of the graph.

    The model's buffers change with the microbatches, as they do in a step.
    """
    prepared, tolerance = training.prepared, training.tolerance
    layouts, stage_of = prepared.main.layouts, prepared.main_partition.stage_of
    traces = fork_workers(lambda context: trace_pass(training, World.join(), step, backward), prepared.plan.workers)
    for microbatch, expected, floors in _reference_values(training, step, backward):
        # Recomputable nodes (sizes, masks) are not compared: a size may be that of a replica's own samples.
        for node in (n for n in prepared.main_partition.graph.nodes if not n.recomputable):
            stage_traces = [t for t in traces if t.stage == prepared.plan.first_chunk(stage_of[node.name])]
            parts = [t for t in stage_traces if (microbatch, node.name) in t.values]
            if node.name not in expected or not parts or is_unfilled(node.op):
                continue
            if backward and any(t.weights[microbatch] for t in stage_traces if (microbatch, node.name) not in t.values):
                continue  # an operator returned its own input: the gradient is kept for the node before
            replicas = _assemble_replicas(parts, layouts[stage_of[node.name]], microbatch, node.name, backward)
            scale = error_scale(0.0, floors[node.name], tolerance)
            if not _matches_reference(node, expected[node.name], replicas, tolerance, scale):
                yield microbatch, node


def _reference_values(
    training: ComparedTraining, step: int, backward: bool
) -> Iterator[tuple[int, dict[str, Tensor], dict[str, float]]]:
    """Yield every value of one process's pass by node name, and its rounding floor, microbatch by microbatch.

    Args:
        training: the training, whose model is run; its buffers change with the microbatches.
        step: number of the step, for its batch and its random numbers.
        backward: yield the gradients of the values instead.
    """
    prepared, tensors = training.prepared, training.tensors
    leaves, _ = flatten(training.batches[step])
    samples = sample_count(leaves)
    code = prepared.main_partition.graph.code
    filled = [(i, a, b) for i, (a, b) in enumerate(split_bounds(samples, prepared.plan.microbatches)) if a < b]
    parts = [SampleSlice(b - a, a, samples, i, step, training.seed) for i, a, b in filled]
    counted = add_batch_counts(
        code, tensors, parts, [take_samples(leaves, a, b) for _, a, b in filled], sampled_leaves(leaves)
    )
    part_of = {part.microbatch: part for part in counted}

    def run(start: int, stop: int, microbatch: int) -> dict[str, Tensor]:
        look, part_leaves = KeptValues(backward), take_samples(clone_leaves(leaves), start, stop)
        with torch.set_grad_enabled(backward):
            loss = run_graph(code, tensors, part_leaves, part_of[microbatch], look)
        if backward and loss[0].requires_grad:
            # The gradient with which the backward pass begins: this microbatch's part of the mean over the batch.
            share = (stop - start if prepared.main_partition.graph.loss_is_mean else 1) / samples
            torch.autograd.backward([loss[0]], [torch.full_like(loss[0], share)])
        return look.values

    for microbatch, start, stop in filled:
        # Floors first: the true pass comes last, since the next microbatch reads the buffers that it leaves.
        nudged_passes = list[dict[str, Tensor]]()
        for attempt in range(TRIES):
            restore = training.snapshot()
            nudge_values(prepared.model.parameters(), attempt)
            nudged_passes.append(run(start, stop, microbatch))
            restore()
        values = run(start, stop, microbatch)
        floors = {
            n: rounding_floor(value, [nudged[n] for nudged in nudged_passes if n in nudged])
            for n, value in values.items()
        }
        yield microbatch, values, floors
    for parameter in tensors.parameters().values():
        parameter.grad = None


def _describe_node(node: Node, context: str) -> str:
    line = f" ({node.source})" if node.source else ""
    return f"{node.name}{line}{', ' + context if context else ''}"


def _assemble_value(
    layout: Layout | None, name: str, values: Mapping[tuple[int, ...], Tensor], samples: int, is_gradient: bool
) -> Tensor:
    """Return a node's whole value from the ranks' parts, which are keyed by mesh coordinates.

    Args:
        layout: placements of the stage's values; None where no operator is split.
        name: name of the node.
        values: the parts, each of them by the coordinates of its rank.
        samples: number of samples of the value.
        is_gradient: whether the value is a gradient, which has the dual placements.
    """
    if layout is None:
        return next(iter(values.values()))
    state = layout.state(name, samples)
    degrees = tuple(split.degree for split in layout.splits.values())
    return assemble_parts(values, tuple(map(gradient_placement, state)) if is_gradient else state, degrees)


def _assemble_replicas(
    traces: Sequence[ValueTrace], layout: Layout | None, microbatch: int, name: str, is_gradient: bool
) -> list[tuple[Tensor, int]]:
    """Return for each replica that computed something the node's value, assembled from its mesh, and its samples."""
    meshes: dict[int, dict[tuple[int, ...], ValueTrace]] = {}
    for trace in traces:
        if trace.weights[microbatch]:
            meshes.setdefault(trace.replica, {})[tuple(trace.coordinates.values())] = trace
    result = []
    for _, mesh in sorted(meshes.items()):
        values = {at: trace.values[microbatch, name] for at, trace in mesh.items()}
        samples = next(iter(mesh.values())).samples[microbatch]
        result.append((_assemble_value(layout, name, values, samples, is_gradient), samples))
    return result


def _sort_values(value: Tensor) -> Tensor:
    return value if value.is_complex() else value.flatten().sort().values


def _matches_reference(
    node: Node, expected: Tensor, replicas: Sequence[tuple[Tensor, int]], tolerance: float, scale: float
) -> bool:
    """Return whether the replicas' values make up the whole: as rows, as equal values, or as parts of a sum or mean.

    Args:
        node: node of the graph whose value it is.
        expected: the reference's value, of the whole microbatch.
        replicas: for each replica that computed something its value, and the number of its samples.
        tolerance: largest relative error that counts as rounding.
        scale: least denominator of the error, from the rounding floor.
    """
    values = [value for value, _ in replicas]
    if node.batch_dim is not None:
        joined_value = torch.cat(values, node.batch_dim) if expected.dim() else values[0]
        if joined_value.shape != expected.shape:
            return False
        if relative_error(expected, joined_value, scale) <= tolerance:
            return True
        # Where samples are folded into another dimension (batch times heads), parts come in another order.
        return relative_error(_sort_values(expected), _sort_values(joined_value), scale) <= tolerance
    if all(v.shape == expected.shape and relative_error(expected, v, scale) <= tolerance for v in values):
        return True
    # A value of another shape, or an integer, that replicas computed on their own samples cannot be judged here: if it
    # is wrong, a later node shows it.
    if any(v.shape != expected.shape or not v.is_floating_point() for v in values):
        return len(values) > 1
    mean = sum(value * samples for value, samples in replicas) / sum(samples for _, samples in replicas)
    total = torch.stack(list(values)).sum(0)
    return any(relative_error(expected, torch.as_tensor(value), scale) <= tolerance for value in (mean, total))
