"""All workers read the same, or one sentence says who does not, before anything of it is saved."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

import polylane
from polylane.commands.learning_rates import LearningRateOptions
from polylane.commands.requests import TrainRequest
from polylane.commands.running.recipe_training import load_materials
from polylane.errors import PolylaneError
from polylane.runtime.data.loader import begin_epoch
from polylane.runtime.data.sample_order import sample_order
from polylane.runtime.job import Job
from tests.support import subsets
from tests.support.workers.training import assert_same, batch_of, classify, mlp, plainly, sgd, workers

SAMPLES = list(zip(*batch_of(24), strict=True))


def is_second() -> bool:
    return multiprocessing.current_process().name == "polylane-worker-1"


def refusal(work: Any, plan: str) -> str:
    """What all workers raise alike."""

    def run(job: Job) -> str:
        with pytest.raises(PolylaneError) as caught:
            work(job)
        return str(caught.value)

    first, *others = workers(run, mlp(6, 8, 4), plan)
    assert all(other == first for other in others)
    return first


# Batches that a script gives


@pytest.mark.parametrize(
    "plan", subsets.one_in(2, ["data=2", "pipeline=2,microbatches=2", "data=2,every=2", "tensor=2"], first=1)
)
def test_orders_that_part_later(plan: str) -> None:
    def work(job: Job) -> None:
        for step in range(5):
            inputs, labels = batch_of(8, seed=step)
            if step == 2 and is_second():
                labels = labels.roll(1)  # one tensor of two
            job.step((inputs, labels))

    said = refusal(work, plan)
    assert said.startswith("step 3: rank 1 gave another batch than rank 0: workers must give the same whole batch")


def lower_rates(job: Job) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] *= 0.5


def end_momentum(job: Job) -> None:
    job.optimizer.param_groups[0]["momentum"] = 0.0


def evaluate_a_layer(job: Job) -> None:
    job.model[1].eval()


def halve_weights(job: Job) -> None:
    with torch.no_grad():
        job.model[2].weight.mul_(0.5)


def clear_bias(job: Job) -> None:
    with torch.no_grad():
        job.model[2].bias.zero_()  # so small that one worker has all of it


def draw_bias(job: Job) -> None:
    torch.nn.init.constant_(job.model[2].bias, 0.25)


def assign_bias(job: Job) -> None:
    job.model[2].bias.data = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lower_rates, "other options of the optimizer"),
        (end_momentum, "other options of the optimizer"),
        (evaluate_a_layer, "another model or loss"),
        (halve_weights, "other weights"),
    ],
)
def test_what_a_script_changes_on_one_rank(change: Any, words: str) -> None:
    """On all ranks it is an ordinary change."""

    def work(job: Job, alone: bool = True) -> None:
        for step in range(4):
            if step == 2 and (is_second() or not alone):
                change(job)
            job.step(batch_of(8, seed=step))

    said = refusal(work, "data=2")
    assert said.startswith(f"step 3: rank 1 trained with {words} ") and said.endswith("not within `if rank == 0`")
    workers(partial(work, alone=False), mlp(6, 8, 4), "data=2")


def scale_more(job: Job) -> None:
    job.model.scale = 0.5


def set_temperature(job: Job) -> None:
    scaled.__globals__["TEMPERATURE"] = 0.5


TEMPERATURE = 1.0


def scaled(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return classify(model, (batch[0] * model.scale * TEMPERATURE, batch[1]))


@pytest.mark.parametrize(
    ("plan", "change", "setting"),
    [
        ("tensor=2", scale_more, "model.scale"),
        ("tensor=2", set_temperature, "TEMPERATURE"),
        ("data=2,shard=parameters", scale_more, "model.scale"),
        ("data=2,shard=parameters", evaluate_a_layer, "1.training"),
        ("data=2,tensor=2", scale_more, "model.scale"),
    ],
)
def test_settings_that_part_where_workers_wait_within_a_pass(plan: str, change: Any, setting: str) -> None:
    """Before the first message of a pass, which the other graph does not have; all name the setting and the rank."""

    def work(job: Job, alone: bool = True) -> None:
        for step in range(4):
            if step == 2 and (is_second() or not alone):
                change(job)
            job.step(batch_of(8, seed=step))

    def refused(job: Job) -> tuple[str, float]:
        started = time.monotonic()
        with pytest.raises(PolylaneError) as caught:
            work(job)
        return str(caught.value), time.monotonic() - started

    model = mlp(6, 8, 4)
    model.scale = 1.0
    others = "ranks 0, 2, 3" if plan == "data=2,tensor=2" else "rank 0"
    for said, seconds in workers(refused, model, plan, loss=scaled):
        assert said.startswith("step 3: ") and said.endswith("not within `if rank == 0`")
        assert f"{setting} has changed on rank 1, and not on {others}: what a script changes" in said
        assert seconds < 10
    workers(partial(work, alone=False), model, plan, loss=scaled)


def test_a_file_that_is_written_between_the_looks_of_two_workers(tmp_path: Path) -> None:
    """All take the look of rank 0: the file counts from one step on, the same on all workers."""
    switch = tmp_path / "scale"
    switch.write_text("1.0")

    def read_scale(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return classify(model, (batch[0] * float(switch.read_text()), batch[1]))

    def work(job: Job) -> list[float]:
        losses = []
        for step in range(5):
            if step == 2 and is_second():
                time.sleep(0.5)  # rank 0 has looked, and waits
                switch.write_text("0.01")
            losses.append(job.step(batch_of(8)).loss)
        return losses

    found, same = workers(work, mlp(6, 8, 4), "data=2", loss=read_scale)
    assert found == same
    inputs, labels = batch_of(8)
    reference = plainly(mlp(6, 8, 4), [(inputs * scale, labels) for scale in (1.0, 1.0, 1.0, 0.01, 0.01)])
    assert found == pytest.approx(reference.losses, abs=1e-9)


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_writes_into_weights_of_which_a_worker_has_a_part(shard: str) -> None:
    """What one rank alone writes is seen, and what all write is not, whatever each holds of it."""
    writes = [halve_weights, clear_bias, draw_bias, assign_bias]

    def work(job: Job) -> list[str]:
        said = list[str]()
        for step in range(1, 2 * len(writes) + 1):
            if step % 2 or is_second():
                writes[(step - 1) // 2](job)
            try:
                assert job.step(batch_of(8)).loss > 0
            except PolylaneError as error:
                said.append(str(error).split(" (")[0])
        return said

    seen = [2, 4, 6] + [8] * (shard == "parameters")  # of `.data = ` no counter tells, but a guard
    for said in workers(work, mlp(6, 8, 4), f"data=2,shard={shard}"):
        assert said == [f"step {step}: rank 1 trained with other weights" for step in seen]


def test_nothing_is_saved_of_them(tmp_path: Path) -> None:
    def work(job: Job) -> None:
        job.step(batch_of(8))
        job.step(batch_of(8, seed=int(is_second())))
        job.save_checkpoint(tmp_path)

    assert "not begun: rank 0: step 2: rank 1 gave another batch than rank 0" in refusal(work, "data=2")
    assert not list(tmp_path.glob("*/manifest*"))


def test_replicas_that_do_not_wait_compare_in_the_end() -> None:
    def work(job: Job) -> None:
        for step in range(3):
            job.step(batch_of(8, seed=step + 10 * (step == 1 and is_second())))
        job.state_dict()

    said = refusal(work, "data=2,servers=1,staleness=1")
    assert said.startswith("the first 3 steps: rank 1 gave another batch than rank 0")


def test_evaluation() -> None:
    def work(job: Job) -> None:
        job.step(batch_of(8))
        job.evaluate(batch_of(8, seed=int(is_second())))

    assert refusal(work, "data=2").startswith("evaluation: rank 1 gave another batch than rank 0")


# Datasets


class Shares(IterableDataset[Any]):
    """Takes a share by its rank, as loops with torch's DataLoader want it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES[int(is_second()) :: 2])


class OtherFile:
    """Of one worker's file the last samples are others."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, i: int) -> Any:
        x, y = SAMPLES[i]
        return x + (i >= 20 and is_second()), y


class Longer(OtherFile):
    def __len__(self) -> int:
        return len(SAMPLES) - int(is_second())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Shares, "step 1: the dataset gave rank 1 other samples than rank 0: each worker must be given what one"),
        (OtherFile, ": the dataset gave rank 1 other samples than rank 0: each worker must be given what one"),
        (Longer, "step 1: rank 1 read other samples than rank 0, or made a batch of other sizes"),
    ],
)
def test_datasets_that_depend_on_the_worker(make: Any, said: str) -> None:
    def work(job: Job) -> None:
        for batch in job.batches(make(), 6, epochs=4):
            job.step(batch)

    assert said in refusal(work, "data=2")


class Harder:
    """Samples get harder with every one that was read, and from epoch to epoch."""

    read, epoch = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        return SAMPLES[i][0] * (1 + self.read / 10 + self.epoch), SAMPLES[i][1]


class Curriculum(Harder):
    def __getitem__(self, i: int) -> Any:
        return SAMPLES[i][0] * (1 + self.epoch), SAMPLES[i][1]


class Centred(Curriculum):
    def __getitems__(self, indices: list[int]) -> Any:
        inputs, labels = default_collate([self[i] for i in indices])
        return list(zip(inputs - inputs.mean(0), labels, strict=True))


def centre(samples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs, labels = default_collate(samples)
    return inputs - inputs.mean(0), labels


def plain_batches(dataset: Any, size: int, epochs: int, collate: Any) -> Iterator[Any]:
    """The batches of a plain loop over torch's DataLoader, in a job's order."""
    for epoch in range(epochs):
        begin_epoch(dataset, epoch)
        order = sample_order(len(dataset), epoch, 0)
        sampler = [order[at : at + size] for at in range(0, len(order), size)]
        yield from torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)


@pytest.mark.parametrize(
    ("make", "collate"),
    subsets.one_in(
        2, [(Harder, None), (Curriculum, None), (Centred, None), (Curriculum, centre)], first=1, several=True
    ),
)
def test_the_numbers_of_a_plain_loop(make: Any, collate: Any) -> None:
    def work(job: Job) -> Any:
        dataset = make()
        return [job.step(batch).loss for batch in job.batches(dataset, 9, epochs=2, collate=collate)], job.state_dict()

    reference = plainly(mlp(6, 8, 4), list(plain_batches(make(), 9, 2, collate or default_collate)))
    for losses, state in workers(work, mlp(6, 8, 4), "data=2"):
        assert_same(type(reference)(losses, state), reference)
    with polylane.parallelize(mlp(6, 8, 4), classify, sgd, example=batch_of(9), plan="data=1") as alone:
        assert_same(type(reference)(*work(alone)), reference)


RECIPE = """
import torch
from torch import nn

class Set:
    read = 0
    def __len__(self): return 12
    def __getitem__(self, i):
        self.read += 1
        return torch.ones(3)

class Stream(torch.utils.data.IterableDataset):
    def __init__(self): self.left = iter(range(12))
    def __len__(self): return 12
    def __iter__(self): return (torch.full((3,), float(i)) for i in self.left)

def data(split, stream=False): return (Stream() if stream else Set()) if split == "train" else None
def model(): return nn.Linear(3, 1)
def loss(model, batch): return model(batch).mean()
def optimizer(parameters): return torch.optim.SGD(parameters, 0.1)
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_training_begins_with_data_of_which_nothing_was_read(stream: bool, tmp_path: Path) -> None:
    (recipe := tmp_path / "set.py").write_text(RECIPE)
    request = TrainRequest(recipe=str(recipe), batch=4, settings=(f"stream={stream}",), rates=LearningRateOptions(4))
    train = load_materials(request).train
    assert list(train.left) == list(range(12)) if stream else train.read == 0
