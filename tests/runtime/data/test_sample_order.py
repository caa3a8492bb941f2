"""Orders of samples: functions of seed and epoch alone, whatever makes them; the same under every plan."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from polylane.errors import PolylaneError
from polylane.runtime.data.loader import load_batches, share_of_all
from polylane.runtime.data.sample_order import LengthSampler, order_by_sampler
from polylane.runtime.job import Job
from tests.support.workers.training import mlp, workers


def numbers(samples: int = 40) -> list[Any]:
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randn(6, generator=random, dtype=torch.float64), torch.tensor(index % 4)) for index in range(samples)
    ]


def weighted(dataset: Any) -> Any:
    return WeightedRandomSampler([1.0 + 9.0 * (label == 0) for _, label in dataset], num_samples=24)


def with_own_generator(dataset: Any) -> Any:
    return RandomSampler(dataset, replacement=True, num_samples=24, generator=torch.Generator())


@pytest.mark.parametrize("sampler", [weighted, with_own_generator])
def test_an_order_depends_on_seed_and_epoch_alone(sampler: Any) -> None:
    dataset, state = numbers(), torch.random.get_rng_state()
    order = order_by_sampler(sampler, dataset, epoch=1, seed=5)
    torch.manual_seed(99)
    assert order_by_sampler(sampler, dataset, epoch=1, seed=5) == order and len(order) == 24
    assert (
        order_by_sampler(sampler, dataset, epoch=2, seed=5)
        != order
        != order_by_sampler(sampler, dataset, epoch=1, seed=6)
    )
    torch.random.set_rng_state(state)
    order_by_sampler(sampler, dataset, epoch=1, seed=5)
    assert torch.equal(torch.random.get_rng_state(), state)  # the user's generator is where it was


def test_a_sampler_is_told_the_epoch() -> None:
    class Curriculum:
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter(range(self.epoch + 1))

    assert order_by_sampler(lambda dataset: Curriculum(), numbers(), epoch=3, seed=0) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ([[0, 1], [2]], "gave a list, and the dataset's indices are 0 to 39: give one after the other"),
        ([0, 40], "gave 40, and the dataset's indices are 0 to 39"),
        ([0.5], "gave a float"),
        ([], "gave no samples"),
        ([-1], "gave -1, and the dataset's indices are 0 to 39"),
        (None, "must return indices one after the other, not None"),
        (7, "must return indices one after the other, not a int"),
        (itertools.count(), "gave more than 40,000 indices, 1000 times those of the dataset"),
        ((1 // zero for zero in [0]), "the sampler of sampler.dataset. raised ZeroDivisionError"),
    ],
)
def test_what_is_no_order_is_refused(series: Any, message: str) -> None:
    with pytest.raises(PolylaneError, match=message):
        order_by_sampler(lambda dataset: series, numbers(), epoch=0, seed=0)


def test_samples_of_similar_lengths_are_together() -> None:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 100, (4000,), generator=random).tolist()
    order = list(LengthSampler(lengths, batch=8, generator=torch.Generator().manual_seed(1)))
    assert sorted(order) == list(range(4000))
    batches = [[lengths[index] for index in order[at : at + 8]] for at in range(0, len(order), 8)]
    padding = sum(max(batch) * 8 - sum(batch) for batch in batches) / sum(lengths)
    assert padding < 0.05 and max(batches[0]) == max(lengths)  # at random it would be about three quarters
    again = list(LengthSampler(lengths, batch=8, generator=torch.Generator().manual_seed(2)))
    assert again != order and list(LengthSampler([3, 1, 2], batch=2)) != []
    with pytest.raises(PolylaneError, match="batch must be 1 or more, not 0"):
        LengthSampler([3, 1, 2], batch=0)


def test_an_epoch_goes_on_where_it_was_left() -> None:
    dataset = numbers()
    options: dict[str, Any] = {"shares": share_of_all, "sampler": weighted, "epoch": 1, "seed": 2}
    whole = [batch.leaves[1].tolist() for batch in load_batches(dataset, 8, **options)]
    rest = [batch.leaves[1].tolist() for batch in load_batches(dataset, 8, skip=8, **options)]
    assert rest == whole[1:] and len(whole) == 3
    assert (
        Counter(label for labels in whole for label in labels)[0] > 10
    )  # a quarter of the samples, ten times as often


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2", "data=3"])
def test_workers_train_on_the_same_order(plan: str) -> None:
    def losses(job: Job) -> list[float]:
        batches = job.batches(numbers(), 8, epochs=2, sampler=weighted, workers=1, prefetch=1)
        return [job.step(batch).loss for batch in batches]

    alone = workers(losses, mlp(6, 12, 4), "data=1")[0]
    assert len(alone) == 6
    assert all(found == pytest.approx(alone, rel=1e-12) for found in workers(losses, mlp(6, 12, 4), plan))
