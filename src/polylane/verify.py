"""The same numbers as one device? The reference in one process against the plan on its workers, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import cloned, flatten, promoted, sample_count
from polylane.graph.export import snapshot
from polylane.graph.part import Part
from polylane.graph.precision import to_float64
from polylane.graph.rounding import apart, nudge, size
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.proof.culprit import Wrong, after_forward, first_difference
from polylane.proof.judgement import Judgement, judge, wrong_steps
from polylane.proof.reference import Record, Reference, measured_again, reference_run, run_whole, tells_parts_apart
from polylane.proof.relative import determined, over, relative_error, scale_of
from polylane.proof.replay import replay
from polylane.proof.replicated import replicated_run
from polylane.proof.rounding import Pass, measure
from polylane.proof.state import put
from polylane.proof.stepwise import Kind, What, train_stepwise
from polylane.runtime.job import Job
from polylane.runtime.lane import Tensors
from polylane.runtime.launch import Context, fork, threads_per_worker
from polylane.runtime.materialize import Init, materialize, on_meta
from polylane.runtime.prepare import Objective, Prepared, named_parameters, prepare
from polylane.runtime.sync.server_log import Update
from polylane.runtime.weights import digest
from polylane.runtime.world import World

TOLERANCE = 1e-9

_T = TypeVar("_T")
_LOSSES = ""  # no parameter or buffer has that name


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from the reference.

    Attributes:
        name: the parameter or buffer.
        gradient: worst relative error of its gradient in any step, None where it has none.
        value: worst relative error of the tensor itself after any step, each begun where the reference began it.
        memory: worst relative error of its optimizer's state after any step, None where it has none.
    """

    name: str
    gradient: float | None
    value: float
    memory: float | None = None

    @property
    def worst(self) -> float:
        """The largest; nan counts as inf."""
        return max(map(_nan_last, (self.value, self.gradient or 0.0, self.memory or 0.0)))


@dataclass(frozen=True)
class Free:
    """All steps run once more, each from where the plan's own last one had ended. Told, not judged.

    What an optimizer makes of gradients that are zero but for rounding goes on from step to step here.

    Attributes:
        loss_error: worst relative error of a loss.
        worst: largest error of a weight or buffer after the last step, relative to its own size.
        name: of that weight or buffer; "" where there is no difference.
    """

    loss_error: float
    worst: float
    name: str


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
        culprit: where the two part ways: the first node in graph order whose value differs, or a sentence; or None.
        undetermined: gradients and buffers that are rounding and nothing else: the reference itself, with its sums in
            another order, does not find them again. They are neither equal nor unequal, unless the plan's are far
            outside of what rounding makes of them.
        free: the steps run freely, or None where that is what was judged.
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
    undetermined: tuple[str, ...] = ()
    free: Free | None = None
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
    sync = prepared.plan.sync
    proof = _Proof(prepared, batches, clip_norm, seed, tolerance)
    # All are forked: what they do to the model stays with them, and they start from the same weights.
    found = proof.replayed() if sync.serves and sync.alone else proof.stepwise()
    unequal = _other_bits(found.held)
    return Verdict(
        passed=found.worst <= tolerance and not unequal,
        plan=prepared.plan.spec,
        workers=prepared.plan.processes,
        steps=len(batches),
        tolerance=tolerance,
        reference=_reference(found.reference, prepared),
        losses=tuple(zip(found.reference.losses, found.losses, strict=True)),
        loss_error=found.loss_error,
        deviations=found.deviations,
        worst=found.worst,
        replicas_equal=not unequal,
        culprit=found.culprit or (f"every number agrees; the bits of {unequal[0]} do not" if unequal else None),
        undetermined=found.undetermined,
        free=found.free,
        rule=",".join(sync.words()) if sync.alone else "",
    )


@dataclass(frozen=True)
class _Found:
    """What a proof came to; see :class:`Verdict`."""

    reference: Reference
    losses: Sequence[float]
    loss_error: float
    deviations: tuple[Deviation, ...]
    held: Sequence[Mapping[str, str]]
    worst: float
    culprit: str | None = None
    undetermined: tuple[str, ...] = ()
    free: Free | None = None


@dataclass(frozen=True)
class _Proof:
    """Runs of both sides, each in processes of its own."""

    prepared: Prepared
    batches: Sequence[Any]
    clip_norm: float | None
    seed: int
    tolerance: float

    def _alone(self, run: Callable[[], _T]) -> _T:
        """In one process, with as many threads as each of the plan's: more of them slow down a small model."""
        threads = threads_per_worker(self.prepared.plan.workers)

        def alone(context: Context) -> _T:
            torch.set_num_threads(threads)
            return run()

        return fork(alone, 1)[0]

    def _together(self, run: Callable[[Job], _T]) -> list[_T]:
        """On every process of the plan."""

        def together(context: Context) -> _T:
            job = Job(self.prepared, World.join(), example=self.batches[0], clip_norm=self.clip_norm, seed=self.seed)
            result = run(job)
            job.close()
            return result

        return fork(together, self.prepared.plan.processes)

    def stepwise(self) -> _Found:
        """Every step from the reference's state, judged; and all of them freely, told."""
        prepared, batches, tolerance = self.prepared, self.batches, self.tolerance
        how: dict[str, Any] = {"clip_norm": self.clip_norm, "seed": self.seed, "tolerance": tolerance}
        run: Any = replicated_run if prepared.plan.sync.alone else reference_run
        reference = self._alone(lambda: run(prepared, batches, **how))
        workers = self._together(lambda job: train_stepwise(job, prepared, batches, reference))
        losses = [total / count for total, count in workers[0].losses]
        parameters = {name for name, _ in named_parameters(prepared.model, _losses(prepared))}
        judgement = judge(reference, losses, workers, parameters, tolerance)
        if where := wrong_steps(reference, workers, judgement, tolerance):
            more = self._alone(lambda: measured_again(prepared, batches, reference, where, **how))
            judgement = judge(reference, losses, workers, parameters, tolerance, more)
        free = self._together(lambda job: _train(job, batches))
        names = [name for name in reference.state if reference.state[name].numel()]
        undetermined = [
            f"{'gradient of' if kind is Kind.GRADIENT else 'buffer'} {name}"
            for name in names
            for kind in Kind
            if (kind, name) in judgement.undetermined
        ]
        return _Found(
            reference,
            losses,
            max(judgement.losses),
            _deviations(prepared, names, judgement),
            [worker.held for worker in free],
            judgement.worst,
            self._culprit(reference, judgement, parameters),
            tuple(undetermined),
            _free(reference, free[0]),
        )

    def _culprit(self, reference: Reference, judgement: Judgement, parameters: Collection[str]) -> str | None:
        """Where the two part ways in the first step in which they do; None where they do not.

        Where replicas go apart, no value of theirs is one device's: what differs is named, not the first value.
        """
        prepared, tolerance = self.prepared, self.tolerance
        number = judgement.first_wrong(tolerance)
        if number is None and judgement.worst <= tolerance:
            return None
        if number is None:  # but what the plan puts together after the last of them
            return after_forward(prepared, Wrong(len(self.batches) - 1, averaged=_wrong_state(judgement, tolerance)))
        if prepared.plan.sync.alone:
            return after_forward(prepared, _wrong_apart(judgement, number, parameters, tolerance))
        modules = [prepared.model, *(loss for loss in _losses(prepared) if isinstance(loss, nn.Module))]
        restore = snapshot(nn.ModuleList(modules), *_losses(prepared))
        model = Tensors(prepared.model, _losses(prepared), torch.device("cpu"))
        put(reference.at(number, 0).before, {**model.parameters(), **model.buffers()}, lambda name, whole: whole)
        wrong = _wrong(judgement, number, parameters, tolerance)
        culprit = first_difference(prepared, self.batches[number], self.seed, wrong, tolerance)
        restore()
        return culprit

    def replayed(self) -> _Found:
        """All steps freely, and what servers recorded of them again: in which order, only they know."""
        prepared, batches = self.prepared, self.batches
        workers = self._together(lambda job: _train(job, batches))[: prepared.plan.workers]

        def run() -> Reference:
            return replay(prepared, batches, workers[0].updates, clip_norm=self.clip_norm, seed=self.seed)

        def again(attempt: int, permuted: bool) -> Pass:
            restore = snapshot(prepared.model, *_losses(prepared))
            nudge(prepared.model.parameters(), attempt)
            try:
                return _as_pass(run())
            finally:
                restore()

        def measured() -> Reference:
            once = run()
            return replace(once, floors=measure(_as_pass(once), again, self.tolerance, permutes=False))

        return _held_against(self._alone(measured), workers, prepared, self.tolerance)


def _as_pass(run: Record) -> Pass:
    """A whole run in the place of a step: gradients are of the first one, losses of all of them a tensor."""
    gradients = {name: gradient for name, gradient in run.gradients.items() if gradient is not None}
    return Pass(0.0, gradients, {**run.state, _LOSSES: torch.tensor(run.losses, dtype=torch.float64)})


def _held_against(reference: Reference, workers: Sequence[_Trained], prepared: Prepared, tolerance: float) -> _Found:
    """A whole run against a whole run."""
    floors, first = reference.floors, workers[0].record
    scales = [scale_of(abs(loss), floors.buffers.get(_LOSSES, 0.0), tolerance) for loss in reference.losses]
    pairs = [zip(reference.losses, worker.record.losses, scales, strict=True) for worker in workers]
    errors = [
        max(each) for each in zip(*([over(_nan_last(abs(a - b)), s) for a, b, s in p] for p in pairs), strict=True)
    ]
    loss_error = max(errors)
    deviations, undetermined = list[Deviation](), list[str]()
    for name, value in reference.state.items():
        if name in prepared.main.graph.tied or not value.numel():
            continue
        error, expected, got = None, reference.gradients.get(name), first.gradients.get(name)
        if expected is not None or got is not None:
            own, other = (torch.zeros_like(value) if each is None else each for each in (expected, got))
            floor = floors.gradients.get(name, 0.0)
            error = over(apart(own, other), scale_of(size(own), floor, tolerance))
            undetermined += [] if determined(size(own), floor) else [f"gradient of {name}"]
        floor = floors.buffers.get(name, 0.0)
        scale = scale_of(size(value), floor, tolerance)
        deviations.append(Deviation(name, error, over(apart(value, first.state[name]), scale)))
        undetermined += [] if determined(size(value), floor) else [name]
    return _Found(
        reference=reference,
        losses=first.losses,
        loss_error=loss_error,
        deviations=tuple(deviations),
        held=[worker.held for worker in workers],
        worst=max((loss_error, *(each.worst for each in deviations))),
        culprit=_culprit_replayed(prepared, deviations, errors, tolerance),
        undetermined=tuple(undetermined),
    )


def _culprit_replayed(
    prepared: Prepared, deviations: Sequence[Deviation], losses: Sequence[float], tolerance: float
) -> str | None:
    """What differs first, where whole runs are compared: a gradient of the first step, a loss, a weight in the end."""
    gradients = {each.name for each in deviations if not (each.gradient or 0.0) <= tolerance}
    state = {each.name for each in deviations if not each.value <= tolerance}
    step = next((number for number, error in enumerate(losses) if not error <= tolerance), None)
    if gradients:
        return after_forward(prepared, Wrong(gradients=gradients))
    if step is not None:
        return f"step {step + 1}: the loss of all replicas is the first number that differs"
    return after_forward(prepared, Wrong(len(losses) - 1, averaged=state)) if state else None


def _deviations(prepared: Prepared, names: Sequence[str], judgement: Judgement) -> tuple[Deviation, ...]:
    """Per parameter and buffer; tensors of a loss module, which are compared as well, come last."""
    of = judgement.of
    compared = [name for errors in judgement.errors for kind, name, _ in errors if kind is Kind.VALUE]
    every = [name for name in dict.fromkeys([*names, *compared]) if name not in prepared.main.graph.tied]
    return tuple(
        Deviation(
            name,
            of(Kind.GRADIENT, name),
            max(of(Kind.VALUE, name) or 0.0, judgement.state.get(name, 0.0)),
            of(Kind.MEMORY, name),
        )
        for name in every
    )


def _free(reference: Reference, trained: _Trained) -> Free:
    pairs = zip(reference.losses, trained.record.losses, strict=True)
    loss_error = max(over(_nan_last(abs(a - b)), abs(a)) for a, b in pairs)
    errors = {name: relative_error(value, trained.record.state[name]) for name, value in reference.state.items()}
    name = max(errors, key=lambda each: errors[each], default="")
    worst = errors.get(name, 0.0)
    return Free(loss_error, worst, name if worst else "")


def _wrong_apart(judgement: Judgement, number: int, parameters: Collection[str], tolerance: float) -> Wrong:
    """What of a step differs where replicas go apart: of the first of them of which something does.

    What is right after its update, and wrong after the step, is what replicas agree on.
    """
    each = judgement.replicas[number]
    differ = [{what for what, error in errors.items() if not error <= tolerance} for errors in each]
    replica = next((number for number, found in enumerate(differ) if found), None)
    if replica is None:
        return _wrong(judgement, number, parameters, tolerance)
    wrong = differ[replica]
    names = {kind: {name for own, name, _ in wrong if own is kind} for kind in Kind}
    weights = names[Kind.VALUE] & set(parameters)
    updated = any(kind is Kind.UPDATE for kind, *_ in each[replica])
    averaged = weights - names[Kind.UPDATE] if updated else set()
    buffers = names[Kind.VALUE] - set(parameters)
    return replace(
        _wrong(judgement, number, parameters, tolerance, wrong),
        updates=names[Kind.UPDATE] if updated else weights,
        buffers=() if averaged else buffers,  # they are agreed on with the weights
        averaged=averaged | buffers if averaged else (),
        replica=replica if len(each) > 1 else None,
    )


def _wrong_state(judgement: Judgement, tolerance: float) -> set[str]:
    return {name for name, error in judgement.state.items() if not error <= tolerance}


def _wrong(
    judgement: Judgement,
    number: int,
    parameters: Collection[str],
    tolerance: float,
    wrong: Collection[What] | None = None,
) -> Wrong:
    """What of a step differs: ``wrong``, or what does of any replica's."""
    if wrong is None:
        wrong = {what for what, error in judgement.errors[number].items() if not error <= tolerance}
    values = {name for kind, name, _ in wrong if kind is Kind.VALUE}
    return Wrong(
        number,
        {name for kind, name, _ in wrong if kind is Kind.GRADIENT},
        values - set(parameters),
        values & set(parameters),
        {name: key for kind, name, key in wrong if kind is Kind.MEMORY},
        not judgement.losses[number] <= tolerance,
    )


def _losses(prepared: Prepared) -> list[Any]:
    return [objective.loss for objective in prepared.objectives.values()]


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


def _reference(reference: Reference, prepared: Prepared) -> str:
    """What the plan was held against, in words."""
    plan, code = prepared.plan, prepared.main.graph.code
    what = "the plain model" if reference.eager else "the model's captured graph, run whole"
    if plan.sync.serves and plan.sync.alone:
        return f"{what}, a copy for each replica and server in one process, in the order that the servers recorded"
    if plan.sync.alone:
        return f"{what}, a copy for each replica in one process"
    if plan.microbatches > 1 and tells_parts_apart(code):
        return f"{what}, with the plan's microbatches"
    return f"{what}, on whole batches"


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
        updates: of every parameter server.
    """

    record: Record
    held: dict[str, str]
    updates: tuple[tuple[Update, ...], ...]


def _train(job: Job, batches: Sequence[Any]) -> _Trained:
    sums, gradients = list[tuple[float, float]](), dict[str, Tensor | None]()
    for batch in batches:
        sums.append(job.step(batch).sums)
        if len(sums) == 1:
            whole = job.whole_gradients()
            gradients = whole if job.world.rank == 0 else {}
    job.gathered(None)  # all have ended, before anybody looks at what a server holds
    trains = job.world.rank < job.plan.workers
    own = f" of replica {job.plan.place(job.world.rank)[1]}" if job.plan.sync.alone and trains else ""
    held = {name + job.part_of(name) + own: digest(tensor) for name, tensor in job.held().items()}
    losses = _whole_losses(job, sums)
    state = job.state_dict()
    return _Trained(Record(losses, gradients, state if job.world.rank == 0 else {}), held, job.updates())


def _whole_losses(job: Job, sums: Sequence[tuple[float, float]]) -> list[float]:
    """The loss of every step over all replicas, of which each may know its own only."""
    plan = job.plan
    if not (plan.sync.serves and plan.sync.alone):
        return [total / count for total, count in sums]
    every = job.gathered(sums)
    ranks = {plan.place(rank)[1]: rank for rank in range(plan.workers)}.values()
    each = [zip(*(every[rank][step] for rank in ranks), strict=True) for step in range(len(sums))]
    return [sum(totals) / sum(counts) for totals, counts in each]


def _nan_last(error: float) -> float:
    """For the largest of errors, of which nan is the worst."""
    return error if error == error else math.inf


def _other_bits(held: Sequence[Mapping[str, str]]) -> list[str]:
    """What some worker holds other bits of than one before it."""
    seen: dict[str, str] = {}
    return [name for worker in held for name, bits in worker.items() if seen.setdefault(name, bits) != bits]
