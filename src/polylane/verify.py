"""The same numbers as one device? The reference in one process against the plan on its workers, in float64."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import cloned, flatten, promoted, sample_count
from polylane.graph.export import snapshot
from polylane.graph.part import Part
from polylane.graph.precision import to_float64
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.proof.culprit import first_difference
from polylane.proof.reference import Record, Reference, reference_run, run_whole
from polylane.proof.relative import FLOOR, relative_error
from polylane.proof.replay import replay
from polylane.proof.replicated import replicated_run
from polylane.proof.rounding import Rounding, give
from polylane.runtime.job import Job
from polylane.runtime.lane import Tensors
from polylane.runtime.launch import Context, fork, threads_per_worker
from polylane.runtime.materialize import Init, materialize, on_meta
from polylane.runtime.pieces import Pieces
from polylane.runtime.prepare import Objective, Prepared, prepare
from polylane.runtime.server_job import job_of
from polylane.runtime.sync.rule import Stepping
from polylane.runtime.sync.server_log import Update
from polylane.runtime.weights import digest
from polylane.runtime.world import World

TOLERANCE = 1e-9


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
        rounding: parameters whose gradients are zero up to rounding, in whole or in part, and of which the plan's
            optimizer was given the reference's rounding in place of its own.
        rule: by which replicas agree, where that is not the numbers of one device: the reference follows it as well.
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
    rounding: tuple[str, ...] = ()
    rule: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


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
    _refuse_rounded(prepared.plan)
    batches = [in_float64(batch) for batch in batches]
    shortest = min(sample_count(flatten(batch)[0]) for batch in batches)
    prepared.fewest.check(shortest, "the shortest batch", "verify fewer steps, or take another batch size")
    threads = threads_per_worker(prepared.plan.workers)

    def alone(context: Context) -> Reference:
        torch.set_num_threads(threads)  # as each of the plan's; more of them slow down a small model
        run = replicated_run if prepared.plan.sync.alone else reference_run
        return run(prepared, batches, clip_norm=clip_norm, seed=seed, tolerance=tolerance)

    def together(context: Context) -> _Trained:
        job = job_of(prepared, World.join(), example=batches[0], clip_norm=clip_norm, seed=seed)
        return _train(job, batches, _pieces_of(rounding, prepared, context.rank))

    def again(context: Context) -> Reference:
        return replay(prepared, batches, workers[0].updates, clip_norm=clip_norm, seed=seed)

    # All are forked: what they do to the model stays with them, and they start from the same weights.
    sync, rounding = prepared.plan.sync, list[list[dict[str, Rounding]]]()
    if sync.serves and sync.alone:  # in which order, only the servers know
        workers = fork(together, prepared.plan.processes)[: prepared.plan.workers]
        (reference,) = fork(again, 1)
    else:
        (reference,) = fork(alone, 1)
        rounding = reference.rounding
        workers = fork(together, prepared.plan.processes)[: prepared.plan.workers]
    deviations, losses, loss_error = _compare(reference, [w.record for w in workers], prepared)
    worst = max(loss_error, *(max(d.value, d.gradient or 0.0) for d in deviations), 0.0, key=_nan_last)
    replaced = {name for worker in workers for name in worker.replaced}
    # So it is for NaN; where replicas go apart, no value of theirs is one device's.
    found = not worst <= tolerance and not sync.alone
    culprit = _culprit(prepared, batches[0], seed, deviations, tolerance) if found else None
    equal = _same_bits([worker.held for worker in workers])
    return Verdict(
        passed=worst <= tolerance and equal,
        plan=prepared.plan.spec,
        workers=prepared.plan.processes,
        steps=len(batches),
        tolerance=tolerance,
        reference=_reference(reference, prepared.plan),
        losses=losses,
        loss_error=loss_error,
        deviations=deviations,
        worst=worst,
        replicas_equal=equal,
        culprit=culprit,
        rounding=tuple(d.name for d in deviations if d.name in replaced),
        rule=",".join(sync.words()) if sync.alone else "",
    )


def _culprit(prepared: Prepared, batch: Any, seed: int, deviations: Sequence[Deviation], tolerance: float) -> str:
    """Where the two part ways."""
    restore = snapshot(prepared.model, *(o.loss for o in prepared.objectives.values()))
    wrong = {d.name for d in deviations if d.gradient is not None and not d.gradient <= tolerance}
    culprit = first_difference(prepared, batch, seed, wrong, tolerance)
    restore()
    return culprit


def _refuse_rounded(plan: Plan) -> None:
    """What a rule loses on the way is no difference that a proof could tell from an error.

    Raises:
        PolylaneError: gradients are rounded or compressed.
    """
    if not plan.sync.exact and not plan.sync.alone:
        words = ",".join(plan.sync.words())
        raise PolylaneError(
            f"{words}: gradients lose digits on their way, so that the numbers are not those of one device: leave it "
            "out to prove the rest of the plan"
        )


def _reference(reference: Reference, plan: Plan) -> str:
    """What the plan was held against, in words."""
    what = "the plain model" if reference.eager else "the model's captured graph, run whole"
    if plan.sync.serves and plan.sync.alone:
        return f"{what}, a copy for each replica and server in one process, in the order that the servers recorded"
    if plan.sync.alone:
        return f"{what}, a copy for each replica in one process"
    return what


def _see_that_it_runs(prepared: Prepared, batch: Any) -> None:
    """Some kernels know no float64: say so before any worker starts."""
    leaves, _ = flatten(in_float64(batch))
    tensors = Tensors(prepared.model, [o.loss for o in prepared.objectives.values()], torch.device("cpu"))
    samples = sample_count(leaves)
    restore = snapshot(prepared.model, *(o.loss for o in prepared.objectives.values()))
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


@dataclass(frozen=True)
class _Trained:
    """What a plan leaves behind on one worker.

    Attributes:
        held: a digest of every part of a weight or buffer that it holds.
        replaced: parameters in whose place the optimizer was given the reference's rounding.
        updates: of every parameter server.
    """

    record: Record
    held: dict[str, str]
    replaced: set[str]
    updates: tuple[tuple[Update, ...], ...]


def _pieces_of(
    rounding: Sequence[Sequence[Mapping[str, Rounding]]], prepared: Prepared, rank: int
) -> Sequence[Mapping[str, Rounding]]:
    """Of every step, the reference's gradients of a worker's replica in the shapes that it holds; whole on servers."""
    if prepared.plan.sync.serves:
        return [each[0] for each in rounding]
    stage, replica = prepared.plan.place(rank)
    pieces = Pieces(prepared, stage, prepared.plan.coordinates(rank))
    own = []
    for step in (each[replica % len(each)] for each in rounding):
        cut = pieces.of({name: each.gradient for name, each in step.items()})
        own.append({name: replace(each, gradient=cut.get(name, each.gradient)) for name, each in step.items()})
    return own


def _train(job: Job, batches: Sequence[Any], rounding: Sequence[Mapping[str, Rounding]]) -> _Trained:
    sums, gradients, replaced = list[tuple[float, float]](), dict[str, Tensor | None](), set[str]()
    rounding = [_cut(job, step) for step in rounding]
    for each in job.stepping() if rounding else ():
        _give_rounding(each, rounding, replaced)
    job.gathered(None)  # servers wait for that, too
    for batch in batches:
        sums.append(job.step(batch).sums)
        if len(sums) == 1:
            whole = job.whole_gradients()
            gradients = whole if job.world.rank == 0 else {}
    trains = job.world.rank < job.plan.workers
    own = f" of replica {job.plan.place(job.world.rank)[1]}" if job.plan.sync.alone and trains else ""
    held = {name + job.part_of(name) + own: digest(tensor) for name, tensor in job.held().items()}
    losses = _whole_losses(job, sums)
    trained = _Trained(Record(losses, gradients, job.state_dict()), held, replaced, job.updates())
    job.close()
    return trained


def _cut(job: Job, rounding: Mapping[str, Rounding]) -> dict[str, Rounding]:
    """Of a step's gradients the parts that this worker's optimizer has, where replicas hold parts."""
    parts = {name: job.shard_of(name, each.gradient) for name, each in rounding.items()}
    return {name: replace(rounding[name], gradient=part) for name, part in parts.items() if part is not None}


def _give_rounding(each: Stepping, rounding: Sequence[Mapping[str, Rounding]], replaced: set[str]) -> None:
    plain = each.optimizer.step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        with give(rounding[each.updates()], each.gradients()) as given:
            replaced.update(given)
            return plain(*args, **kwargs)

    each.optimizer.step = step  # type: ignore[method-assign]  # its hooks are not there where it calls no base class


def _whole_losses(job: Job, sums: Sequence[tuple[float, float]]) -> list[float]:
    """The loss of every step over all replicas, of which each may know its own only."""
    plan = job.plan
    if not (plan.sync.serves and plan.sync.alone):
        return [total / count for total, count in sums]
    every = job.gathered(sums)
    ranks = {plan.place(rank)[1]: rank for rank in range(plan.workers)}.values()
    each = [zip(*(every[rank][step] for rank in ranks), strict=True) for step in range(len(sums))]
    return [sum(totals) / sum(counts) for totals, counts in each]


def _compare(
    reference: Record, plan: Sequence[Record], prepared: Prepared
) -> tuple[tuple[Deviation, ...], tuple[tuple[float, float], ...], float]:
    """How far every tensor is from the reference; per step the losses of both; and the worst error of a loss."""
    gradients = plan[0].gradients
    every = [pair for record in plan for pair in zip(reference.losses, record.losses, strict=True)]
    loss_error = max((abs(a - b) / max(abs(a), 1e-12) for a, b in every), key=_nan_last)
    tied, parameters = prepared.main.graph.tied, set(prepared.main.graph.parameters)
    names = [name for name in reference.state if name not in tied and reference.state[name].numel()]
    grads = {name: g for name in names if (g := reference.gradients.get(name)) is not None}
    grad_floor = FLOOR * max((float(g.abs().max()) for g in grads.values()), default=0.0)
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
    return tuple(deviations), tuple(zip(reference.losses, plan[0].losses, strict=True)), loss_error


def _nan_last(error: float) -> float:
    """For the largest of errors, of which nan is the worst."""
    return error if error == error else math.inf


def _same_bits(held: Sequence[Mapping[str, str]]) -> bool:
    seen: dict[str, str] = {}
    return all(seen.setdefault(name, bits) == bits for worker in held for name, bits in worker.items())
