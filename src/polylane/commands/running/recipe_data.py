"""Recipe data: the part of a recipe's data that a run has, and what its scheduler is told of their number."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, Subset

from polylane.commands.requests import RecipeRequest, TrainRequest
from polylane.commands.running.option_groups import DataOptions
from polylane.recipe import Recipe
from polylane.runtime.data.loader import batch_sizes, is_mapped
from polylane.runtime.data.sample_order import count_samples


def tell_steps(recipe: Recipe, dataset: Any, request: RecipeRequest) -> Recipe:
    """Return the recipe with a scheduler that is told how many steps there are, where it asks for that.

    Its arguments ``steps_per_epoch`` and ``total_steps`` are given, unless ``--set`` gives them, or the data have no
    length: then their defaults stay.
    """
    names = {name.rpartition(".")[2] for name in recipe.settings if name.rpartition(".")[0] in ("", "scheduler")}
    arguments = set() if recipe.scheduler is None else set(inspect.signature(recipe.scheduler).parameters) - names
    if recipe.scheduler is None or not arguments & {"steps_per_epoch", "total_steps"}:
        return recipe
    counts, steps = dict[str, int](), getattr(request, "steps", None)
    if is_mapped(dataset):
        limit = _count_batches(request.data) if isinstance(request, TrainRequest) else None
        samples = count_samples(dataset, recipe.sampler, request.seed)
        samples = samples if limit is None else min(samples, limit * request.batch)
        counts["steps_per_epoch"] = len(batch_sizes(samples, request.batch, getattr(request, "drop_last", False)))
        counts["total_steps"] = counts["steps_per_epoch"] * (getattr(request, "epochs", None) or 1)
    if steps is not None:
        counts["total_steps"] = steps
    return replace(
        recipe,
        scheduler=functools.partial(recipe.scheduler, **{n: count for n, count in counts.items() if n in arguments}),
    )


def limit_batches(dataset: Any, request: TrainRequest) -> Any:
    """Return the first samples of a dataset, where fewer batches than it has are asked for; else the dataset."""
    if (batches := _count_batches(request.data)) is None:
        return dataset
    samples = batches * request.batch
    if is_mapped(dataset):
        return Subset(dataset, range(min(samples, len(dataset))))
    return itertools.islice(dataset, samples) if isinstance(dataset, Iterator) else FirstSamples(dataset, samples)


def _count_batches(options: DataOptions) -> int | None:
    """Return how many batches of each split are read; None: all."""
    return 1 if options.fast_dev_run else options.overfit_batches


class FirstSamples(IterableDataset[Any]):
    """The first samples of an iterable dataset.

    Args:
        dataset: any iterable that begins anew when it is iterated over.
        samples: number of its samples that are read.
    """

    def __init__(self, dataset: Iterable[Any], samples: int) -> None:
        self.dataset, self._samples = dataset, samples

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.dataset, self._samples)
