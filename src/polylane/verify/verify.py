"""Equivalence check: the same training in one process and by the plan on its workers, in float64, then compared.

Both sides run in forked processes, so that the caller's model stays as it is. There are two ways to compare:

* step by step, for all plans that are not asynchronous: each step starts on both sides from the reference's
  state, and the gradients, weights, buffers and optimizer states of each step are compared;
* by replay, for asynchronous parameter servers: the plan trains first, for only its servers know the order of the
  updates, and one process then repeats the recorded updates; for asynchronous pipelines one process repeats the updates
  by the schedule's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.objectives import Init, Objective
from polylane.compile.training_problem import TrainingProblem
from polylane.compile.unusable_modules import refuse_unusable_modules
from polylane.errors import PolylaneError
from polylane.graph.batch import cast_leaves, clone_leaves, flatten, sample_count
from polylane.graph.capture.capture import refuse_failing_loss
from polylane.graph.capture.export import model_restored
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.precision import cast_module, to_float64
from polylane.graph.python_state.compiler import without_compiler
from polylane.graph.python_state.module_copies import copy_module
from polylane.graph.rounding_noise import nudge_values
from polylane.plan.plan import AnyPlan, Plan
from polylane.runtime.parameters.materialize import is_on_meta, materialize
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.threads import threads_per_worker
from polylane.samples.microbatch_limit import captured_samples
from polylane.samples.split_dependence import depends_on_split, describe_split_dependence
from polylane.verify.delayed_replay import replay_delayed
from polylane.verify.first_difference import StepDifference, describe_later_difference, find_first_difference
from polylane.verify.free_run import as_pass, compare_freely, compare_runs, train_freely
from polylane.verify.judgement import Judgement, find_wrong_steps, judge_differences
from polylane.verify.local_sgd_reference import train_local_sgd
from polylane.verify.metrics.metrics_proof import ComparedMetric, compare_metrics
from polylane.verify.record import TOLERANCE, ComparedTraining, ReferenceRun
from polylane.verify.reference import remeasure_floors, train_reference
from polylane.verify.rounding_floor import MeasuredPass, measure_floors
from polylane.verify.server_replay import replay_updates
from polylane.verify.stepwise import ComparedKind, train_stepwise
from polylane.verify.training_state import write_tensors
from polylane.verify.undefined_numbers import refuse_undefined_numbers
from polylane.verify.verdict import Comparison, Deviation, FreeRunDeviation, Verdict
from polylane.verify.whole_graph import run_graph
from polylane.verify.worker_runs import run_on_workers

__all__ = ["TOLERANCE", "Deviation", "FreeRunDeviation", "Verdict", "batch_in_float64", "verify", "verify_compiled"]

_T = TypeVar("_T")


def verify(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[Any],
    plan: str | AnyPlan,
    *,
    clip_norm: float | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    init: Init | None = None,
) -> Verdict:
    """Train on ``batches`` twice, on one worker and by the plan, in float64, and compare.

    Args:
        model: the model to be trained; it is in float64 meanwhile, and not changed: forked processes train it.
        objective: the loss with its optimizer and scheduler.
        batches: whole (global) batches, one for each step.
        plan: how the training is split; its workers are forked here.
        clip_norm: bound on the 2-norm of all gradients; None: gradients are not clipped.
        seed: of dropout and of all other random numbers, the same on both sides.
        tolerance: largest relative error that counts as rounding.
        init: fills the tensors that a module itself owns, for a model on the meta device.

    Raises:
        PolylaneError: there are no batches, the plan does not fit the model, or the model does not run in float64.
        WorkerFailed: an exception ended one of the forked workers.
    """
    if not batches:
        raise PolylaneError("there is no batch to verify with")
    model = without_compiler(model)  # before it is copied, which a compiled one cannot be
    refuse_unusable_modules(model)
    if is_on_meta(model):  # the reference trains all weights in one process
        model = copied_module(model)
        materialize(model, init, seed, torch.device("cpu"), lambda name, tensor: tensor)
    modules = nn.ModuleList([model, *([objective.loss] if isinstance(objective.loss, nn.Module) else [])])
    # The model itself: a copy would lack what refers to its parameters (hooks, optimizers in them, closures).
    with cast_module(modules, torch.float64):
        example = batch_in_float64(batches[0])
        prepared = compile_training(TrainingProblem(model, {objective.name: objective}, example, in_float64=True), plan)
        check_it_runs(prepared, batches[0])
        return verify_compiled(prepared, batches, clip_norm=clip_norm, seed=seed, tolerance=tolerance)


def refuse_failing_dtypes(model: nn.Module, objective: Objective, batch: Any, plan: AnyPlan) -> None:
    """Run one forward pass in the model's and the batch's own dtypes, in which it is to be trained, on a few samples.

    The proof itself casts both to float64, and so hides that they do not go together. A kernel that only the CPU lacks
    is passed over where training may be on an accelerator.

    Args:
        model: the model as the user built it; it is not changed.
        objective: the loss with its optimizer and scheduler.
        batch: a whole batch, in its own dtypes.
        plan: how the training is split, which says how many samples a pass has.

    Raises:
        PolylaneError: the pass fails; the sentence is that of training.
    """
    problem = TrainingProblem(model, {objective.name: objective}, batch)
    try:
        refuse_failing_loss(model, objective.loss, problem.take_batch(captured_samples(plan, problem.samples)))
    except PolylaneError as error:
        # Half precision that the CPU has no kernels for trains on an accelerator, and is proved in float64.
        if "not implemented for" not in str(error.__cause__) or torch.accelerator.current_accelerator() is None:
            raise


def verify_compiled(
    prepared: CompiledTraining,
    batches: Sequence[Any],
    *,
    clip_norm: float | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> Verdict:
    """Compare as :func:`verify` does, for a training that is compiled in float64 already; its model is not changed."""
    refuse_lossy_sync(prepared.plan)
    batches = [batch_in_float64(batch) for batch in batches]
    sizes = [sample_count(flatten(batch)[0]) for batch in batches]
    prepared.min_samples.check(min(sizes), "the shortest batch", "verify fewer steps, or take another batch size")
    prepared.carry_over_layouts(sizes)
    sync = prepared.plan.sync
    proof = _Verification(prepared, batches, clip_norm, seed, tolerance)
    # Every run is in forked processes: each starts from the same weights, and changes only its own copy of them.
    replayed = prepared.plan.is_asynchronous or (sync.has_servers and sync.is_replica_local)
    comparison = proof.compare_replayed() if replayed else proof.compare_stepwise()
    unequal, metrics = _differing_bits(comparison.held), proof.compare_metrics()
    worst = max([comparison.worst, *(metric.error for metric in metrics)])
    return Verdict(
        # Small errors are not enough: workers with the same weight must have the same bits of it, or they diverge.
        passed=worst <= tolerance and not unequal,
        plan=prepared.plan.spec,
        workers=prepared.plan.processes,
        steps=len(batches),
        tolerance=tolerance,
        reference=_describe_reference(comparison.reference, prepared),
        losses=tuple(zip(comparison.reference.losses, comparison.losses, strict=True)),
        loss_error=comparison.loss_error,
        deviations=comparison.deviations,
        worst=worst,
        metrics=tuple(metrics),
        replicas_equal=not unequal,
        culprit=comparison.culprit or (f"every number agrees; the bits of {unequal[0]} do not" if unequal else None),
        undetermined=comparison.undetermined,
        free=comparison.free,
        rule=_describe_rule(prepared.plan),
        microbatches=prepared.plan.microbatches,
        split=describe_split_dependence([prepared.main_partition.graph]) if prepared.plan.microbatches > 1 else "",
        whole_loss=comparison.reference.whole_loss,
    )


class _Verification(ComparedTraining):
    """A comparison of one compiled training: the reference and the plan, each run in forked processes."""

    def _run_in_one_process(self, run: Callable[[], _T]) -> _T:
        """Return the result of ``run`` in one forked process, which has as many threads as each of the plan's workers.

        More threads slow down a small model.
        """
        threads = threads_per_worker(self.prepared.plan.workers)

        def alone(context: WorkerContext) -> _T:
            torch.set_num_threads(threads)
            return run()

        return fork_workers(alone, 1)[0]

    def compare_metrics(self) -> list[ComparedMetric]:
        """Compare the metrics that the first objective has."""
        return compare_metrics(self, self._run_in_one_process)

    def compare_stepwise(self) -> Comparison:
        """Compare each step from the reference's state, which is judged, and a free run of all steps, which is not."""
        run = train_local_sgd if self.prepared.plan.sync.is_replica_local else train_reference
        reference = self._run_in_one_process(lambda: run(self))
        refuse_undefined_numbers(reference)
        # The free run is judged only by its last state: tensors that several workers hold must be equal in every bit.
        workers, free = run_on_workers(
            self, lambda job: train_stepwise(job, self, reference), lambda job: train_freely(job, self.batches)
        )
        # Rank 0 has the loss over all replicas.
        losses = [total / count for total, count in workers[0].losses]
        judgement = judge_differences(self, reference, losses, workers)
        # The first floors come from a few tries and may be too low. Before a step fails, its floors are measured again
        # over more tries: only a difference that these do not explain either is an error.
        if wrong_steps := find_wrong_steps(reference, workers, judgement):
            new_floors = self._run_in_one_process(lambda: remeasure_floors(self, reference, wrong_steps))
            judgement = judge_differences(self, reference, losses, workers, new_floors)
        names = [name for name in reference.state if reference.state[name].numel()]
        undetermined = [
            f"{'gradient of' if kind is ComparedKind.GRADIENT else 'buffer'} {name}"
            for name in names
            for kind in ComparedKind
            if (kind, name) in judgement.undetermined
        ]
        return Comparison(
            reference,
            losses,
            max(judgement.losses),
            _build_deviations(self.prepared, names, judgement),
            [worker.held for worker in free],
            judgement.worst,
            self._find_difference(reference, judgement),
            tuple(undetermined),
            compare_freely(reference, free[0]),
        )

    def _find_difference(self, reference: ReferenceRun, judgement: Judgement) -> str | None:
        """Describe where plan and reference first differ, in the first step in which they do; None where they do not.

        Where replicas have weights of their own (local SGD), no value of theirs is one device's: the description then
        names the tensor that differs and not the first operator.
        """
        prepared, number = self.prepared, judgement.first_wrong_step()
        if number is None and judgement.worst <= self.tolerance:
            return None
        if number is None:  # every step is right; the state that is gathered after the last one is not
            return describe_later_difference(
                prepared, StepDifference(len(self.batches) - 1, averaged=judgement.wrong_in_state())
            )
        if prepared.plan.sync.is_replica_local:
            return describe_later_difference(prepared, judgement.wrong_of_replica(number))
        # The search runs the failing step's passes again, so that the model needs the weights with which that step
        # began.
        restore, model = self.snapshot(), self.tensors
        write_tensors(
            reference.step_of(number, 0).before.tensors,
            {**model.parameters(), **model.buffers()},
            lambda name, tensor: tensor,
        )
        culprit = find_first_difference(self, judgement.wrong_in_step(number))
        restore()
        return culprit

    def compare_replayed(self) -> Comparison:
        """Compare a free run of all steps with a replay of its updates.

        Servers recorded theirs, in their order; in an asynchronous pipeline the schedule says which weights each used.
        """
        prepared, batches = self.prepared, self.batches
        (trained,) = run_on_workers(self, lambda job: train_freely(job, batches))
        workers = trained[: prepared.plan.workers]

        def run() -> ReferenceRun:
            if prepared.plan.is_asynchronous:
                return replay_delayed(self)
            return replay_updates(self, workers[0].updates)

        def again(attempt: int, permuted: bool) -> MeasuredPass:
            restore = self.snapshot()
            nudge_values(prepared.model.parameters(), attempt)
            try:
                return as_pass(run())
            finally:
                restore()

        def measured() -> ReferenceRun:
            once = run()
            return replace(once, floors=measure_floors(as_pass(once), again, self.tolerance, permutes=False))

        reference = self._run_in_one_process(measured)
        refuse_undefined_numbers(reference)
        return compare_runs(self, reference, workers)


def _build_deviations(prepared: CompiledTraining, names: Sequence[str], judgement: Judgement) -> tuple[Deviation, ...]:
    """Return the worst errors of each parameter and buffer, a tied weight once; those of a loss module come last."""
    of = judgement.error_of
    compared = [name for errors in judgement.errors for kind, name, _ in errors if kind is ComparedKind.VALUE]
    untied_names = [
        name for name in dict.fromkeys([*names, *compared]) if name not in prepared.main_partition.graph.tied
    ]
    return tuple(
        Deviation(
            name,
            of(ComparedKind.GRADIENT, name),
            max(of(ComparedKind.VALUE, name) or 0.0, judgement.state.get(name, 0.0)),
            of(ComparedKind.MEMORY, name),
        )
        for name in untied_names
    )


def refuse_lossy_sync(plan: AnyPlan) -> None:
    """Refuse a plan whose gradients are rounded or compressed: that loss cannot be distinguished from an error.

    Raises:
        PolylaneError: gradients travel in a shorter type, or compressed.
    """
    if not plan.sync.is_exact and not plan.sync.is_replica_local:
        words = ",".join(plan.sync.to_words())
        raise PolylaneError(
            f"{words}: gradients lose digits on their way, so that the numbers are not those of one device: leave it "
            "out to prove the rest of the plan"
        )


def _describe_reference(reference: ReferenceRun, prepared: CompiledTraining) -> str:
    """Describe in words what the plan is compared with."""
    plan, code = prepared.plan, prepared.main_partition.graph.code
    subject = "the plain model" if reference.eager else "the model's captured graph, run whole"
    if plan.is_asynchronous:
        return f"{subject}, each batch on the weights that its stages had, in one process"
    if plan.sync.has_servers and plan.sync.is_replica_local:
        return f"{subject}, a copy for each replica and server in one process, in the order that the servers recorded"
    if plan.sync.is_replica_local:
        return f"{subject}, a copy for each replica in one process"
    if plan.microbatches > 1 and depends_on_split(code):
        return f"{subject}, with the plan's microbatches"
    return f"{subject}, on whole batches"


def _describe_rule(plan: Plan) -> str:
    """Return the plan's keys by which it computes other numbers than one device; empty where it does not."""
    if plan.is_asynchronous:
        return f"schedule={plan.schedule}" + ",vertical_sync=yes" * plan.vertical_sync
    return ",".join(plan.sync.to_words()) if plan.sync.is_replica_local else ""


def _differing_bits(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of tensor parts of which two workers hold different bits."""
    first_bits: dict[str, str] = {}
    return [name for worker in digests for name, bits in worker.items() if first_bits.setdefault(name, bits) != bits]


# ---- copies in float64 of what is compared ---------------------------------------------------------------------------


def objective_in_float64(objective: Objective) -> Objective:
    """Return the objective with a copy of its loss in float64, where the loss is a module."""
    if not isinstance(objective.loss, nn.Module):
        return objective
    return replace(objective, loss=to_float64(copied_module(objective.loss)))


def copied_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module.

    Raises:
        PolylaneError: copy.deepcopy failed; the message says what to do.
    """
    try:
        return copy_module(module)
    except Exception as error:  # whatever the user's classes raise when they are copied
        reason = str(error).strip().partition("\n")[0]
        raise PolylaneError(f"the model cannot be copied for a proof, copy.deepcopy says: {reason}") from error


def batch_in_float64(batch: Any) -> Any:
    """Return a copy of a batch with its floating-point numbers in float64."""
    leaves, rebuild = flatten(batch)
    return rebuild(clone_leaves(cast_leaves(leaves, torch.float64)))


def check_it_runs(prepared: CompiledTraining, batch: Any) -> None:
    """Run a batch through the model's graph, since some kernels have no float64: this fails before any worker starts.

    Raises:
        PolylaneError: an operator of the graph raised.
    """
    leaves, _ = flatten(batch_in_float64(batch))
    tensors = ModelTensors(prepared.model, prepared.losses, torch.device("cpu"))
    samples = sample_count(leaves)
    # The run writes buffers such as running statistics.
    try:
        with model_restored(prepared.model, *prepared.losses), torch.no_grad():
            run_graph(prepared.main_partition.graph.code, tensors, leaves, SampleSlice(samples, batch=samples))
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise PolylaneError(f"the model does not run in float64, which a proof needs: {why}") from error
