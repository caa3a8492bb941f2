"""Where two runs part ways: the first node whose value by the plan is not the whole model's, or the first gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polylane.graph.batch import bounds, flatten, sample_count, take
from polylane.graph.graph import Node
from polylane.graph.part import Part
from polylane.graph.twins import is_unfilled
from polylane.plan.sync import SUM
from polylane.planner.layout import Layout, assembled
from polylane.proof.reference import run_whole
from polylane.proof.relative import relative_error
from polylane.runtime.lane import Tensors
from polylane.runtime.launch import fork
from polylane.runtime.prepare import Prepared
from polylane.runtime.tracing import Trace, trace
from polylane.runtime.world import World


def first_difference(prepared: Prepared, batch: Any, seed: int, wrong: Collection[str], tolerance: float) -> str:
    """Run the first forward pass again, on both sides, and say at which node they part ways.

    Args:
        batch: of the first step.
        wrong: parameters whose gradients of the first step differ.
    """
    if not prepared.plan.sync.plain:  # how replicas agree has no part in a pass, which here is the first one
        prepared = replace(prepared, plan=prepared.plan.model_copy(update={"sync": SUM}))
    layouts, stage_of = prepared.layouts_of(prepared.main), prepared.main.stage_of
    traces = fork(lambda context: trace(prepared, World.join(), batch, seed), prepared.plan.workers)
    for microbatch, seen in _whole_values(prepared, batch, seed):
        for node in (n for n in prepared.main.graph.nodes if not n.free):  # sizes may count a replica's own samples
            parts = [t for t in traces if (microbatch, node.name) in t.values]
            if node.name not in seen or not parts or is_unfilled(node.op):
                continue
            layout = layouts[stage_of[node.name]]
            if not _makes_up(node, seen[node.name], parts, layout, microbatch, tolerance):
                return _told(node, f"microbatch {microbatch}")
    # A backward pass goes from the loss to the inputs: what goes wrong on its way stays wrong in all that comes after.
    for node in reversed(prepared.main.graph.nodes):
        for name in node.parameters:
            if name in wrong:
                return (
                    "every forward value agrees; the first gradient that differs, from the loss backwards, is that of "
                    f"{name}, in {_told(node, '')}"
                )
    return "every forward value and gradient of the first step agrees: what differs is an update"


def _whole_values(prepared: Prepared, batch: Any, seed: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Every value of one worker's forward pass, by node name, microbatch by microbatch."""
    leaves, _ = flatten(batch)
    samples = sample_count(leaves)
    tensors = Tensors(prepared.model, [o.loss for o in prepared.objectives.values()], torch.device("cpu"))
    for microbatch, (start, stop) in enumerate(bounds(samples, prepared.plan.microbatches)):
        if start == stop:
            continue
        part = Part(stop - start, start, samples, microbatch, 0, seed)
        with torch.no_grad():
            _, seen = run_whole(prepared.main.graph.code, tensors, take(leaves, start, stop), part)
        yield microbatch, seen


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


def _makes_up(
    node: Node, expected: Tensor, traces: Sequence[Trace], layout: Layout | None, microbatch: int, tolerance: float
) -> bool:
    """Whether the replicas' values are the whole's: side by side, equal, or parts of a sum or mean."""
    ordered = _by_replica(traces, layout, microbatch, node.name)
    values = [t.values[microbatch, node.name] for t in ordered]
    if node.batch_dim is not None:
        together = torch.cat(values, node.batch_dim) if expected.dim() else values[0]
        return together.shape == expected.shape and relative_error(expected, together) <= tolerance
    if all(v.shape == expected.shape and relative_error(expected, v) <= tolerance for v in values):
        return True
    if any(v.shape != expected.shape or not v.is_floating_point() for v in values):
        return len(values) > 1
    samples = [t.samples[microbatch] for t in ordered]
    mean = sum(v * n for v, n in zip(values, samples, strict=True)) / sum(samples)
    total = torch.stack(list(values)).sum(0)
    return any(relative_error(expected, torch.as_tensor(each)) <= tolerance for each in (mean, total))
