"""The same numbers as one device? The reference in one process against the plan on its workers, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import bounds, cloned, flatten, promoted, sample_count, sampled_leaves, take
from polylane.graph.export import Whole, snapshot
from polylane.graph.graph import Code, Graph, Node
from polylane.graph.part import Part
from polylane.graph.precision import Promoted, to_float64
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.planner.layout import Layout, assembled
from polylane.runtime.job import Job
from polylane.runtime.lane import Tensors
from polylane.runtime.launch import fork
from polylane.runtime.materialize import Init, materialize, on_meta
from polylane.runtime.prepare import Objective, Prepared, named_parameters, prepare
from polylane.runtime.tracing import Trace, trace
from polylane.runtime.weights import digest
from polylane.runtime.world import World

TOLERANCE = 1e-9

# A gradient that is zero in truth (a convolution's bias before BatchNorm, a key's bias before softmax) is rounding
# noise in any order of summation: errors are taken relative to a tensor's largest entry, but at least to this share of
# the largest entry of all tensors of its kind.
FLOOR = 1e-3


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from the reference.

    Attributes:
        name: the parameter or buffer.
        gradient: worst relative error of its gradient in step 1, None where it has none.
        value: worst relative error of the tensor itself after the last step.
    """

    name: str
    gradient: float | None
    value: float


@dataclass(frozen=True)
class Verdict:
    """The outcome of a proof.

    Attributes:
        passed: whether everything agrees to ``tolerance``.
        reference: what the plan was held against.
        losses: per step (reference, plan).
        loss_error: worst relative error of a loss.
        deviations: per parameter and buffer, in the model's order.
        worst: the largest relative error of all.
        replicas_equal: whether all workers that hold a weight or buffer hold the same bits.
        culprit: where the two part ways: the first node in graph order whose value differs, or None.
    """

    passed: bool
    plan: str
    workers: int
    steps: int
    tolerance: float
    reference: str
    losses: tuple[tuple[float, float], ...]
    loss_error: float
    deviations: tuple[Deviation, ...]
    worst: float
    replicas_equal: bool
    culprit: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Record:
    """What a training leaves behind."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


def verify(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[Any],
    plan: str | Spec | Plan,
    *,
    clip_norm: float | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    init: Init | None = None,
) -> Verdict:
    """Train on ``batches`` twice, on one worker and by the plan, in float64, and compare.

    Args:
        model: is copied, not changed.
        objective: loss, optimizer and scheduler.
        batches: whole batches, one a step.
        plan: how the training is split; its workers are forked here.
        clip_norm, seed: as in training.
        tolerance: largest relative error that counts as rounding.
        init: fills the tensors that a module itself owns, for a model on the meta device.

    Raises:
        PolylaneError: the plan does not fit the model.
        WorkerFailed: a worker raised.
    """
    if not batches:
        raise PolylaneError("there is no batch to verify with")
    model, objective = _copied(model), _in_float64(objective)
    if on_meta(model):  # a proof holds it against the whole
        materialize(model, init, seed, torch.device("cpu"), lambda name, whole: whole)
    model = to_float64(model)
    example = in_float64(batches[0])
    prepared = prepare(model, {objective.name: objective}, example, plan, in_float64=True)
    _see_that_it_runs(prepared, batches[0])
    return prove(prepared, batches, clip_norm=clip_norm, seed=seed, tolerance=tolerance)


def prove(
    prepared: Prepared,
    batches: Sequence[Any],
    *,
    clip_norm: float | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> Verdict:
    """As :func:`verify`, for a training that is prepared already, in float64; its model is left as it was."""
    model, batches = prepared.model, [in_float64(batch) for batch in batches]

    def work(context: Any) -> tuple[Record, dict[str, str]]:
        job = Job(prepared, World.join(), example=batches[0], clip_norm=clip_norm, seed=seed)
        record = _train(job, batches)
        held = {name + job.part_of(name): digest(tensor) for name, tensor in job.held().items()}
        job.close()
        return record, held

    # Workers are forked: what they do to the model stays with them, and the reference starts from the same weights.
    results = fork(work, prepared.plan.workers)
    restore = snapshot(model)
    reference, eager = reference_run(prepared, [in_float64(batch) for batch in batches], clip_norm, seed)
    restore()
    verdict = _compare(reference, [record for record, _ in results], prepared, tolerance)
    equal = _same_bits([held for _, held in results])
    culprit = None
    if not verdict["passed"]:
        culprit = _first_difference(prepared, batches[0], seed, verdict["deviations"], tolerance)
    return Verdict(
        **{**verdict, "passed": verdict["passed"] and equal},
        plan=prepared.plan.spec,
        workers=prepared.plan.workers,
        steps=len(batches),
        tolerance=tolerance,
        reference="the plain model" if eager else "the model's captured graph, run whole",
        replicas_equal=equal,
        culprit=culprit,
    )


def _see_that_it_runs(prepared: Prepared, batch: Any) -> None:
    """Some kernels know no float64: say so before any worker starts."""
    leaves, _ = flatten(in_float64(batch))
    tensors = Tensors(prepared.model, [o.loss for o in prepared.objectives.values()], torch.device("cpu"))
    samples = sample_count(leaves)
    restore = snapshot(prepared.model)
    try:
        with torch.no_grad():
            run_whole(prepared.main.graph.code, tensors, leaves, Part(samples, batch=samples))
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise PolylaneError(f"the model does not run in float64, which a proof needs: {why}") from error
    finally:
        restore()


def _in_float64(objective: Objective) -> Objective:
    if not isinstance(objective.loss, nn.Module):
        return objective
    return replace(objective, loss=to_float64(_copied(objective.loss)))


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise PolylaneError(
            f"the model cannot be copied for a proof, copy.deepcopy says: {reason} (torch.nn.utils.weight_norm does "
            "this; torch.nn.utils.parametrizations.weight_norm does not)"
        ) from error


def in_float64(batch: Any) -> Any:
    """A copy of a batch with its floating-point numbers in float64."""
    leaves, rebuild = flatten(batch)
    return rebuild(cloned(promoted(leaves, torch.float64)))


def _train(job: Job, batches: Sequence[Any]) -> Record:
    losses, gradients = [], dict[str, Tensor | None]()
    for step, batch in enumerate(batches):
        losses.append(job.step(batch).loss)
        if step == 0:
            gradients = {name: None if g is None else g.clone() for name, g in job.whole_gradients().items()}
    return Record(losses, gradients, job.state_dict())


def reference_run(
    prepared: Prepared, batches: Sequence[Any], clip_norm: float | None, seed: int
) -> tuple[Record, bool]:
    """One worker in a plain loop over the plan's microbatches, without any of the runtime's code. Trains the model
    itself.

    Returns:
        What it gave, and whether the model itself was run: that is so unless it draws random numbers, which only the
        graph draws by key.
    """
    objective, graph, model = next(iter(prepared.objectives.values())), prepared.main.graph, prepared.model
    named = named_parameters(model, [objective.loss])
    optimizer = objective.optimizer(list(named))
    scheduler = objective.scheduler(optimizer) if objective.scheduler else None
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    run, eager = _reference_loss(model, objective, graph, batches[0])
    sampled = sampled_leaves(flatten(batches[0])[0])
    losses: list[float] = []
    gradients: dict[str, Tensor | None] = {}
    for step, batch in enumerate(batches):
        for _, parameter in named:
            parameter.grad = None
        losses.append(_accumulate(run, prepared, batch, sampled, step, seed, named))
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named if id(p) in optimized], clip_norm)
        if step == 0:
            gradients = {name: None if p.grad is None else p.grad.clone() for name, p in named if id(p) in optimized}
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return Record(
        losses, gradients, {name: value.detach().clone() for name, value in model.state_dict().items()}
    ), eager


Run = Callable[[Sequence[Any], Part], tuple[Tensor, ...]]


def _reference_loss(model: nn.Module, objective: Objective, graph: Graph, example: Any) -> tuple[Run, bool]:
    """How the reference computes a loss: by the model itself, unless it draws random numbers, which the graph keys."""
    _, rebuild = flatten(example)
    whole = Whole(model, objective.loss, rebuild)
    tensors = Tensors(model, [objective.loss], torch.device("cpu"))

    def by_graph(leaves: Sequence[Any], part: Part) -> tuple[Tensor, ...]:
        return run_whole(graph.code, tensors, leaves, part)[0]

    def by_model(leaves: Sequence[Any], part: Part) -> tuple[Tensor, ...]:
        with Promoted():
            result: tuple[Tensor, ...] = whole(*leaves)
        return result

    leaves, _ = flatten(in_float64(example))
    plain = not graph.code.random and _runs(model, lambda: by_model(leaves, Part(sample_count(leaves))))
    return (by_model, True) if plain else (by_graph, False)


def _runs(model: nn.Module, loss: Callable[[], Any]) -> bool:
    """Whether the model itself runs in float64: some of its kernels, unlike a graph's, may not."""
    restore = snapshot(model)
    try:
        with torch.no_grad():
            loss()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    finally:
        restore()
    return True


def run_whole(
    code: Code, tensors: Tensors, leaves: Sequence[Any], part: Part
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Run captured code node by node on the model's own tensors: the loss, and every tensor value by node name."""
    table: dict[str, Any] = {
        "parameter": tensors.parameters(),
        "buffer": tensors.buffers(),
        "constant": code.constants,
        "input": leaves,
        "part": [part],
    }
    values: dict[fx.Node, Any] = {}
    seen: dict[str, Tensor] = {}
    result: tuple[Tensor, ...] = ()
    for node in code.fx.nodes:
        if node.op == "placeholder":
            kind, key = node.meta["role"]
            values[node] = table[kind][key]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            if isinstance(values[node], Tensor):
                seen[node.meta["name"]] = values[node].detach().clone()  # somebody may write to it
        else:
            result = tuple(fx.map_arg(node.args[0], values.__getitem__))
    return result, seen


def _accumulate(
    run: Run,
    prepared: Prepared,
    batch: Any,
    sampled: Sequence[bool],
    step: int,
    seed: int,
    named: Sequence[tuple[str, nn.Parameter]],
) -> float:
    """Gradients of the mean over the whole batch, microbatch by microbatch; its value."""
    graph, microbatches = prepared.main.graph, prepared.plan.microbatches
    leaves, _ = flatten(batch)
    samples, split = sample_count(leaves), sampled if len(sampled) == len(leaves) else None
    total, count = 0.0, 0.0
    for microbatch, (start, stop) in enumerate(bounds(samples, microbatches)):
        if start == stop:
            continue
        part = Part(stop - start, start, samples, microbatch, step, seed)
        result = run(take(leaves, start, stop, split), part)
        if graph.mean:
            (result[0] * ((stop - start) / samples)).backward()
            total, count = total + result[0].item() * (stop - start), count + (stop - start)
        else:
            result[0].backward()
            total, count = total + result[0].item(), count + result[1].item()
    if not graph.mean:
        for _, parameter in named:
            if parameter.grad is not None:
                parameter.grad /= count
    return total / count


def _compare(reference: Record, plan: Sequence[Record], prepared: Prepared, tolerance: float) -> dict[str, Any]:
    gradients: dict[str, Tensor | None] = {}
    for record in reversed(plan):
        gradients |= record.gradients
    losses = tuple(zip(reference.losses, plan[0].losses, strict=True))
    every = [pair for record in plan for pair in zip(reference.losses, record.losses, strict=True)]
    loss_error = max((abs(a - b) / max(abs(a), 1e-12) for a, b in every), key=lambda e: e if e == e else math.inf)
    tied = prepared.main.graph.tied
    names = [name for name in reference.state if name not in tied and reference.state[name].numel()]
    grads = {name: g for name in names if (g := reference.gradients.get(name)) is not None}
    grad_floor = FLOOR * max((float(g.abs().max()) for g in grads.values()), default=0.0)
    parameters = set(prepared.main.graph.parameters)
    largest = max((float(reference.state[n].abs().max()) for n in names if n in parameters), default=0.0)
    deviations = []
    for name in names:
        grad = gradients.get(name)
        error = None
        if name in grads or grad is not None:
            zero = torch.zeros_like(reference.state[name])
            error = relative_error(grads.get(name, zero), zero if grad is None else grad, grad_floor)
        floor = FLOOR * largest if name in parameters else 0.0
        deviations.append(Deviation(name, error, relative_error(reference.state[name], plan[0].state[name], floor)))
    worst = max(
        [loss_error, *(d.value for d in deviations), *(d.gradient for d in deviations if d.gradient is not None)]
    )
    return {
        "passed": worst <= tolerance,  # not so for NaN
        "losses": losses,
        "loss_error": loss_error,
        "deviations": tuple(deviations),
        "worst": worst,
    }


def relative_error(expected: Tensor, got: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest entry of ``expected``, or over ``floor`` if larger; nan counts as inf."""
    if expected.numel() == 0:
        return 0.0
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (expected, got))
    if torch.equal(a, b):
        return 0.0
    apart = torch.where(a == b, 0.0, (a - b).abs())  # a mask's infinities are equal, their difference is not a number
    largest = torch.where(a.abs().isinf(), 0.0, a.abs()).max()
    difference, scale = float(apart.max()), max(float(largest), floor)
    return difference / scale if difference == difference and scale > 0 else float("inf")


def _same_bits(held: Sequence[Mapping[str, str]]) -> bool:
    seen: dict[str, str] = {}
    return all(seen.setdefault(name, bits) == bits for worker in held for name, bits in worker.items())


def _first_difference(
    prepared: Prepared, batch: Any, seed: int, deviations: Sequence[Deviation], tolerance: float
) -> str:
    """Run the first forward pass again, on both sides, and say at which node they part ways."""
    graph, layouts = prepared.main.graph, prepared.layouts_of(prepared.main)
    traces: list[Trace] = fork(lambda context: trace(prepared, World.join(), batch, seed), prepared.plan.workers)
    leaves, _ = flatten(batch)
    samples = sample_count(leaves)
    tensors = Tensors(prepared.model, [o.loss for o in prepared.objectives.values()], torch.device("cpu"))
    for microbatch, (start, stop) in enumerate(bounds(samples, prepared.plan.microbatches)):
        if start == stop:
            continue
        part = Part(stop - start, start, samples, microbatch, 0, seed)
        with torch.no_grad():
            _, seen = run_whole(graph.code, tensors, take(leaves, start, stop), part)
        for node in (n for n in graph.nodes if not n.free):  # what sizes alone decide may count a replica's own samples
            parts = [t for t in traces if (microbatch, node.name) in t.values]
            if (
                node.name in seen
                and parts
                and not _makes_up(
                    node,
                    seen[node.name],
                    parts,
                    layouts[prepared.main.stage_of[node.name]],
                    microbatch,
                    tolerance,
                )
            ):
                return _told(node, f"microbatch {microbatch}")
    wrong = {d.name for d in deviations if d.gradient is not None and not d.gradient <= tolerance}
    # A backward pass goes from the loss to the inputs: what goes wrong on its way stays wrong in all that comes after.
    for node in reversed(graph.nodes):
        for name in node.parameters:
            if name in wrong:
                return (
                    "every forward value agrees; the first gradient that differs, from the loss backwards, is that of "
                    f"{name}, in {_told(node, '')}"
                )
    return "every forward value and gradient of the first step agrees: what differs is an update"


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
