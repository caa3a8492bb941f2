"""``polylane verify`` of a script: the plain script and the prepared one, compared in float64."""

from __future__ import annotations

import ast
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polylane.commands import user_inputs as inputs
from polylane.commands.printing import console, print_json
from polylane.errors import PolylaneError, clean_text, format_plural
from polylane.plan.fixed_keys import parse_auto
from polylane.recipe import REQUIRED, prepares_training

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from polylane.commands.requests import VerifyRequest
    from polylane.commands.verifying.printed_lines import Tolerance
    from polylane.commands.verifying.script_runs import ScriptRun
    from polylane.plan.plan import AnyPlan


@dataclass(frozen=True)
class ScriptVerdict:
    """Whether a script computes the same prepared as plain.

    Attributes:
        plan: the plan in one line.
        workers: how many workers it takes.
        precision: the least precise type of the weights that were compared.
        reference: what the plan was compared with.
        numbers: how many printed numbers agree, or have to.
        left_out: how many were not: they differ between two runs of the plain script.
        weights: how many weights and buffers agree, or have to.
        rounded: how many numbers differ by more than is allowed, as rounding alone makes them differ.
        undetermined: names of weights that do.
        worst: the largest relative difference of the others.
        tolerance: the one that is allowed.
        difference: where the two differ first; "" where they do not.
        floor: how far rounding alone moves what differs there, relative to its size.
    """

    plan: str
    workers: int
    precision: str
    reference: str
    numbers: int
    left_out: int
    weights: int
    rounded: int
    undetermined: tuple[str, ...]
    worst: float
    tolerance: float
    difference: str
    floor: float

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.difference


def is_script(path: str) -> bool:
    """Return whether a file is a script that calls ``polylane.prepare``, or a bridge's Trainer, by its text.

    A file without such a call that defines none of a recipe's functions is taken for one, too: what it imports may
    prepare.
    """
    if not path.endswith(".py"):
        return False
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    if prepares_training(tree):
        return True
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) for node in imports}
    imported = {alias.name for node in imports for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} | imported
    return "polylane" in imported | modules and not defined & set(REQUIRED)


def run(request: VerifyRequest) -> bool:
    """Compare the script under the plan with the plain one, print the outcome, and return whether they are equal.

    Raises:
        PolylaneError: an option or the plan is wrong, or the script prepares nothing, or is not the same every time.
        WorkerFailed: the script has raised an exception.
    """
    _refuse_options_of_recipes(request)
    if parse_auto(request.plan) is not None:
        if request.workers is None:
            raise PolylaneError(f"--plan {request.plan} needs --workers N: the script's model is not known before")
        plan: str | AnyPlan = str(request.plan)
        workers = request.workers
    else:
        from polylane.verify.verify import refuse_lossy_sync  # imports torch

        plan = inputs.fit_plan(request)
        refuse_lossy_sync(plan)
        workers = plan.processes
    verdict = _prove(request, plan, workers)
    if request.json:
        print_json({"script": request.recipe, "equal": verdict.passed, **asdict(verdict)})
    else:
        style = "bold green" if verdict.passed else "bold red"
        console().print(_sentence(verdict), style=style, soft_wrap=True, markup=False)
    return verdict.passed


def _refuse_options_of_recipes(request: VerifyRequest) -> None:
    is_set = {
        "--steps": request.steps != 3,
        "--batch": request.batch != 64,
        "--seed": request.seed != 0,
        "--set": bool(request.settings),
        "--clip-norm": request.clip_norm is not None,
        "--resume": request.resume or request.resume_plan is not None,
    }
    if wrong := [option for option, is_changed in is_set.items() if is_changed]:
        raise PolylaneError(
            f"{', '.join(wrong)}: {request.recipe} is a script, which chooses that itself: give its own arguments "
            "after --, and the plan with --plan"
        )


def _prove(request: VerifyRequest, plan: str | AnyPlan, workers: int) -> ScriptVerdict:
    from polylane.runtime.workers.threads import limit_to_one_thread
    from polylane.runtime.workers.world import hide_accelerators

    hide_accelerators()
    limit_to_one_thread()
    from polylane.commands.verifying.printed_lines import ChangingNumbers, PrintedFloors, compare_lines
    from polylane.commands.verifying.script_runs import run_plainly
    from polylane.graph.rounding_noise import TRIES

    out = sys.stderr if request.json else sys.stdout
    script, reference, failure = run_plainly(request.recipe, request.arguments)
    runs = f"plain and on {format_plural(workers, 'worker')}, in {_describe_type(script.dtype, failure)}"
    print(f"{request.recipe}: {runs}", file=out, flush=True)
    if reference.code:
        raise PolylaneError(
            f"{request.recipe} by itself ends with exit code {reference.code}: what it does then is not compared"
        )
    planned = script.run(workers, plan)
    if not planned.plan:
        raise PolylaneError(
            f"{request.recipe} trains nothing under the plan: it calls no polylane.prepare, or no backward()"
        )
    described, changing = "the plain script", ChangingNumbers()
    if planned.draws:  # torch's own numbers depend on the order of all draws: a plan's do not
        described, reference = "the prepared script on one worker (it draws random numbers)", script.run(1, plan)
    tolerance, precision = _tolerance(reference)
    printed = compare_lines(reference.lines, planned.lines, tolerance, changing)
    if printed.difference:
        second_run = script.run(1, plan if planned.draws else None)
        _refuse_unrepeatable(request.recipe, reference, second_run)
        changing = ChangingNumbers.between(reference.lines, second_run.lines)
        printed = compare_lines(reference.lines, planned.lines, tolerance, changing)
    states = _compare_states(reference.state, planned.state, tolerance)
    if printed.difference or states.difference:  # of rounding alone, perhaps
        nudged = [script.run(1, plan if planned.draws else None, nudge=seed) for seed in range(TRIES)]
        floors = PrintedFloors.between(reference.lines, [run.lines for run in nudged], tolerance)
        printed = compare_lines(reference.lines, planned.lines, tolerance, changing, floors)
        states = _compare_states(reference.state, planned.state, tolerance, [run.state for run in nudged])
    if not printed.numbers and not planned.state:
        raise PolylaneError(f"{request.recipe} prints no number and has no weights to be compared")
    return ScriptVerdict(
        planned.plan,
        workers,
        precision,
        described,
        printed.numbers - printed.rounded,
        printed.left_out,
        len(planned.state) - len(states.undetermined),
        printed.rounded,
        states.undetermined,
        max(states.worst, printed.worst),
        tolerance.relative,
        f"{printed.difference} of what it prints" if printed.difference else states.difference,
        printed.floor if printed.difference else states.floor,
    )


def _describe_type(dtype: torch.dtype, failure: str) -> str:
    """Return the name of the type that a script runs in, and why that is not float64, if it is not."""
    name = str(dtype).removeprefix("torch.")
    if not failure:
        return name
    # Most such scripts make tensors of a type that they name.
    return f"{name} (in float64: {clean_text(failure)}; tensors of dtype=torch.get_default_dtype() let it run there)"


def _tolerance(run: ScriptRun) -> tuple[Tolerance, str]:
    """Return what is allowed, by the least precise type among a run's weights, and the name of that."""
    import torch

    from polylane.commands.verifying.printed_lines import Tolerance
    from polylane.verify.audit.step_replay import TOLERANCES

    types = [value.dtype for value in run.state.values() if value.dtype in TOLERANCES]
    worst = max(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    return Tolerance(TOLERANCES[worst], TOLERANCES[worst] / 1000), str(worst).removeprefix("torch.")


def _refuse_unrepeatable(script: str, run: ScriptRun, second_run: ScriptRun) -> None:
    """Refuse a script that does not compute the same twice, of which nothing can be said.

    Raises:
        PolylaneError: the weights of two runs differ.
    """
    import torch

    for name, value in run.state.items():
        if name not in second_run.state or not torch.equal(value, second_run.state[name]):
            raise PolylaneError(
                f"{script} computes other weights every time that it is run ({name}): seed its random numbers "
                "(torch.manual_seed, random.seed, numpy.random.seed) for this comparison"
            )


@dataclass
class _StateComparison:
    """What comparing weights and buffers has found.

    Attributes:
        worst: the largest relative difference.
        undetermined: names of those that differ by more than is allowed, as rounding alone makes them differ.
        floor: how far rounding alone moves the first that differs, relative to its size.
        difference: a sentence on that; "" where none differs.
    """

    worst: float = 0.0
    undetermined: tuple[str, ...] = ()
    floor: float = 0.0
    difference: str = ""


def _compare_states(
    reference: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    tolerance: Tolerance,
    nudged: Sequence[Mapping[str, Tensor]] = (),
) -> _StateComparison:
    """Compare weights and buffers.

    Args:
        reference: those that are right, by name.
        state: those that are compared with them.
        tolerance: the differences that are rounding.
        nudged: those of runs from weights that were moved by one unit in the last place.
    """
    comparison = _StateComparison()
    for name in [*reference, *(name for name in state if name not in reference)]:
        if name not in reference or name not in state:
            return _StateComparison(math.inf, difference=f"only one of them has a weight {name}")
        right, value = reference[name], state[name]
        if right.shape != value.shape:
            shapes = f"{list(value.shape)}, not {list(right.shape)}"
            return _StateComparison(math.inf, difference=f"{name} has the shape {shapes}")
        error = _relative_error(right, value, tolerance)
        errors = (_relative_error(right, state_again[name], tolerance) for state_again in nudged)
        floor = max((floor for floor in errors if floor < math.inf), default=0.0)
        if tolerance.is_rounding(error, floor):
            comparison.undetermined += (name,)
            continue
        comparison.worst = max(comparison.worst, error)
        if not error <= tolerance.relative and not comparison.difference:
            comparison.floor, comparison.difference = floor, f"{name} differs by {error:.1e} when the script ends"
    return comparison


def _relative_error(right: Tensor, value: Tensor, tolerance: Tolerance) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of the first."""
    import torch

    if not right.is_floating_point() and not right.is_complex():
        return 0.0 if torch.equal(right, value) else math.inf
    if not right.numel():
        return 0.0
    error = float((value - right).abs().max()) / max(float(right.abs().max()), tolerance.absolute / tolerance.relative)
    return error if math.isfinite(error) else 0.0 if right.equal(value) else math.inf


def _sentence(verdict: ScriptVerdict) -> str:
    subject = f"{format_plural(verdict.workers, 'worker')} ({verdict.plan}) and {verdict.reference}"
    allowed = f"worst relative error {verdict.worst:.1e}, {verdict.tolerance:.0e} is allowed in {verdict.precision}"
    if not verdict.passed:
        if verdict.floor > verdict.tolerance:  # of which nothing can be said
            return (
                f"Undecided: {subject} differ, and so do two runs of the script on one worker whose weights are off by "
                f"one unit in the last place at the start. By the plan {verdict.difference}; between those two runs it "
                f"differs by {verdict.floor:.1e}, and {verdict.tolerance:.0e} would be rounding in "
                f"{verdict.precision}. The script's steps make rounding grow, as errors of a plan would: let it make "
                "fewer steps, in which neither has grown."
            )
        return f"NOT equal: {subject} differ; {verdict.difference}; {allowed}."
    compared = f"{format_plural(verdict.numbers, 'printed number')} and {format_plural(verdict.weights, 'weight')}"
    left_out = ""
    if verdict.rounded or verdict.undetermined:
        values = [format_plural(verdict.rounded, "number")] if verdict.rounded else []
        left_out = (
            f"; further apart, by no more than rounding explains: {', '.join([*values, *verdict.undetermined])} (which "
            "differ as well in a run from weights that are off by one unit in the last place)"
        )
    if verdict.left_out:
        left_out += (
            f"; {format_plural(verdict.left_out, 'number')} not compared, which the plain script changes every time"
        )
    return f"Equal: {subject} agree in {compared}; {allowed}{left_out}."
