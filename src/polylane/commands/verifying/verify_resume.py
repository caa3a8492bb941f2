"""``polylane verify --resume``: compare a training that goes on from a checkpoint with the unbroken one."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from polylane.commands import user_inputs as inputs
from polylane.commands.printing import console, print_json
from polylane.errors import format_plural
from polylane.plan.sync import PowerSGDOptions, SyncOptions

if TYPE_CHECKING:
    from polylane.commands.requests import VerifyRequest
    from polylane.plan.plan import AnyPlan
    from polylane.verify.resuming.resumed_run import ResumeVerdict


def run(request: VerifyRequest, plan: AnyPlan) -> bool:
    """Compare the two trainings, print the outcome, and return whether they are equal.

    Args:
        request: the options of the command line.
        plan: the plan that saves, as it was chosen.

    Raises:
        PolylaneError: an option, the recipe or a plan is wrong.
        WorkerFailed: an exception ended one of the workers.
    """
    from polylane.runtime.workers.threads import limit_to_one_thread
    from polylane.runtime.workers.world import hide_accelerators

    hide_accelerators()
    limit_to_one_thread()
    resume_plan = None
    if request.resume_plan is not None:
        resume_plan = inputs.choose_plan(replace(request, plan=request.resume_plan, workers=None))
    recipe = inputs.open_recipe(request)
    from polylane.compile.objectives import Objective
    from polylane.verify.resuming.resumed_run import verify_resumed
    from polylane.verify.resuming.training_data import TrainingData

    model = inputs.build_model(recipe, request.seed)
    inputs.rehearse_optimizer(recipe, model)
    (example,) = inputs.whole_batches(recipe, request.batch, 1, request.seed)
    dataset = inputs.open_data(recipe, "train")
    reopen = functools.partial(inputs.open_data, recipe, "train")
    data = TrainingData(example, dataset, request.batch, request.steps, reopen, recipe.collate)
    objective = Objective("loss", recipe.loss, recipe.optimizer, recipe.scheduler, metrics=recipe.metrics)
    note = f"{request.recipe}: {format_plural(request.steps, 'step')} in float64, without a break and from a checkpoint"
    for line in (note, *note_idle_rules(plan.sync, request.steps)):
        print(line, file=sys.stderr if request.json else sys.stdout, flush=True)
    verdict = verify_resumed(
        model, objective, data, plan, resume_plan, clip_norm=request.clip_norm, seed=request.seed, init=recipe.init
    )
    if request.json:
        print_json({"recipe": request.recipe, **verdict.to_dict()})
    else:
        _show(verdict)
    return verdict.passed


def note_idle_rules(sync: SyncOptions, steps: int) -> list[str]:
    """Return a note for each way to synchronize that begins after the checkpoint, which then has nothing of it.

    Args:
        sync: how the plan's replicas synchronize.
        steps: steps of the unbroken training, of which half are before the checkpoint.
    """
    first_steps = dict[str, int]()  # by what begins, the first step that leaves something of it
    if isinstance(sync.compress, PowerSGDOptions):
        first_steps["PowerSGD compresses"] = sync.compress.start + 1
    if sync.every > 1 and sync.outer is not None:
        first_steps["the outer optimizer steps"] = sync.warmup + sync.every
    elif sync.every > 1:
        first_steps["replicas train separately"] = sync.warmup + 1
    return [
        f"note: {rule} from step {step} on, and the checkpoint is that of step {steps // 2}: with --steps {2 * step} "
        "it has something of that"
        for rule, step in first_steps.items()
        if step > steps // 2
    ]


def _show(verdict: ResumeVerdict) -> None:
    for number, (unbroken, resumed) in enumerate(verdict.losses, start=verdict.saved_step + 1):
        print(f"loss of step {number}: {unbroken:.12g} without a break, {resumed:.12g} from the checkpoint")
    style = "bold green" if verdict.passed else "bold red"
    console().print(describe(verdict), style=style, soft_wrap=True, markup=False)


def describe(verdict: ResumeVerdict) -> str:
    """Return the verdict as one sentence."""
    plan = f"{format_plural(verdict.workers, 'worker')} ({verdict.plan})"
    runs = f"{plan}: {verdict.steps} steps, and {verdict.saved_step}, a checkpoint and {len(verdict.losses)} more"
    moved = ""
    if verdict.other:
        name = f" in {verdict.worst_name}" if verdict.worst else ""
        moved = (
            f"by {verdict.other} the worst relative error is {verdict.worst:.1e}{name}, {verdict.tolerance:.0e} is "
            "allowed"
        )
        if verdict.undetermined:
            names = f"{len(verdict.undetermined)} undetermined, such as {verdict.undetermined[0]}"
            moved += f" ({names}: the two plans differ in them without a checkpoint as well)"
    if verdict.passed:
        tensors = format_plural(verdict.same_plan.tensors, "tensor")
        equal = f"agree bit for bit in every loss, in {tensors} of weights, buffers and states, and in all plain state"
        return f"Equal: {runs} on fresh workers {equal}{'; ' + moved if moved else ''}."
    reasons = [f"the first that differs is {verdict.culprit}"]
    if verdict.same_plan.worst:
        reasons.append(f"worst relative error {verdict.same_plan.worst:.1e}, none is allowed by the same plan")
    return f"NOT equal: {runs} on fresh workers differ; {'; '.join([*reasons, *([moved] if moved else [])])}."
