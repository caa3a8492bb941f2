"""Start of a prepared script's training: its tape and optimizers as a problem, compiled for the plan of all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polylane.auto.on_workers import resolve_plan
from polylane.auto.parallelize import compile_for, start_job
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.diagnosis.page_layout import Phase
from polylane.errors import PolylaneError, format_plural
from polylane.output import say_at_once
from polylane.plan.fixed_keys import parse_auto
from polylane.plan.plan import AnyPlan
from polylane.plan.plan_file import load_or_parse
from polylane.probe.machine import available_memory
from polylane.runtime.workers.launch_environment import is_launched
from polylane.runtime.workers.world import World
from polylane.schedule.schedules import ASYNCHRONOUS
from polylane.script.loading.input_layout import UNDIVIDED, BatchDim, TapeLayout, try_layouts
from polylane.script.role import ScriptJob
from polylane.script.tape import Tape, replay_tape
from polylane.verify.audit import AuditMode
from polylane.verify.audit.audit_start import MEMORY_SHARE, describe_rounded_gradients
from polylane.verify.audit.passes_audit import PassesAudit
from polylane.verify.audit.step_replay import read_rounding

Predict = Callable[[TrainingProblem, CompiledTraining], None]
AUDIT_COPIES = 6  # of the weights, where a step is computed on whole ones: gathered twice, kept, and gradients


def read_plan(plan: str | AnyPlan, world: World, is_alone: bool = False) -> str | AnyPlan:
    """Return a script's plan, read from its line; one that is to be found stays as it is.

    Args:
        plan: a plan in one line, a plan, its file, or "auto".
        world: this worker among all workers.
        is_alone: whether one worker may compute what the plan gives to several.

    Raises:
        PolylaneError: it cannot be read, takes another number of workers, or updates weights at other times than a
            script does.
    """
    if isinstance(plan, str) and parse_auto(plan) is not None:
        return plan
    fixed = load_or_parse(plan) if isinstance(plan, str) else plan
    if fixed.processes != world.size and not (is_alone and world.size == 1):
        count = fixed.processes
        raise PolylaneError(
            f"the plan takes {format_plural(count, 'worker')}, and this script runs on {world.size}: start it with "
            f"polylane run --workers {count}, or torchrun --nproc-per-node {count}"
        )
    _refuse_other_updates(fixed)
    return fixed


def start_script(
    world: World,
    models: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    tape: Tape,
    inputs: Sequence[Tensor],
    plan: str | AnyPlan,
    batch_dim: BatchDim | None = None,
    audit: AuditMode = "auto",
    predict: Predict | None = None,
) -> tuple[ScriptJob, TapeLayout, PassesAudit]:
    """Return this worker's job of a script, where the tape's inputs have their samples, and audits; collective.

    Args:
        world: this worker among all workers.
        models: the script's models as one.
        optimizers: the optimizers of the script.
        tape: one that all that is trained takes part in.
        inputs: what the script gives to it.
        plan: a plan in one line, a plan, or "auto".
        batch_dim: what the script says of where its tensors have the samples; None: nothing.
        audit: whether some steps are computed a second time, and what follows from a difference.
        predict: predicts the training on this worker, while the others wait; None: nobody does.

    Raises:
        NotDivided: what the script computes before it calls a model may be why batches are not divided.
        PolylaneError: the plan updates weights at other times than the script does, or does not fit.
    """
    optimizer: Any = optimizers[0] if len(optimizers) == 1 else list(optimizers)
    with torch.enable_grad():
        of_tape = build_objectives(replay_tape, optimizer, None)
        fixed = load_or_parse(plan) if isinstance(plan, str) and parse_auto(plan) is None else plan
        planned_parts = 1 if isinstance(fixed, str) else max(fixed.data, fixed.microbatches or 1)

        def compile_layout(layout: TapeLayout, must_divide: bool = False) -> tuple[TrainingProblem, CompiledTraining]:
            # Of a batch that is one sample every part computes that one.
            rows = planned_parts if layout == UNDIVIDED else None
            example, device = tape.make_batch(layout, inputs), world.accelerator
            problem = TrainingProblem(
                models, of_tape, example, rows, device=device, keeps_whole_numbers=True, must_divide=must_divide
            )
            return problem, compile_for(world, problem, resolve_plan(world, problem, fixed), alone=True)

        layouts, reads_batches = tape.propose_layouts(inputs, batch_dim), tape.reads_batches
        of_layout = partial(compile_layout, must_divide=len(layouts) > 1 or reads_batches)
        attempts = [(layout, partial(of_layout, layout)) for layout in layouts]
        # Where the samples meet in the loss itself, replicas split the operators of a batch instead.
        plain = [layout for layout in layouts if layout.is_plain]
        if not reads_batches and (len(layouts) > 1 or not plain):
            attempts += [(layout, partial(compile_layout, layout)) for layout in (*plain, UNDIVIDED)]
        layout, (problem, compiled) = try_layouts(attempts, planned_parts > 1, tape.line, reads_batches)
        _refuse_other_updates(compiled.plan)
        _predict(predict, world, problem, compiled)
        note = describe_rounded_gradients(compiled.plan) or _why_no_audit(world, models)
        tolerance = read_rounding(compiled, world.device).tolerance
        job = start_job(ScriptJob, world, compiled, "off", example=tape.make_batch(layout, inputs))
    note = next(filter(None, job.worker.exchange(note)), "")  # a worker of a host with less memory counts for all
    say = say_at_once if is_launched() and world.rank == 0 else (lambda sentence: None)  # commands say it at the end
    return job, layout, PassesAudit(audit, job.worker.exchange, str(compiled.plan.spec), tolerance, note, say)


def _predict(predict: Predict | None, world: World, problem: TrainingProblem, compiled: CompiledTraining) -> None:
    """Have a training of several workers predicted on the worker that is asked to."""
    if predict is not None and compiled.plan.workers > 1:
        with world.progress.during(Phase.COMPILING):
            predict(problem, compiled)


def _why_no_audit(world: World, models: nn.Module) -> str:
    """Return why this worker cannot compute a step on whole weights beside its own; "" where it can."""
    weights = sum(tensor.nbytes for tensor in (*models.parameters(), *models.buffers()))
    if world.device.type == "cpu":
        needed, free = AUDIT_COPIES * weights * world.size, available_memory()  # if all workers are on this host
    else:
        needed, free = AUDIT_COPIES * weights, torch.accelerator.get_memory_info(world.device)[0]
    if needed <= MEMORY_SHARE * free:
        return ""
    return f"a step on whole weights takes {needed >> 20:,} MiB, and {free >> 20:,} MiB are free on {world.device}"


def _refuse_other_updates(plan: AnyPlan) -> None:
    """Refuse what updates weights at other times than a script's loop does."""
    word = f"schedule={plan.schedule}" if plan.schedule in ASYNCHRONOUS else ""
    word = word or ("servers=" if plan.sync.has_servers else "every=" if plan.sync.is_replica_local else "")
    if word:
        raise PolylaneError(
            f"plan: {word} updates weights at other times than a script's loop, whose optimizer steps after "
            "backward(): leave it out, or train by job.step of polylane.parallelize"
        )
