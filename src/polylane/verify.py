"""The same numbers as one device? The reference in one process against the plan on its workers, in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from polylane.errors import PolylaneError
from polylane.graph.batch import flatten, sample_count
from polylane.graph.export import snapshot
from polylane.graph.precision import to_float64
from polylane.graph.rounding import nudge
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.proof.culprit import Wrong, after_forward, first_difference
from polylane.proof.float64_copies import check_it_runs, copied_module, in_float64, objective_in_float64
from polylane.proof.free_run import as_pass, compare_freely, compare_runs, train_freely
from polylane.proof.judgement import Judgement, judge, wrong_steps
from polylane.proof.record import Reference
from polylane.proof.reference import measured_again, reference_run
from polylane.proof.replay import replay
from polylane.proof.replicated import replicated_run
from polylane.proof.rounding import Pass, measure
from polylane.proof.state import put
from polylane.proof.stepwise import Kind, train_stepwise
from polylane.proof.verdict import Comparison, Deviation, Free, Verdict
from polylane.proof.whole_graph import tells_parts_apart
from polylane.proof.wrong_step import wrong_in_state, wrong_in_step, wrong_of_replica
from polylane.runtime.job import Job
from polylane.runtime.lane import Tensors
from polylane.runtime.launch import Context, fork, threads_per_worker
from polylane.runtime.materialize import Init, materialize, on_meta
from polylane.runtime.prepare import Objective, Prepared, named_parameters, prepare
from polylane.runtime.world import World

__all__ = ["TOLERANCE", "Deviation", "Free", "Verdict", "in_float64", "prove", "verify"]

TOLERANCE = 1e-9

_T = TypeVar("_T")


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
    model, objective = copied_module(model), objective_in_float64(objective)
    if on_meta(model):  # a proof holds it against the whole
        materialize(model, init, seed, torch.device("cpu"), lambda name, whole: whole)
    model = to_float64(model)
    example = in_float64(batches[0])
    prepared = prepare(model, {objective.name: objective}, example, plan, in_float64=True)
    check_it_runs(prepared, batches[0])
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

    def stepwise(self) -> Comparison:
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
        free = self._together(lambda job: train_freely(job, batches))
        names = [name for name in reference.state if reference.state[name].numel()]
        undetermined = [
            f"{'gradient of' if kind is Kind.GRADIENT else 'buffer'} {name}"
            for name in names
            for kind in Kind
            if (kind, name) in judgement.undetermined
        ]
        return Comparison(
            reference,
            losses,
            max(judgement.losses),
            _deviations(prepared, names, judgement),
            [worker.held for worker in free],
            judgement.worst,
            self._culprit(reference, judgement, parameters),
            tuple(undetermined),
            compare_freely(reference, free[0]),
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
            return after_forward(prepared, Wrong(len(self.batches) - 1, averaged=wrong_in_state(judgement, tolerance)))
        if prepared.plan.sync.alone:
            return after_forward(prepared, wrong_of_replica(judgement, number, parameters, tolerance))
        modules = [prepared.model, *(loss for loss in _losses(prepared) if isinstance(loss, nn.Module))]
        restore = snapshot(nn.ModuleList(modules), *_losses(prepared))
        model = Tensors(prepared.model, _losses(prepared), torch.device("cpu"))
        put(reference.at(number, 0).before, {**model.parameters(), **model.buffers()}, lambda name, whole: whole)
        wrong = wrong_in_step(judgement, number, parameters, tolerance)
        culprit = first_difference(prepared, self.batches[number], self.seed, wrong, tolerance)
        restore()
        return culprit

    def replayed(self) -> Comparison:
        """All steps freely, and what servers recorded of them again: in which order, only they know."""
        prepared, batches = self.prepared, self.batches
        workers = self._together(lambda job: train_freely(job, batches))[: prepared.plan.workers]

        def run() -> Reference:
            return replay(prepared, batches, workers[0].updates, clip_norm=self.clip_norm, seed=self.seed)

        def again(attempt: int, permuted: bool) -> Pass:
            restore = snapshot(prepared.model, *_losses(prepared))
            nudge(prepared.model.parameters(), attempt)
            try:
                return as_pass(run())
            finally:
                restore()

        def measured() -> Reference:
            once = run()
            return replace(once, floors=measure(as_pass(once), again, self.tolerance, permutes=False))

        return compare_runs(self._alone(measured), workers, prepared, self.tolerance)


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


def _other_bits(held: Sequence[Mapping[str, str]]) -> list[str]:
    """What some worker holds other bits of than one before it."""
    seen: dict[str, str] = {}
    return [name for worker in held for name, bits in worker.items() if seen.setdefault(name, bits) != bits]
