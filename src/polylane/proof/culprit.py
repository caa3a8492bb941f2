"""Where two runs part ways: the first node whose value by the plan is not the whole model's, or the first gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polylane.graph.batch import bounds, cloned, flatten, sample_count, take
from polylane.graph.export import snapshot
from polylane.graph.graph import Node
from polylane.graph.part import Part
from polylane.graph.rounding import TRIES, floor, nudge
from polylane.graph.twins import is_unfilled
from polylane.plan.sync import SUM
from polylane.planner.layout import Layout, assembled
from polylane.proof.reference import run_whole, with_counts
from polylane.proof.relative import relative_error, scale_of
from polylane.runtime.lane import Tensors
from polylane.runtime.launch import fork
from polylane.runtime.prepare import Prepared
from polylane.runtime.tracing import Trace, trace
from polylane.runtime.world import World
from polylane.samples.statistics import Statistics


@dataclass(frozen=True)
class Wrong:
    """What differs after a step.

    Attributes:
        step: its number.
        gradients, buffers, updates: names of parameters and buffers.
        memory: by parameter, an entry of its optimizer's state; options of the optimizer under "".
        loss: whether that of the step does.
    """

    step: int = 0
    gradients: Collection[str] = ()
    buffers: Collection[str] = ()
    updates: Collection[str] = ()
    memory: Mapping[str, str] = field(default_factory=dict)
    loss: bool = False


def first_difference(prepared: Prepared, batch: Any, seed: int, wrong: Wrong, tolerance: float) -> str:
    """Run the forward pass of a step again, on both sides, and say at which node they part ways.

    Args:
        prepared: whose model has the weights and buffers that the step began with.
        batch: of that step.
        wrong: what was seen to differ after it.
    """
    if not prepared.plan.sync.plain:  # how replicas agree has no part in a pass, which here is the first one
        prepared = replace(prepared, plan=prepared.plan.model_copy(update={"sync": SUM}))
    layouts, stage_of = prepared.layouts_of(prepared.main), prepared.main.stage_of
    traces = fork(lambda context: trace(prepared, World.join(), batch, seed, wrong.step), prepared.plan.workers)
    for microbatch, seen, floors in _whole_values(prepared, batch, seed, wrong.step):
        for node in (n for n in prepared.main.graph.nodes if not n.free):  # sizes may count a replica's own samples
            parts = [t for t in traces if (microbatch, node.name) in t.values]
            if node.name not in seen or not parts or is_unfilled(node.op):
                continue
            layout = layouts[stage_of[node.name]]
            scale = scale_of(0.0, floors[node.name], tolerance)
            if not _makes_up(node, seen[node.name], parts, layout, microbatch, tolerance, scale):
                return _told(node, f"microbatch {microbatch}" + _in_step(wrong))
    return _after_forward(prepared, wrong)


def _after_forward(prepared: Prepared, wrong: Wrong) -> str:
    """Where they part ways if every forward value agrees, in the order in which a step goes on."""
    step, nodes = f"step {wrong.step + 1}", prepared.main.graph.nodes
    for node in nodes:
        for name in node.buffers:
            if name in wrong.buffers:
                return f"every forward value of {step} agrees; the buffer {name} differs after it, of {_told(node, '')}"
    # A backward pass goes from the loss to the inputs: what goes wrong on its way stays wrong in all that comes after.
    for node in reversed(nodes):
        for name in node.parameters:
            if name in wrong.gradients:
                return (
                    "every forward value agrees; the first gradient that differs, from the loss backwards, is that of "
                    f"{name}, in {_told(node, '')}" + _in_step(wrong)
                )
    for node in nodes:
        for name in node.parameters:
            if name in wrong.memory or name in wrong.updates:
                entry = f": its optimizer's {wrong.memory[name]} differs" if name in wrong.memory else ""
                return (
                    f"every forward value and gradient of {step} agrees: what differs is an update, first that of "
                    f"{name}, in {_told(node, '')}{entry}"
                )
    if wrong.memory:
        entry = next(iter(wrong.memory.values()))
        return f"every forward value and gradient of {step} agrees: what differs is the optimizer's {entry}"
    if wrong.loss:
        return f"every forward value and gradient of {step} agrees: what differs is the loss that is told"
    names = ", ".join([*wrong.gradients, *wrong.buffers, *wrong.updates][:1])
    return f"every forward value of {step} agrees: what differs is {names or 'the weights of the whole model'}"


def _in_step(wrong: Wrong) -> str:
    return f", step {wrong.step + 1}" if wrong.step else ""


def _whole_values(
    prepared: Prepared, batch: Any, seed: int, step: int
) -> Iterator[tuple[int, dict[str, Tensor], dict[str, float]]]:
    """Every value of one worker's forward pass, by node name, microbatch by microbatch, and what rounding makes of it.

    The model's buffers move with them.
    """
    leaves, _ = flatten(batch)
    samples = sample_count(leaves)
    tensors = Tensors(prepared.model, [o.loss for o in prepared.objectives.values()], torch.device("cpu"))

    code = prepared.main.graph.code
    filled = [(i, a, b) for i, (a, b) in enumerate(bounds(samples, prepared.plan.microbatches)) if a < b]
    parts = [Part(b - a, a, samples, i, step, seed) for i, a, b in filled]
    counted = with_counts(Statistics(code.fx), code, tensors, parts, [take(leaves, a, b) for _, a, b in filled])
    part_of = {part.microbatch: part for part in counted}

    def run(start: int, stop: int, microbatch: int) -> dict[str, Tensor]:
        with torch.no_grad():
            return run_whole(code, tensors, take(cloned(leaves), start, stop), part_of[microbatch])[1]

    for microbatch, (start, stop) in enumerate(bounds(samples, prepared.plan.microbatches)):
        if start == stop:
            continue
        again = list[dict[str, Tensor]]()
        for attempt in range(TRIES):
            restore = snapshot(prepared.model, *(o.loss for o in prepared.objectives.values()))
            nudge(prepared.model.parameters(), attempt)
            again.append(run(start, stop, microbatch))
            restore()
        seen = run(start, stop, microbatch)
        yield microbatch, seen, {name: floor(value, [each[name] for each in again]) for name, value in seen.items()}


def _told(node: Node, where: str) -> str:
    line = f" ({node.source})" if node.source else ""
    return f"{node.name}{line}{', ' + where if where else ''}"


def _by_replica(traces: Sequence[Trace], layout: Layout | None, microbatch: int, name: str) -> list[Trace]:
    """Of every replica that computed something, one trace, with the node's value put together from its mesh."""
    meshes: dict[int, dict[tuple[int, ...], Trace]] = {}
    for each in traces:
        if each.weights[microbatch]:
            meshes.setdefault(each.replica, {})[tuple(each.coordinates.values())] = each
    result = []
    for replica in sorted(meshes):
        mesh = meshes[replica]
        one = next(iter(mesh.values()))
        values = {at: each.values[microbatch, name] for at, each in mesh.items()}
        if layout is not None:
            state = layout.state(name, one.samples[microbatch])
            degrees = tuple(split.degree for split in layout.splits.values())
            values = {(): assembled(values, state, degrees)}
        own = {(microbatch, name): next(iter(values.values()))}
        result.append(Trace(replica, {}, own, one.weights, one.samples))
    return result


def _in_order(value: Tensor) -> Tensor:
    return value if value.is_complex() else value.flatten().sort().values


def _makes_up(
    node: Node,
    expected: Tensor,
    traces: Sequence[Trace],
    layout: Layout | None,
    microbatch: int,
    tolerance: float,
    scale: float,
) -> bool:
    """Whether the replicas' values are the whole's: side by side, equal, or parts of a sum or mean.

    Args:
        scale: errors are relative to it, where the value is smaller.
    """
    ordered = _by_replica(traces, layout, microbatch, node.name)
    values = [t.values[microbatch, node.name] for t in ordered]
    if node.batch_dim is not None:
        together = torch.cat(values, node.batch_dim) if expected.dim() else values[0]
        if together.shape != expected.shape:
            return False
        if relative_error(expected, together, scale) <= tolerance:
            return True
        # Samples that lie within another dimension come in another order.
        return relative_error(_in_order(expected), _in_order(together), scale) <= tolerance
    if all(v.shape == expected.shape and relative_error(expected, v, scale) <= tolerance for v in values):
        return True
    if any(v.shape != expected.shape or not v.is_floating_point() for v in values):
        return len(values) > 1
    samples = [t.samples[microbatch] for t in ordered]
    mean = sum(v * n for v, n in zip(values, samples, strict=True)) / sum(samples)
    total = torch.stack(list(values)).sum(0)
    return any(relative_error(expected, torch.as_tensor(each), scale) <= tolerance for each in (mean, total))
