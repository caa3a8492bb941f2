"""Callbacks of a recipe's training: those of its own, and those that the command line's options ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from polylane.callbacks.callback import Callback
from polylane.callbacks.metric_rules import NanResults
from polylane.commands import user_inputs as inputs
from polylane.commands.logs.step_log import Tell
from polylane.commands.running.recipe_training import RecipeTraining
from polylane.commands.running.resume import BEST
from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.runtime.callbacks.best_checkpoints import BestCheckpoints
from polylane.runtime.callbacks.callback_runner import CallbackRunner
from polylane.runtime.job import Job


def open_callbacks(
    job: Job,
    training: RecipeTraining,
    prepared: CompiledTraining,
    tell: Tell,
    describe: Callable[[], Mapping[str, Any] | None],
) -> CallbackRunner:
    """Return this worker's callbacks.

    Args:
        job: this worker's part in the training.
        training: the recipe's model and data, with the options.
        prepared: the training, compiled for the plan.
        tell: called with a message where a checkpoint could not be written, or a result cannot be compared.
        describe: returns facts about the run for checkpoints; None where nobody should go on from a step.

    Raises:
        PolylaneError: the recipe's ``callbacks()`` fails, or an option names a result that tests do not have.
    """
    request = training.request
    _refuse_unknown_results(training, prepared)
    callbacks = [*_build_callbacks(training), *request.goals.build()]

    def warn(sentence: str) -> None:
        tell({"kind": "warning", "text": sentence})

    if rules := request.goals.list_rules():
        callbacks.append(NanResults(rules, warn))
    steps, best = request.goals.build_best(), None
    if steps is not None and request.checkpoints is not None:
        goes_on = request.trouble.on_disk_error == "warn"
        folder = request.checkpoints.parent / BEST
        best = BestCheckpoints(job, folder, steps, warn if goes_on else None, describe)
    return CallbackRunner(job, callbacks, best)


def _build_callbacks(training: RecipeTraining) -> list[Callback]:
    """Return the recipe's own callbacks.

    Raises:
        PolylaneError: ``callbacks()`` raises, or returns something else.
    """
    recipe = training.recipe
    if recipe.callbacks is None:
        return []
    with inputs.blamed_on(recipe, "callbacks()"):
        callbacks = recipe.callbacks()
    callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise PolylaneError(
                f"callbacks() in {recipe.path.name} must return a list of polylane.Callback, not a "
                f"{type(callback).__name__}"
            )
    return callbacks


def _refuse_unknown_results(training: RecipeTraining, prepared: CompiledTraining) -> None:
    """Refuse an option about a result that no test has, before the first step, as far as that is known by then.

    Raises:
        PolylaneError: the recipe has no such metric, or no test data.
    """
    names: Collection[str] = ["train_loss"]
    if training.test is not None:
        evaluation = next(iter(prepared.evaluations.values()), None)
        forms = () if evaluation is None else (evaluation.partition.graph.output_form or ())
        names = ["train_loss", "test_loss", *(form.name for form in forms)]
        if evaluation is None and prepared.objectives and training.recipe.metrics is not None:
            return  # they are captured with the first test
    for rule in training.request.goals.list_rules():
        # An object may compute several values, "f1.0", "f1.1", ...
        if rule.name not in names and not any(rule.name.startswith(f"{name}.") for name in names):
            raise PolylaneError(f"{rule.option}: there is no result {rule.name!r}; known are {', '.join(names)}")
