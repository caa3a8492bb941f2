"""Proof of resuming: N steps against half of them, a checkpoint, fresh workers, and the other half.

    unbroken     step 1   step 2   step 3   step 4                                  -> checkpoint A
    broken       step 1   step 2   save
    resumed                        load     step 3   step 4     by the same plan    -> B: every bit of A
    elsewhere                      load     step 3   step 4     by another plan     -> C: equal to A up to rounding

Checkpoints are saved and loaded by the job's own methods, as in a training. They hold all that determines how training
continues, and so they are what is compared. Batches are read by the job, too: those after the checkpoint come in the
order of the unbroken training, from its position in the epoch or in a stream.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polylane.checkpoint.store import open_checkpoint
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.objectives import Init, Objective
from polylane.compile.training_problem import TrainingProblem
from polylane.compile.unusable_modules import refuse_unusable_modules
from polylane.errors import PolylaneError
from polylane.graph.precision import to_float64
from polylane.graph.python_state.compiler import without_compiler
from polylane.graph.python_state.random_generators import generator_states, restore_generators
from polylane.plan.plan import AnyPlan, Plan
from polylane.plan.spec import Spec
from polylane.runtime.job import Job
from polylane.runtime.parameters.materialize import is_on_meta, materialize
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.verify.record import TOLERANCE
from polylane.verify.resuming.compare_checkpoints import CheckpointDifference, compare_bits, compare_values
from polylane.verify.resuming.training_data import TrainingData
from polylane.verify.rounding_floor import divide_by_scale
from polylane.verify.verify import batch_in_float64, check_it_runs, copied_module, objective_in_float64

FLOORS = 100.0  # a difference of so many times that of two unbroken runs is rounding, as in the other proofs


@dataclass(frozen=True)
class ResumeVerdict:
    """Whether a training that resumes from a checkpoint equals the unbroken one.

    Attributes:
        passed: whether the resumed training equals the unbroken one.
        plan: the plan that saved.
        workers: number of its processes.
        steps: steps of the unbroken training.
        saved_step: step at which the other one was interrupted.
        losses: (unbroken, resumed) loss of every step after the checkpoint, by the same plan.
        same_plan: how the states in the end differ.
        other: the other plan that resumes from the checkpoint; "" for none.
        other_losses: (unbroken, resumed) loss of every step after the checkpoint, by the other plan.
        worst: largest relative error of a loss or tensor by the other plan.
        worst_name: which one that is; "" for none.
        undetermined: those that differ as much where both plans train without a break: rounding decides them.
        tolerance: largest relative error that is allowed there.
        culprit: the first loss or tensor that differs; "" where none does.
    """

    passed: bool
    plan: str
    workers: int
    steps: int
    saved_step: int
    losses: tuple[tuple[float, float], ...]
    same_plan: CheckpointDifference
    other: str
    other_losses: tuple[tuple[float, float], ...]
    worst: float
    worst_name: str
    undetermined: tuple[str, ...]
    tolerance: float
    culprit: str

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return asdict(self)


def verify_resumed(
    model: nn.Module,
    objective: Objective,
    data: TrainingData,
    plan: str | AnyPlan,
    other_plan: str | AnyPlan | None = None,
    *,
    clip_norm: float | None = None,
    seed: int = 0,
    init: Init | None = None,
) -> ResumeVerdict:
    """Train without a break and with one, in float64, and compare.

    Args:
        model: the model to be trained; it is copied, not changed.
        objective: the loss with its optimizer and scheduler; a loss that is a module is copied.
        data: what is trained on, for at least two steps.
        plan: how the training is split; its workers are forked here.
        other_plan: another plan that resumes from the same checkpoint, by default with as many microbatches; None: the
            same plan alone.
        clip_norm: bound on the 2-norm of all gradients; None: gradients are not clipped.
        seed: of dropout and of all other random numbers.
        init: fills the tensors that a module itself owns, for a model on the meta device.

    Raises:
        PolylaneError: there are too few steps, a plan does not fit the model or cannot be repeated, or a checkpoint
            cannot be saved or loaded.
        WorkerFailed: an exception ended one of the forked workers.
    """
    if data.steps < 2:
        raise PolylaneError("--resume: a training is interrupted after half of its steps: give --steps 2 or more")
    model = without_compiler(model)
    refuse_unusable_modules(model)
    model, objective = copied_module(model), objective_in_float64(objective)
    # Here, once: both trainings and both plans begin with the same weights.
    if is_on_meta(model):
        materialize(model, init, seed, torch.device("cpu"), lambda name, tensor: tensor)
    problem = TrainingProblem(
        to_float64(model), {objective.name: objective}, batch_in_float64(data.example), in_float64=True
    )
    prepared = compile_training(problem, plan)
    check_it_runs(prepared, data.example)
    if isinstance(other_plan, Spec) and other_plan.microbatches is None:  # batch statistics are those of microbatches
        other_plan = replace(other_plan, microbatches=prepared.plan.microbatches)
    elsewhere = None if other_plan is None else compile_training(problem, other_plan)
    for training in (prepared, *([elsewhere] if elsewhere else [])):
        _refuse_unrepeatable(training.plan, alone=elsewhere is None)
    with tempfile.TemporaryDirectory(prefix="polylane-verify-") as folder:
        return _compare(prepared, elsewhere, data, clip_norm, seed, Path(folder))


def _refuse_unrepeatable(plan: Plan, alone: bool) -> None:
    """Refuse plans that do not give the same numbers twice; with another plan, all whose numbers are their own."""
    if plan.sync.has_servers and plan.sync.is_replica_local:
        raise PolylaneError(
            f"--resume: {','.join(plan.sync.to_words())}: replicas that do not wait for each other update in another "
            "order each time, so that no two runs are equal: prove the rest of the plan without servers"
        )
    if not alone and (plan.is_asynchronous or plan.sync.is_replica_local or not plan.sync.is_exact):
        raise PolylaneError(
            f"--resume-plan: {plan.spec} has numbers of its own, which another plan does not have: leave out "
            "--resume-plan, or what makes it so (every=, compress=, wire=, asynchronous schedules)"
        )


def _compare(
    prepared: CompiledTraining,
    elsewhere: CompiledTraining | None,
    data: TrainingData,
    clip_norm: float | None,
    seed: int,
    root: Path,
) -> ResumeVerdict:
    half, steps = data.steps // 2, data.steps
    # Saving ends the batches under way in an asynchronous pipeline: there the unbroken run saves as well.
    also = half if prepared.plan.is_asynchronous else 0
    # The generators' states too: the user's own code may draw from them, and every run begins with the same.
    arguments = (data, clip_norm, seed, generator_states())
    unbroken = _train(prepared, *arguments, None, root / "unbroken", also)[half:]
    _train(prepared, data.first_steps(half), *arguments[1:], None, root / "broken")
    resumed = _train(prepared, *arguments, root / "broken", root / "resumed")
    expected = open_checkpoint(root / "unbroken")[0]
    difference = compare_bits(expected, open_checkpoint(root / "resumed")[0])
    losses = tuple(zip(unbroken, resumed, strict=True))
    culprit = _first_loss(losses, half) or difference.first
    other_losses, errors, undetermined = tuple[tuple[float, float], ...](), dict[str, float](), tuple[str, ...]()
    if elsewhere is not None:
        moved = _train(elsewhere, *arguments, root / "broken", root / "moved")
        other_losses = tuple(zip(unbroken, moved, strict=True))
        errors = _errors(other_losses, half, expected, root / "moved")
        if not max(errors.values()) <= TOLERANCE:  # not ``>``: NaN exceeds it as well
            # Some optimizers amplify rounding (Adam divides a gradient by its own size). An error that the two plans
            # show without a checkpoint as well is not the checkpoint's.
            straight = _train(elsewhere, *arguments, None, root / "straight")[half:]
            floors = _errors(tuple(zip(unbroken, straight, strict=True)), half, expected, root / "straight")
            undetermined = tuple(n for n, error in errors.items() if TOLERANCE < error <= FLOORS * floors[n])
            errors = {name: error for name, error in errors.items() if name not in undetermined}
        culprit = culprit or next((name for name, error in errors.items() if not error <= TOLERANCE), "")
    worst = max(errors, key=lambda name: errors[name], default="")
    return ResumeVerdict(
        passed=not culprit,
        plan=prepared.plan.spec,
        workers=prepared.plan.processes,
        steps=steps,
        saved_step=half,
        losses=losses,
        same_plan=difference,
        other="" if elsewhere is None else elsewhere.plan.spec,
        other_losses=other_losses,
        worst=errors.get(worst, 0.0),
        worst_name=worst,
        undetermined=undetermined,
        tolerance=TOLERANCE,
        culprit=culprit,
    )


def _errors(losses: Sequence[tuple[float, float]], half: int, expected: Path, folder: Path) -> dict[str, float]:
    loss_errors = {
        f"the loss of step {half + i + 1}": divide_by_scale(abs(a - b), abs(a)) for i, (a, b) in enumerate(losses)
    }
    return loss_errors | compare_values(expected, open_checkpoint(folder)[0])


def _first_loss(losses: Sequence[tuple[float, float]], half: int) -> str:
    # By their digits: equal NaN are equal.
    wrong = (f"the loss of step {half + i + 1}" for i, (a, b) in enumerate(losses) if repr(a) != repr(b))
    return next(wrong, "")


def _train(
    prepared: CompiledTraining,
    data: TrainingData,
    clip_norm: float | None,
    seed: int,
    generators: tuple[Any, ...],
    start: Path | None,
    folder: Path,
    also: int = 0,
) -> list[float]:
    """Train on fresh workers, and save a checkpoint in the end; return the loss of each step.

    Args:
        prepared: the training, compiled for a plan.
        data: what is trained on up to the last step; a resumed run skips what came before its checkpoint.
        clip_norm: bound on the 2-norm of all gradients, or None.
        seed: of all random numbers that belong to samples.
        generators: states of this process's generators, with which every worker begins.
        start: folder with the checkpoint to resume from; None: from the beginning.
        folder: folder that the checkpoint is saved into.
        also: a step after which a checkpoint is saved as well; 0 for none.
    """

    def work(context: WorkerContext) -> list[float]:
        restore_generators(generators)
        example = batch_in_float64(data.example)
        job = Job(prepared, World.join(), example=example, clip_norm=clip_norm, seed=seed)
        if start is not None:
            job.load_checkpoint(start)
        losses = []
        for batch in data.batches_of(job):
            losses.append(job.step(batch).loss)
            if job.position.step == also:
                job.save_checkpoint(folder)
        job.save_checkpoint(folder)
        job.close()
        return losses

    return fork_workers(work, prepared.plan.processes)[0]
