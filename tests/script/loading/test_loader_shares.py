"""Prepared loaders read of each batch what their worker computes on, and the loop's numbers are the plain loop's."""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch

import polylane
from polylane.errors import PolylaneError
from polylane.runtime.workers.team import WorkerContext, fork_workers
from tests.script.loading.loader_loops import LOADER_LOOPS, Augmented, train
from tests.script.loading.unusual_loops import UNUSUAL_LOOPS

LOOPS = LOADER_LOOPS | UNUSUAL_LOOPS
PLANS = ["data=2", "data=2,pipeline=2", "data=2,shard=parameters", "tensor=2"]
QUICK = {
    ("flatten_batches", "data=2"),
    ("mix_batches", "data=2"),
    ("shift_columns", "data=2"),
    ("weigh_samples", "data=2,shard=parameters"),
    ("keep_batches", "data=2,pipeline=2"),
    ("load_ahead", "data=2"),
    ("write_views", "data=2"),
    ("write_arrays", "data=2"),
    ("read_unlike", "data=2"),
}
CASES = [
    pytest.param(name, plan, marks=() if (name, plan) in QUICK else pytest.mark.slow)
    for name in LOOPS
    for plan in PLANS
]


def unprepared(*objects: Any, **options: Any) -> Any:
    return objects


def count_reads(loop: Any, prepare: Any) -> tuple[list[float], list[int], str]:
    """Return a loop's numbers, how many samples of each batch this process has read for it, and what it was told."""
    reads, plain_fetch = list[int](), fetch._MapDatasetFetcher.fetch

    def counted_fetch(self: Any, indices: Any) -> Any:
        reads.append(len(indices))
        return plain_fetch(self, indices)

    fetch._MapDatasetFetcher.fetch = counted_fetch  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        numbers = loop(prepare)
    return numbers, reads, "\n".join(str(each.message) for each in told)


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_loop_prints_the_plain_loop_s_numbers(name: str, plan: str) -> None:
    expected = LOOPS[name](unprepared)

    def run(context: WorkerContext) -> list[float]:
        return LOOPS[name](partial(polylane.prepare, plan=plan))

    for numbers in fork_workers(run, 4 if plan == "data=2,pipeline=2" else 2):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-11)


def read(name: str, plan: str = "data=2", **options: Any) -> tuple[list[list[int]], str]:
    """Return what each of two workers reads in a loop, by batch, and what they were told."""

    def run(context: WorkerContext) -> tuple[list[float], list[int], str]:
        return count_reads(LOOPS[name], partial(polylane.prepare, plan=plan, **options))

    results = fork_workers(run, 2)
    return [reads for _, reads, _ in results], "\n".join(told for _, _, told in results)


WHOLE = [[12] * 6] * 2


def test_workers_read_their_samples() -> None:
    # The first batch runs on whole models; of those under the plan, the first, third, ... are compared whole.
    reads, told = read("flatten_batches")
    assert reads == [[10, 10, 5, 6, 5, 5, 10, 3]] * 2
    assert "whole batches" not in told


@pytest.mark.parametrize("name", ["follow_mean", "collect_labels"])
def test_workers_read_their_samples_of_many_batches(name: str) -> None:
    reads, told = read(name)
    assert all(batch.count(2) + batch.count(3) >= 4 for batch in reads)
    assert "whole batches" not in told
    assert "captured one by one" not in told


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pad_samples", "collate_fn may depend on all samples"),
        ("augment_samples", "the dataset gives other samples when they are read again"),
        ("read_names", "something else than tensors with a row for each sample"),
        ("mix_batches", "is not computed sample by sample"),
        ("shift_columns", "computes from them with other constants each time"),
        ("flip_rows", "writes in place into one, or into a view of one"),
    ],
)
def test_whole_batches_are_read_where_samples_depend_on_each_other(name: str, reason: str) -> None:
    reads, told = read(name)
    assert all(batch[-2:] in ([12, 12], [6, 6]) for batch in reads)
    assert told.count("every worker reads whole batches") == 1
    assert reason in told


def test_whole_batches_are_read_where_the_script_says_so() -> None:
    assert read("weigh_samples", whole_batches=True)[0] == WHOLE


def test_a_plan_that_divides_no_batches_reads_them_whole() -> None:
    assert read("weigh_samples", "pipeline=2")[0] == WHOLE


def test_a_data_set_that_draws_for_some_samples_is_refused() -> None:
    def loop(prepare: Any) -> list[float]:
        random.seed(1)
        loader = DataLoader(Augmented(first=28), batch_size=6)
        return train(prepare, loader, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["of"]["y"]))

    def run(context: WorkerContext) -> list[float]:
        return loop(partial(polylane.prepare, plan="data=2"))

    with pytest.raises(PolylaneError, match=r"draws random numbers for some samples only.*whole_batches=True"):
        fork_workers(run, 2)


def test_workers_whose_orders_differ_are_found() -> None:
    def run(context: WorkerContext) -> str:
        torch.manual_seed(0)
        order = [*range(36)] if context.rank == 0 else [*range(12), *range(35, 11, -1)]
        loader = DataLoader(Augmented(first=99), batch_size=4, sampler=order)
        step = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["of"]["y"])  # noqa: E731
        with pytest.raises(PolylaneError) as caught:
            train(partial(polylane.prepare, plan="data=2"), loader, step)
        return str(caught.value)

    assert all("another batch" in text or "other samples" in text for text in fork_workers(run, 2))
