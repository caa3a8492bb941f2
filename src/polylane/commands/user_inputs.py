"""User inputs of commands: a recipe, a plan, a number of workers; each mistake is one sentence.

Imports of torch are inside functions, so that a wrong command line fails without waiting for them.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polylane import recipe as recipes
from polylane.commands.requests import PlanChoice, RecipeRequest, WorkersRequest
from polylane.errors import INTERRUPTIONS, PolylaneError, describe_error, describe_message
from polylane.plan import spec as specs
from polylane.plan.fixed_keys import FixedKeys, parse_auto
from polylane.plan.spec import Spec
from polylane.recipe import Recipe, RecipeError
from polylane.runtime.workers.forked_child import end_forked_children
from polylane.runtime.workers.launch_environment import is_launched, read_number

if TYPE_CHECKING:
    from torch import nn

    from polylane.compile.training_problem import TrainingProblem
    from polylane.plan.plan import AnyPlan, Plan


# Most workers that are started on one host: this many, or this many for each core if that is more.
MOST_STARTED = 256
EACH_CORE = 4

# The plan ------------------------------------------------------------------------------------------------------------


def choose_plan(request: WorkersRequest) -> AnyPlan:
    """Return the plan that a command line asks for: one line, a file or "auto"; without any, replicas on all workers.

    Raises:
        PolylaneError: the plan cannot be parsed, or takes another number of workers, or more than a host can start.
    """
    if (fixed := parse_auto(request.plan)) is not None:
        return find_plan(request, request.workers, fixed)
    return fit_plan(request)


def fit_plan(request: PlanChoice) -> AnyPlan:
    """Return the plan of one line or a file, or without any that of replicas on all workers.

    Raises:
        PolylaneError: the plan cannot be parsed, or takes another number of workers, or more than a host can start.
    """
    text, workers = request.plan, request.workers
    if text is None:
        plan: AnyPlan = Spec(data=workers or read_number("WORLD_SIZE", default=1))
    else:
        plan = read_plan(text) if isinstance(text, str) else text
    if workers is not None and plan.processes != workers:
        product = " times ".join(specs.format_degrees(plan.group_meshes))
        product += f", and servers={plan.sync.server_count}" if plan.sync.dedicated else ""
        raise PolylaneError(f"--workers {workers}, but the plan takes {plan.processes} ({product}): they must be equal")
    cap = max(MOST_STARTED, EACH_CORE * (os.cpu_count() or 1))
    if plan.processes > cap and not is_launched():
        raise PolylaneError(
            f"the plan takes {plan.processes:,} workers, and at most {cap} are started on one host: use fewer, or let "
            "torchrun start them on several hosts"
        )
    return plan


def find_plan(request: RecipeRequest, workers: int | None = None, fixed: FixedKeys | None = None) -> Plan:
    """Return the best plan for a recipe on this machine.

    Args:
        request: the recipe and its batch.
        workers: how many workers there may be at most; None: as many as there are cores.
        fixed: keys that the plan must have; None: all are searched.

    Raises:
        PolylaneError: the recipe is wrong, nothing fits, or torchrun started several processes, which would all
            measure at once.
    """
    if is_launched():
        raise PolylaneError(
            "--plan auto measures in one process: run this command without torchrun, or write the plan first "
            "(polylane inspect RECIPE --plan auto --write plan.yaml) and give that file"
        )
    recipe = open_recipe(request)
    from polylane.auto.choose import announce_best, choose
    from polylane.probe.machine import local_cluster
    from polylane.runtime.workers.threads import limit_to_one_thread

    limit_to_one_thread()
    problem = open_problem(recipe, request).problem
    # Plan for the example's samples, which are fewer than --batch where the dataset is smaller.
    problem, max_workers = replace(problem, batch_size=None), workers or os.cpu_count() or 1
    return announce_best(choose(problem, range(1, max_workers + 1), local_cluster(max_workers), True, fixed))


def read_plan(text: str) -> AnyPlan:
    """Return a plan from one line or from a file.

    Raises:
        PolylaneError: a key or value is wrong; the message names it.
    """
    from polylane.plan.plan_file import load_or_parse

    return load_or_parse(text)


def check_positive(option: str, value: float | None) -> None:
    """Refuse a bound that is not above zero.

    Raises:
        PolylaneError: the value is zero, negative or NaN; the message names the option.
    """
    if value is not None and not value > 0:
        raise PolylaneError(f"{option} must be above 0, not {value:g}")


# The recipe ----------------------------------------------------------------------------------------------------------


def open_recipe(request: RecipeRequest) -> Recipe:
    """Load a recipe, with functions whose exceptions become one sentence.

    The loss is not guarded: capture has its own messages for it. `open_data` guards data(split).

    Raises:
        RecipeError: the recipe or a setting is wrong.
    """
    recipe = recipes.load(request.recipe, recipes.parse_assignments(request.settings))
    scheduler, collate, sampler = recipe.scheduler, recipe.collate, recipe.sampler
    return replace(
        recipe,
        model=_guard_function(recipe, "model()", recipe.model),
        optimizer=_guard_function(recipe, "optimizer(parameters)", recipe.optimizer),
        scheduler=scheduler and _guard_function(recipe, "scheduler(optimizer)", scheduler),
        collate=collate and _guard_function(recipe, "collate(samples)", collate),
        sampler=sampler and _guard_function(recipe, "sampler(dataset)", sampler),
    )


def _guard_function(recipe: Recipe, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **keywords: Any) -> Any:
        with blamed_on(recipe, call):
            return function(*args, **keywords)

    return guarded


@contextmanager
def blamed_on(recipe: Recipe, call: str) -> Iterator[None]:
    """Context manager: turn an exception into one sentence that names the recipe's function and the user's line."""
    try:
        with end_forked_children():
            yield
    except (PolylaneError, *INTERRUPTIONS):
        raise
    except BaseException as error:  # sys.exit() in it would end everything without a word
        line = recipes.deepest_own_line(error, recipe.path)
        file, number = (recipe.path, "") if line is None else (Path(line.filename), f":{line.lineno}")
        location = f"{recipes.shorten_path(file)}{number}"
        raise RecipeError(f"{location}: {call} raised {describe_error(error)}") from error


def build_model(recipe: Recipe, seed: int) -> nn.Module:
    """Build the model, with the weights that the seed gives it on one device.

    Raises:
        RecipeError: a function of the recipe raised, or did not return what it should.
    """
    import torch

    from polylane.compile.unusable_modules import refuse_uninitialised, refuse_unusable_modules
    from polylane.graph.python_state.compiler import without_compiler

    torch.manual_seed(seed)
    model = recipe.model()
    if not isinstance(model, torch.nn.Module):
        raise RecipeError(f"model() must return a torch.nn.Module, not a {type(model).__name__}")
    refuse_uninitialised(model)
    plain: nn.Module = without_compiler(model)
    refuse_unusable_modules(plain)
    return plain


def rehearse_optimizer(recipe: Recipe, model: nn.Module) -> None:
    """Build an optimizer and a scheduler once and discard them, so that their mistakes show before any worker starts.

    Raises:
        PolylaneError: one of them raised, the scheduler is not one, or there is nothing to train.
    """
    from polylane.compile.objectives import build_scheduler, named_parameters, refuse_untrainable
    from polylane.compile.optimizer_sequence import JoinedFactory

    parameters = named_parameters(model, [recipe.loss])
    try:
        optimizer = JoinedFactory(recipe.optimizer)(parameters)
    except RecipeError:
        refuse_untrainable(parameters)  # torch raises for an empty list too, with a less helpful message
        raise
    build_scheduler(recipe.scheduler, optimizer)


class OpenedProblem(NamedTuple):
    """A recipe's training, and its data.

    Attributes:
        problem: the training, with a model that has weights and a first batch.
        data: the training data, of which nothing is read.
        keeps_state: whether what is read of the data depends on what was read before.
    """

    problem: TrainingProblem
    data: Any
    keeps_state: bool


def open_problem(recipe: Recipe, request: RecipeRequest) -> OpenedProblem:
    """Return the recipe's training, and its training data.

    Raises:
        PolylaneError: one of the recipe's functions raised, or did not return what it should.
    """
    model = build_model(recipe, request.seed)
    from polylane.compile.unusable_modules import refuse_unusable_settings

    refuse_unusable_settings()  # not where a model is built for a prediction, on the meta device
    dataset = open_data(recipe, "train")
    from polylane.commands.running.recipe_data import tell_steps

    recipe = tell_steps(recipe, dataset, request)
    rehearse_optimizer(recipe, model)
    example, dataset, keeps_state = _read_example(recipe, dataset, request.batch)
    refuse_unusable_settings()
    return OpenedProblem(problem_of(recipe, model, example, request.batch), dataset, keeps_state)


def problem_of(recipe: Recipe, model: nn.Module, example: Any, batch: int) -> TrainingProblem:
    """Return the training of a recipe's model by its one loss.

    Args:
        recipe: the user's functions, as they were opened.
        model: the return value of its ``model()``.
        example: a batch of its training data, of any size.
        batch: number of samples of a step, over all workers.
    """
    from polylane.compile.objectives import Objective
    from polylane.compile.training_problem import TrainingProblem

    objective = Objective("loss", recipe.loss, recipe.optimizer, recipe.scheduler, metrics=recipe.metrics)
    return TrainingProblem(model, {"loss": objective}, example, batch, recipe.init)


# The data ------------------------------------------------------------------------------------------------------------


def open_data(recipe: Recipe, split: str) -> Any:
    """Return the dataset of a split; None for a test split that the recipe does not have (None, or no samples).

    Raises:
        PolylaneError: data(split) raised, or its result is not a dataset.
    """
    from polylane.runtime.data.loader import is_mapped, refuse_data_loader

    with blamed_on(recipe, f"data({split!r})"):
        dataset = recipe.data(split)
        if split != "train" and isinstance(dataset, Iterator):  # of a function that yields: empty where it returns
            first_samples = list(itertools.islice(dataset, 1))
            dataset = itertools.chain(first_samples, dataset) if first_samples else None
    refuse_data_loader(dataset, f"data({split!r})")
    if split != "train" and (dataset is None or (hasattr(dataset, "__len__") and len(dataset) == 0)):
        return None
    if isinstance(dataset, str) or (not is_mapped(dataset) and not isinstance(dataset, Iterable)):
        raise PolylaneError(
            f"data({split!r}) must return a dataset, map-style or iterable, or a list of samples, not a "
            f"{type(dataset).__name__}" + ("" if split == "train" else "; or None, where there is nothing to test on")
        )
    return dataset


def example_batch(recipe: Recipe, dataset: Any, size: int) -> Any:
    """Return a batch of the first samples of the training data, for the form and the size of later batches.

    Raises:
        PolylaneError: there are no samples, or they do not make a batch.
    """
    return collate_samples(recipe, _first_samples(recipe, dataset, size, range))


def _read_example(recipe: Recipe, dataset: Any, size: int) -> tuple[Any, Any, bool]:
    """Return an example batch, the training data of which nothing has been read, and whether these keep state.

    Raises:
        PolylaneError: as of :func:`example_batch`, and of :func:`open_data`.
    """
    from polylane.runtime.data.read_trial import keep_state, try_reads

    is_used_up = isinstance(dataset, Iterator)
    restore = keep_state([dataset], recipe.collate)
    example = example_batch(recipe, dataset, size)
    if not is_used_up and type(dataset) in (list, tuple) and recipe.collate is None:
        return example, dataset, False
    read = functools.partial(_first_samples, recipe, dataset, size, range)
    keeps_state = not is_used_up and try_reads(read, None, [dataset], recipe.collate).keeps_state
    if is_used_up or keeps_state:
        restore()
        dataset = open_data(recipe, "train")
    return example, dataset, keeps_state


def _take(order: list[int], samples: int) -> list[int]:
    """Return an order that is known, whatever the dataset's number of samples."""
    return order


def _first_samples(recipe: Recipe, dataset: Any, count: int, order: Callable[[int], Sequence[int]]) -> list[Any]:
    """Return up to ``count`` samples; of a map-style dataset in the order that its length gives."""
    from polylane.runtime.data.loader import is_mapped

    with blamed_on(recipe, "data('train')"):
        if is_mapped(dataset):
            return [dataset[i] for i in order(len(dataset))[:count]]
        return list(itertools.islice(dataset, count))


def collate_samples(recipe: Recipe, samples: list[Any]) -> Any:
    """Return samples as a batch, by the recipe's own function or torch's.

    Raises:
        PolylaneError: there are no samples, or they do not fit together.
    """
    from torch.utils.data import default_collate

    if not samples:
        raise PolylaneError("data('train') has no samples")
    if recipe.collate is not None:
        return recipe.collate(samples)
    try:
        return default_collate(samples)
    except Exception as error:
        raise RecipeError(
            f"the samples of data('train') do not make a batch ({describe_message(error)}): give the recipe a "
            "collate(samples)"
        ) from error


def whole_batches(recipe: Recipe, size: int, count: int, seed: int) -> list[Any]:
    """Return the first batches of a training, whole: as many as there are steps, in the order of the training's epochs.

    Args:
        recipe: the user's functions, as they were opened.
        size: number of samples of a batch.
        count: number of batches that are returned.
        seed: of the order of samples.

    Raises:
        PolylaneError: there are no samples, or they do not make a batch.
    """
    from polylane.runtime.data.loader import begin_epoch
    from polylane.runtime.data.sample_order import order_by_sampler, sample_order

    dataset = open_data(recipe, "train")
    batches: list[Any] = []
    for epoch in range(count):  # enough, since an epoch has at least one batch
        if len(batches) == count:
            break
        begin_epoch(dataset, epoch)
        order: Callable[[int], list[int]] = functools.partial(sample_order, epoch=epoch, seed=seed)
        if recipe.sampler is not None:
            drawn_order = order_by_sampler(recipe.sampler, dataset, epoch, seed)
            order = functools.partial(_take, drawn_order)
        samples = _first_samples(recipe, dataset, size * (count - len(batches)), order)
        # Without samples collate_samples raises its own message.
        batches += [collate_samples(recipe, samples[at : at + size]) for at in range(0, len(samples), size)] or [
            collate_samples(recipe, [])
        ]
        if isinstance(dataset, Iterator):
            dataset = open_data(recipe, "train")
    return batches
