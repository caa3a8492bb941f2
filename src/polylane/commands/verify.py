"""``polylane verify``: compare a plan with one worker in float64, and print a table and a verdict."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box

from polylane.commands import user_inputs as inputs
from polylane.commands.printing import console, make_table, print_json, print_line, print_table
from polylane.commands.verifying import script
from polylane.commands.verifying.script import is_script
from polylane.errors import PolylaneError, format_plural
from polylane.plan.spec import format_degrees
from polylane.runtime.workers.launch_environment import is_launched

if TYPE_CHECKING:
    from polylane.commands.requests import VerifyRequest
    from polylane.plan.plan import AnyPlan
    from polylane.verify.verify import FreeRunDeviation, Verdict

ROWS = 20  # most rows of the table; --json has all
NAMED = 4  # most tensors that a sentence names; --json has all


def run(request: VerifyRequest) -> bool:
    """Compare the plan with one worker, print the outcome, and return whether they are equal.

    Raises:
        PolylaneError: an option, the recipe or the plan is wrong.
        WorkerFailed: an exception ended one of the workers.
    """
    if is_launched():
        raise PolylaneError("verify starts its own workers: run it without torchrun")
    if is_script(request.recipe):
        return script.run(request)
    if request.arguments:
        raise PolylaneError(
            f"{' '.join(request.arguments)}: {request.recipe} is a recipe, which takes --set NAME=VALUE"
        )
    plan = inputs.choose_plan(request)
    inputs.check_positive("--clip-norm", request.clip_norm)
    _refuse_too_small(request.batch, plan)
    if request.resume_plan is not None and not request.resume:
        raise PolylaneError("--resume-plan is the plan that resumes from a checkpoint: give --resume, too")
    if request.resume:
        from polylane.commands.verifying import verify_resume

        return verify_resume.run(request, plan)
    verdict = _prove(request, plan)
    if request.json:
        print_json({"recipe": request.recipe, **verdict.to_dict()})
    else:
        _show(verdict)
    return verdict.passed


def _refuse_too_small(batch: int, plan: AnyPlan) -> None:
    """Refuse a batch with fewer samples than parts, before a model is built, which may take long.

    Raises:
        PolylaneError: the batch has fewer samples than the plan has replicas or microbatches.
    """
    for key, parts in (("data", plan.data), ("microbatches", plan.microbatches or 1)):
        if parts > batch:
            samples = format_plural(batch, "sample")
            raise PolylaneError(f"{key}={parts}: a batch of {samples} cannot be divided into so many parts")


def _plan_line(plan: AnyPlan) -> str:
    return ",".join([*format_degrees(plan.group_meshes), f"schedule={plan.schedule}"])


def _prove(request: VerifyRequest, plan: AnyPlan) -> Verdict:
    from polylane.runtime.workers.threads import limit_to_one_thread
    from polylane.runtime.workers.world import hide_accelerators

    # Before the recipe runs: what is proven is the plan, in float64 on forked workers of the CPU.
    hide_accelerators()
    limit_to_one_thread()
    recipe = inputs.open_recipe(request)
    from polylane.compile.objectives import Objective
    from polylane.graph.python_state.compiler import describe_left_out
    from polylane.verify.verify import refuse_failing_dtypes, verify

    seed = request.seed
    model = inputs.build_model(recipe, seed)
    inputs.rehearse_optimizer(recipe, model)
    batches = inputs.whole_batches(recipe, request.batch, request.steps, seed)
    objective = Objective("loss", recipe.loss, recipe.optimizer, recipe.scheduler, metrics=recipe.metrics)
    setting = f"on one worker and on {plan.processes} ({_plan_line(plan)})"
    note = f"{request.recipe}: {format_plural(request.steps, 'step')} in float64, {setting}"
    # With --json stdout is for the JSON object alone.
    for line in (note, *describe_left_out(model, objective.loss)):
        print(line, file=sys.stderr if request.json else sys.stdout, flush=True)
    for batch in batches[:1]:
        refuse_failing_dtypes(model, objective, batch, plan)
    return verify(model, objective, batches, plan, clip_norm=request.clip_norm, seed=seed, init=recipe.init)


def _show(verdict: Verdict) -> None:
    out = console()
    worst_first = sorted(verdict.deviations, key=lambda deviation: deviation.worst, reverse=True)
    columns = ("parameter or buffer", "gradient", "value", "optimizer's state")
    table = make_table("", *columns, left=columns[:1], box=box.SIMPLE_HEAD, pad_edge=False)
    for deviation in worst_first[:ROWS]:
        gradient = _format_cell(deviation.gradient, f"gradient of {deviation.name}", verdict)
        value = _format_cell(deviation.value, f"buffer {deviation.name}", verdict)
        style = "" if deviation.worst <= verdict.tolerance else "red"
        table.add_words(deviation.name, gradient, value, _format_cell(deviation.memory, "", verdict), style=style)
    steps = "" if verdict.steps == 1 else " of any step"
    out.print(f"Relative errors{steps}, the worst first", style="bold")
    print_table(out, table)
    if len(worst_first) > ROWS:
        print(f"... and {len(worst_first) - ROWS} more, no worse than these (--json has all)")
    for step, (reference, plan) in enumerate(verdict.losses, start=1):
        print(f"loss of step {step}: {reference:.12g} {'in one process' if verdict.rule else 'on one worker'}, "
              f"{plan:.12g} by the plan")  # fmt: skip
    for metric in verdict.metrics:
        print_line(f"metric {metric.name}: {metric.reference:.12g} in a plain loop, {metric.plan:.12g} by the plan")
    print_line(f"the reference: {verdict.reference}")
    if verdict.undetermined:
        print_line(_undetermined(verdict.undetermined))
    if verdict.free is not None:
        print_line(_describe_free_run(verdict.free, verdict.steps))
    out.print(_sentence(verdict), style="bold green" if verdict.passed else "bold red", soft_wrap=True, markup=False)


def _format_cell(error: float | None, name: str, verdict: Verdict) -> str:
    if error is None:
        return ""
    return "undetermined" if name in verdict.undetermined and error <= verdict.tolerance else _number(error)


def _undetermined(names: Sequence[str]) -> str:
    omitted_count = len(names) - NAMED
    listed = ", ".join(names[:NAMED]) + (f" and {omitted_count} more" if omitted_count > 0 else "")
    return (
        f"undetermined, {len(names)}: {listed}; one worker itself finds other numbers with its sums in another order, "
        "and rounding may make of them what the plan has"
    )


def _describe_free_run(free: FreeRunDeviation, steps: int) -> str:
    location = f" in {free.name}" if free.name else ""
    return (
        f"after {format_plural(steps, 'step')} run freely, which is not judged: worst difference "
        f"{_number(free.worst)}{location}, of a loss {_number(free.loss_error)}"
    )


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"


def _find_worst(verdict: Verdict) -> str:
    """Return where the worst error is, as a part of a sentence; the table has no row for losses."""
    named = next((deviation.name for deviation in verdict.deviations if deviation.worst == verdict.worst), None)
    named = named or next((metric.name for metric in verdict.metrics if metric.error == verdict.worst), None)
    if verdict.worst == 0 or (named is None and verdict.loss_error != verdict.worst):
        return ""
    return f" in {'a loss' if named is None else named}"


def _describe_whole_batches(verdict: Verdict) -> str:
    """Return by how much whole batches differ, where microbatches decide what is computed, as the end of a sentence."""
    if not verdict.split:
        return ""
    far = ""
    if verdict.whole_loss is not None:
        far = f" by {abs(verdict.whole_loss - verdict.losses[0][0]):.2g} in the first loss"
    return f"; whole batches differ{far}, for {verdict.split}: microbatches=1 is exact"


def _sentence(verdict: Verdict) -> str:
    plan = f"{format_plural(verdict.workers, 'worker')} ({verdict.plan})"
    reference = f"the same rule ({verdict.rule}) in one process" if verdict.rule else "one worker"
    if verdict.split and not verdict.rule:
        reference += f" that takes the same {verdict.microbatches} microbatches"
    if verdict.passed:
        compared = "gradient, weight, buffer and metric" if verdict.metrics else "gradient, weight and buffer"
        return (
            f"Equal: {plan} and {reference} agree in every loss, {compared}; worst relative error "
            f"{_number(verdict.worst)}{_find_worst(verdict)}, {verdict.tolerance:.0e} is allowed"
            f"{_describe_whole_batches(verdict)}."
        )
    reasons = []
    if not verdict.worst <= verdict.tolerance:
        reasons.append(f"worst relative error {_number(verdict.worst)}, {verdict.tolerance:.0e} is allowed")
    if wrong := [metric.name for metric in verdict.metrics if not metric.error <= verdict.tolerance]:
        reasons.append(f"metrics that differ: {', '.join(wrong)}")
    if not verdict.replicas_equal:
        reasons.append("workers that hold the same weight hold different bits of it")
    if verdict.culprit is not None:
        is_sentence = verdict.culprit.startswith(("every ", "step "))
        reasons.append(verdict.culprit if is_sentence else f"the first value that differs is {verdict.culprit}")
    return f"NOT equal: {plan} and {reference} differ; {'; '.join(reasons)}."
