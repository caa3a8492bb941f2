"""A job from the user's side: what every worker sees is what one device would have given."""

from __future__ import annotations

import copy
import gc
import logging
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import polylane
from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.observe.timeline import Timeline
from polylane.plan.plan_file import dump, load
from polylane.recipe import Mean
from polylane.runtime.data.sample_order import sample_order
from polylane.runtime.job import Job
from polylane.runtime.workers.world import World
from polylane.schedule.action import ActionKind
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import (
    adamw,
    assert_same,
    assert_state,
    batch_of,
    classify,
    mlp,
    plainly,
    sgd,
    trained,
    workers,
)

PLANS = ["data=2", "pipeline=2,microbatches=2", "data=2,pipeline=2,microbatches=2"]
BATCHES = [batch_of(samples, seed) for seed, samples in enumerate((8, 7, 5))]


class Regular(nn.Module):
    """BatchNorm, dropout, and a weight tied between the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.second, self.last = nn.Linear(8, 6), nn.Linear(6, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.dropout(self.norm(self.first(x))))))


def regular() -> Regular:
    torch.manual_seed(0)
    return Regular().double()


# One worker


@pytest.mark.parametrize("microbatches", [1, 3])
def test_alone_it_is_a_plain_loop_bit_by_bit(microbatches: int) -> None:
    model = mlp(6, 8, 4).float()
    batches = [(x.float(), y) for x, y in BATCHES]
    reference = plainly(model, batches, microbatches=microbatches, clip_norm=0.1)
    job = polylane.parallelize(
        model, classify, sgd, example=batches[0], plan=f"microbatches={microbatches}", clip_norm=0.1
    )
    losses = [job.step(batch).loss for batch in batches]
    if microbatches == 1:
        assert losses == reference.losses
        assert all(torch.equal(value, reference.state[name]) for name, value in job.state_dict().items())
    else:  # the loop above scales each loss, the job the start of its backward pass: the same but for rounding
        assert_same(type(reference)(losses, job.state_dict()), reference, 1e-6)
    assert job.model is model and not torch.distributed.is_initialized()


def test_alone_a_plan_for_many_keeps_its_microbatches() -> None:
    """BatchNorm sees microbatches, so the reference for a plan has the same ones."""

    def job(plan: str, **options: Any) -> Job:
        return polylane.parallelize(regular(), classify, sgd, example=BATCHES[0], plan=plan, alone=True, **options)

    assert job("data=2,pipeline=2").plan.workers == 1 and job("data=2,pipeline=2").plan.microbatches == 4
    assert job("data=2,pipeline=2", batch_size=64).plan.microbatches == 8
    assert job("pipeline=2,microbatches=3").plan.microbatches == 3
    # What only several workers can have is left out: chunks, folds, versions of weights, turns, budgets of stages.
    for plan in (
        "pipeline=2,schedule=interleaved,chunks=2,microbatches=3",
        "pipeline=2,schedule=zb-v,microbatches=3",
        "pipeline=2,schedule=pipedream,vertical_sync=yes,microbatches=3",
        "data=2,pipeline=2,replicas=round-robin,microbatches=3",
        "pipeline=2,recompute=budget:200B,microbatches=3",
        "pipeline=2,schedule=auto,microbatches=3",
    ):
        found = job(plan).plan
        assert (found.workers, found.pipeline, found.microbatches) == (1, 1, 3), plan


@pytest.mark.parametrize(
    ("plan", "workers"),
    subsets.one_in(
        2,
        [("data=4,pipeline=2", 8), ("tensor=2", 2), ("[data=2 | 1]", 3), ("data=2,servers=2,dedicated=yes", 4)],
        several=True,
    ),
)
def test_one_process_is_refused_a_plan_for_several(
    plan: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(dump(compile_training(regular(), build_objectives(classify, sgd, None), BATCHES[0], plan).plan))
    monkeypatch.setattr(sys, "argv", ["examples/train.py"])
    for asked in (plan, load(file)):
        with pytest.raises(PolylaneError) as caught:
            polylane.parallelize(regular(), classify, sgd, example=BATCHES[0], plan=asked)
        assert str(caught.value) == (
            f"the plan takes {workers} workers, and this is one process: start it with torchrun --nproc-per-node "
            f"{workers} train.py, or pass alone=True to train the same microbatches on one worker"
        )
        job = polylane.parallelize(regular(), classify, sgd, example=BATCHES[0], plan=asked, alone=True)
        assert job.plan.processes == 1


# Results


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_every_worker_sees_the_same_result(plan: str) -> None:
    def work(job: Job) -> Any:
        results = [job.step(batch) for batch in BATCHES]
        # Read late and out of order: each result stays what it was.
        return [(r.step, r.samples, r.loss, r.timeline) for r in reversed(results)][::-1]

    first, *others = workers(work, mlp(6, 8, 8, 4), plan)
    assert [(step, samples) for step, samples, _, _ in first] == [(0, 8), (1, 7), (2, 5)]
    for other in others:
        assert [r[:3] for r in other] == [r[:3] for r in first]
        assert [r[3].spans for r in other] == [r[3].spans for r in first]
    reference = plainly(mlp(6, 8, 8, 4), BATCHES)
    assert [loss for _, _, loss, _ in first] == pytest.approx(reference.losses, rel=1e-12)


def test_the_timeline_has_all_that_all_workers_did() -> None:
    def work(job: Job) -> tuple[Timeline, list[int]]:
        return job.step(BATCHES[0]).timeline, [len(p.actions) for p in job._role._programs["loss"]]

    (timeline, counts), *_ = workers(work, mlp(6, 8, 8, 4), "data=2,pipeline=2,microbatches=2")
    assert timeline.ranks == 4 and min(span.start for span in timeline.spans) == 0.0
    for rank, count in enumerate(counts):
        own = sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: s.end)
        assert len(own) == count
        compute = [s for s in own if s.action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.STEP)]
        assert all(a.end <= b.start for a, b in pairwise(compute))
        assert all(span.end >= span.start for span in own)


def test_microbatches_without_samples_leave_no_span() -> None:
    def work(job: Job) -> set[int | None]:
        return {span.action.microbatch for span in job.step(batch_of(2)).timeline.spans}

    assert workers(work, mlp(6, 8, 4), "pipeline=2,microbatches=4") == [{0, 1, None}] * 2


# Batches


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_whole_batches_and_the_jobs_own_are_the_same(plan: str) -> None:
    inputs, labels = batch_of(19)
    dataset = torch.utils.data.TensorDataset(inputs, labels)

    def work(job: Job) -> Any:
        own = [job.step(batch).loss for batch in job.batches(dataset, 7, epochs=2)]
        return own, job.state_dict()

    def whole(job: Job) -> Any:
        losses = []
        for epoch in range(2):
            order = sample_order(19, epoch, 0)
            for start in range(0, 19, 7):
                chosen = order[start : start + 7]
                losses.append(job.step((inputs[chosen], labels[chosen])).loss)
        return losses, job.state_dict()

    for (own, state), (losses, reference) in zip(
        workers(work, regular(), plan), workers(whole, regular(), plan), strict=True
    ):
        assert len(own) == 6 and own == losses
        assert all(torch.equal(state[name], reference[name]) for name in reference)


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_batches_of_another_form_later(plan: str) -> None:
    """Sequences of another length: captured when the first of them comes, and cut at the same places."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.mix, self.out = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)

        def forward(self, text: Tensor) -> Tensor:
            x = self.token(text)
            return self.out(torch.tanh(self.mix(x) + x.mean(1, keepdim=True)))

    def loss(model: nn.Module, text: Tensor) -> Tensor:
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    torch.manual_seed(0)
    model = Reader().double()
    random = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 9, (6, length), generator=random) for length in (5, 9, 5, 3, 9)]
    reference = plainly(model, batches, loss=loss)
    for worker in trained(model, plan, batches, loss=loss):
        assert_same(worker, reference)


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_a_mean_over_parts_that_do_not_count_alike(plan: str) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        inputs, labels = batch
        return Mean(F.cross_entropy(model(inputs), labels, ignore_index=3, reduction="sum"), (labels != 3).sum())

    reference = plainly(mlp(6, 8, 8, 4), BATCHES, loss=loss, clip_norm=0.1)
    for worker in trained(mlp(6, 8, 8, 4), plan, BATCHES, loss=loss, clip_norm=0.1):
        assert_same(worker, reference)


def test_a_part_in_which_nothing_counts() -> None:
    """All tokens of one replica are ignored, then all of a whole batch."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        inputs, labels = batch
        return Mean(F.cross_entropy(model(inputs), labels, ignore_index=3, reduction="sum"), (labels != 3).sum())

    inputs, labels = batch_of(4)
    half = (inputs, torch.tensor([3, 3, 0, 1]))
    reference = plainly(mlp(6, 8, 4), [half], loss=loss)
    for worker in trained(mlp(6, 8, 4), "data=2", [half], loss=loss, example=(inputs, labels)):
        assert_same(worker, reference)
    none = (inputs, torch.full((4,), 3))
    for worker in trained(mlp(6, 8, 4), "data=2", [none], loss=loss, example=(inputs, labels)):
        assert math.isnan(worker.losses[0]) and all(v.isfinite().all() for v in worker.state.values())


def test_a_leaf_that_belongs_to_the_whole_batch() -> None:
    """Class weights of which there happen to be as many as a worker has samples are not split."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Mean:
        weight = batch["weight"]
        total = F.cross_entropy(model(batch["x"]), batch["y"], weight, reduction="sum")
        return Mean(total, weight[batch["y"]].sum())

    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples]), "weight": weight}

    samples = list(zip(*batch_of(12), strict=True))

    def work(job: Job) -> list[float]:
        return [job.step(b).loss for b in job.batches(samples, 8, shuffle=False, collate=collate)]

    def plain_loop(model: nn.Module) -> list[float]:
        optimizer, losses = sgd(model.named_parameters()), []
        for batch in (collate(samples[:8]), collate(samples[8:])):  # the last has four samples, as there are weights
            optimizer.zero_grad()
            value = loss(model, batch).value
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses

    expected = plain_loop(mlp(6, 8, 4))
    for plan in ("microbatches=2", "data=2", "data=2,microbatches=2", "data=2,pipeline=2,microbatches=2"):
        for losses in workers(work, mlp(6, 8, 4), plan, loss=loss, example=collate(samples[:8])):
            assert losses == pytest.approx(expected, rel=1e-12)


class Bags(nn.Module):
    """Means of rows of a table: a sample's begin where its offset says, in the flat indices of all samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.out = nn.EmbeddingBag(9, 6, mode="mean"), nn.Linear(6, 4)
        self.double()

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        y: Tensor = self.out(self.bags(indices, offsets))
        return y


def test_samples_that_are_numbered_in_a_leaf_of_the_whole_batch() -> None:
    """Collated by each replica for itself, the offsets of one would begin in the indices of another."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        labels, indices, offsets = batch
        return F.cross_entropy(model(indices, offsets), labels)

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        counts = torch.tensor([0, *(len(bag) for bag, _ in samples[:-1])])
        return torch.stack([y for _, y in samples]), torch.cat([bag for bag, _ in samples]), counts.cumsum(0)

    draw = torch.Generator().manual_seed(0)
    samples = [(torch.randint(9, (1 + i % 4,), generator=draw), torch.tensor(i % 4)) for i in range(16)]

    def work(job: Job) -> list[float]:
        return [job.step(b).loss for b in job.batches(samples, 8, shuffle=False, collate=collate)]

    batches = [collate(samples[:8]), collate(samples[8:])]
    expected = plainly(Bags(), batches, loss=loss).losses
    for losses in workers(work, Bags(), "data=2", loss=loss, example=batches[0]):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_a_loss_that_is_no_number_is_reported_and_no_more(plan: str) -> None:
    bad = BATCHES[0][0].clone()
    bad[3] = math.nan

    def work(job: Job) -> list[float]:
        return [job.step(batch).loss for batch in (BATCHES[0], (bad, BATCHES[0][1]), BATCHES[1])]

    for first, second, third in workers(work, mlp(6, 8, 8, 4), plan):
        assert math.isfinite(first) and math.isnan(second) and math.isnan(third)


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_a_loss_may_be_a_module_with_weights_of_its_own(plan: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
            self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))

        def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
            total = F.cross_entropy(self.scale * model(batch[0]), batch[1], self.weight, reduction="sum")
            return Mean(total, self.weight[batch[1]].sum())

    loss = Scaled()

    def both(parameters: Any) -> torch.optim.Optimizer:
        return sgd(parameters)

    def alone() -> tuple[list[float], Tensor]:
        model, own = mlp(6, 8, 8, 4), copy.deepcopy(loss)
        optimizer = torch.optim.SGD([*model.parameters(), *own.parameters()], lr=0.1, momentum=0.9)
        losses = []
        for batch in BATCHES:
            optimizer.zero_grad()
            value = own(model, batch).value
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses, own.scale.detach()

    def work(job: Job) -> Any:
        losses = [job.step(batch).loss for batch in BATCHES]
        return losses, job.worker.held().get("loss.scale"), job.state_dict()

    losses, scale = alone()
    results = workers(work, mlp(6, 8, 8, 4), plan, loss=loss, optimizer=both)
    assert any(held is not None for _, held, _ in results)
    for own, held, state in results:
        assert own == pytest.approx(losses, rel=1e-12) and "loss.scale" not in state
        assert held is None or held.item() == pytest.approx(scale.item(), rel=1e-12)


# Plans


def test_a_plan_file_that_a_person_edited(tmp_path: Path) -> None:
    """Stages on any ranks, cut at the modules that the file names."""
    model = mlp(6, 8, 8, 4)
    made = compile_training(
        model, build_objectives(classify, sgd, None), BATCHES[0], "data=2,pipeline=2,microbatches=2"
    ).plan
    stages = [
        made.stages[0].model_copy(update={"nodes": ("0", "0"), "devices": (3, 1)}),
        made.stages[1].model_copy(update={"nodes": ("1", "loss"), "devices": (0, 2)}),
    ]
    file = tmp_path / "plan.yaml"
    file.write_text(dump(made.model_copy(update={"stages": tuple(stages), "schedule": "afab", "microbatches": 3})))
    plan = load(file)
    held = [
        {"0.weight", "0.bias"} if rank in (1, 3) else {"2.weight", "2.bias", "4.weight", "4.bias"} for rank in range(4)
    ]
    reference = plainly(model, BATCHES, clip_norm=0.2)
    for rank, worker in enumerate(trained(model, plan, BATCHES, clip_norm=0.2)):
        assert_same(worker, reference)
        assert set(worker.gradients) == held[rank]


# Evaluation


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_evaluation_is_that_of_the_plain_model(plan: str) -> None:
    batches = [batch_of(samples, 10 + samples) for samples in (8, 5, 2, 1)]

    def work(job: Job) -> Any:
        job.step(BATCHES[0])
        before = job.state_dict()
        losses = [job.evaluate(batch) for batch in batches]
        after = job.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        return losses, before

    for losses, state in workers(work, regular(), plan):
        model = regular()
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            assert losses == pytest.approx([float(classify(model, batch)) for batch in batches], rel=1e-12)


def test_evaluation_leaves_training_as_it_was() -> None:
    def work(job: Job, evaluate: bool) -> Any:
        for batch in BATCHES:
            job.step(batch)
            if evaluate:
                job.evaluate(batch)
        return job.state_dict()

    for plan in ("data=2", "pipeline=2,microbatches=2"):
        with_evaluation = workers(lambda job: work(job, True), regular(), plan)
        without = workers(lambda job: work(job, False), regular(), plan)
        assert all(torch.equal(a[n], b[n]) for a, b in zip(with_evaluation, without, strict=True) for n in a)


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_evaluation_of_the_jobs_own_batches(plan: str) -> None:
    dataset = list(zip(*batch_of(11), strict=True))

    def work(job: Job) -> list[float]:
        return [job.evaluate(batch) for batch in job.batches(dataset, 8, shuffle=False)]

    model = mlp(6, 8, 8, 4)
    x, y = batch_of(11)
    expected = [classify(model, (x[a:b], y[a:b])).item() for a, b in ((0, 8), (8, 11))]
    for losses in workers(work, model, plan):
        assert losses == pytest.approx(expected, rel=1e-12)


# Weights


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_weights_load_into_the_plain_model(plan: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model.safetensors"

    def work(job: Job) -> dict[str, Tensor]:
        job.step(BATCHES[0])
        job.save(path)
        return job.state_dict()

    states = workers(work, regular(), plan)
    fresh = regular()
    fresh.load_state_dict(load_file(path), strict=True)
    assert fresh.first.weight is fresh.last.weight
    for state in states:
        assert_state(dict(fresh.state_dict()), state, 0.0)
    assert not torch.equal(fresh.first.weight, regular().first.weight)


# Which parameters are trained


class Partly(nn.Module):
    """Some parameters are frozen, one reaches the loss only through detach, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.aside, self.unused = nn.Linear(6, 8), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(torch.tanh(self.first(x)))
        return self.last(torch.tanh(y) + self.aside(x).detach())


def partly() -> Partly:
    torch.manual_seed(0)
    return Partly().double()


def only_last(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for name, p in parameters if name.startswith("last")], lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", subsets.one_in(2, [adamw, only_last]))
@pytest.mark.parametrize("plan", PLANS)
def test_what_gets_no_gradient_is_left_alone(plan: str, optimizer: Any) -> None:
    """Weight decay would move a parameter whose gradient is zero, and not one that has none."""
    reference = plainly(partly(), BATCHES, optimizer=optimizer)
    for name in ("frozen.weight", "aside.weight", "unused.weight"):
        assert torch.equal(reference.state[name], partly().state_dict()[name])
    for worker in trained(partly(), plan, BATCHES, optimizer=optimizer):
        assert_same(worker, reference)


@pytest.mark.parametrize("asks_inputs", [True, False])
def test_a_parameter_that_some_batches_do_not_reach(asks_inputs: bool) -> None:
    """Which expert runs is decided by the data: in some steps, on some workers, one gets no gradient.

    What follows from the inputs alone is asked of every batch, and the experts are captured; where a weight is asked as
    well, they run as the Python that they are.
    """

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            chosen = x[:, 0] if asks_inputs else x[:, 0] + 0 * self.experts[0].weight.sum()
            for i, expert in enumerate(self.experts):
                rows = ((chosen * 10).long().abs() % 3 == i).nonzero().squeeze(1)
                if rows.numel():
                    out = out.index_add(0, rows, expert(x[rows]))
            return out

    torch.manual_seed(0)
    model = nn.Sequential(Chosen(), nn.Linear(6, 4)).double()
    inputs, labels = batch_of(6)
    inputs[:, 0] = torch.tensor([0.0, 0.0, 0.0, 0.11, 0.11, 0.11])  # expert 0, then expert 1, never 2
    later = inputs.clone()
    later[:, 0] = 0.0
    batches = [(inputs, labels), (later, labels), (inputs, labels)]
    reference = plainly(model, batches, optimizer=adamw)
    assert torch.equal(reference.state["0.experts.2.weight"], model.state_dict()["0.experts.2.weight"])
    plans = ("pipeline=2,microbatches=2", "data=2") if asks_inputs else ("data=2,pipeline=2,microbatches=3",)
    for plan in plans:
        for worker in trained(model, plan if asks_inputs else f"{plan},per_sample=0", batches, optimizer=adamw):
            assert_same(worker, reference)


# Precision


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_bfloat16_is_close(plan: str) -> None:
    class Mixed(nn.Module):
        """Values of both precisions cross between stages: a residual in float32, linear layers in bfloat16."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model = Mixed()
    batches = [(x.float(), y) for x, y in BATCHES]

    def under_autocast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return classify(model, batch)

    reference = plainly(model, batches, loss=under_autocast)
    for worker in trained(copy.deepcopy(model), f"{plan},precision=bfloat16", batches):
        assert_same(worker, reference, 2e-2)
        assert all(value.dtype == torch.float32 for value in worker.state.values())


class Results(nn.Module):
    """Operators of several results, of which parts are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        first, rest = (q * k + v).split([2, 4], -1)
        largest, _ = rest.max(-1, keepdim=True)
        spread, mean = torch.var_mean(rest, -1, keepdim=True)
        a, b = first.unbind(-1)
        return self.head(torch.cat([torch.stack([a, b], -1), largest, spread, mean, rest[:, :1]], -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_of_operators_are_divided_inside_of_the_users_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batches = Results(), [(x.float(), y) for x, y in BATCHES]

    def under_autocast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return classify(model, batch)

    reference = plainly(model, batches, loss=under_autocast)
    for worker in trained(copy.deepcopy(model), "data=2,microbatches=2", batches, loss=under_autocast):
        assert_same(worker, reference, 2e-2)


# What a script and a log show


def test_a_script_says_in_one_line_what_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    def start() -> polylane.Job:
        return polylane.parallelize(mlp(6, 4), classify, sgd, example=BATCHES[0], plan="microbatches=2")

    line, logger, lines = "1 worker on cpu, data=1,pipeline=1,schedule=1f1b,microbatches=2", logging.getLogger(), []
    job = start()
    assert capsys.readouterr().err == f"polylane: {line}\n"
    job.step(BATCHES[0])
    assert repr(job) == f"<Job: {line}, rank 0, step 1>"
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before, named = logger.level, logging.getLogger("polylane")
    logger.addHandler(handler)
    try:
        logger.setLevel(logging.INFO)
        start()
        logger.removeHandler(handler)
        named.setLevel(logging.WARNING)
        start()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        named.setLevel(logging.NOTSET)
    assert lines == [line] and capsys.readouterr().err == ""


# What is refused


def test_the_workers_must_be_those_of_the_plan() -> None:
    prepared = compile_training(mlp(6, 4), build_objectives(classify, sgd, None), BATCHES[0], "data=2")
    with pytest.raises(PolylaneError, match=r"the plan takes 2 workers \(data=2,.*\), there are 1"):
        Job(prepared, World.join(), example=BATCHES[0])


def test_what_a_single_job_refuses() -> None:
    job = polylane.parallelize(mlp(6, 8, 4), classify, sgd, example=BATCHES[0], plan="microbatches=4")
    with pytest.raises(PolylaneError, match="there is no objective 'generator', known are loss"):
        job.step(BATCHES[0], "generator")
    with pytest.raises(PolylaneError, match="no samples"):
        job.step((BATCHES[0][0][:0], BATCHES[0][1][:0]))
    with pytest.raises(PolylaneError, match="a batch of 3 cannot be divided into 4 microbatches"):
        next(iter(job.batches(list(zip(*batch_of(8), strict=True)), 3)))
    with pytest.raises(PolylaneError, match="a batch of 8 samples cannot be divided"):
        polylane.parallelize(mlp(6, 8, 4), classify, sgd, example=BATCHES[0], plan="microbatches=9")


@pytest.mark.parametrize("plan", subsets.one_in(3, PLANS, first=2))
def test_batches_that_differ_between_workers_are_noticed(plan: str) -> None:
    """A whole batch is the same on every worker: one of its own for each is a habit from elsewhere, and wrong here."""

    def work(job: Job) -> str:
        with pytest.raises(PolylaneError) as caught:
            job.step(batch_of(8, seed=job.world.rank))
        return str(caught.value)

    for said in workers(work, mlp(6, 8, 8, 4), plan):
        assert "same whole batch" in said and "job.batches" in said


def test_a_batch_that_fails_in_mid_training_is_not_called_the_example() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0]
        if inputs.dim() == 3:
            raise ValueError("too deep")
        return classify(model, (inputs, batch[1]))

    job = polylane.parallelize(mlp(6, 4), loss, sgd, example=BATCHES[0])
    job.step(BATCHES[0])
    deep = BATCHES[0][0].unsqueeze(1), BATCHES[0][1]
    with pytest.raises(PolylaneError, match="fails on a batch of another form than the example's: ValueError"):
        job.step(deep)
    with pytest.raises(PolylaneError, match="on a batch of another form than the example's in evaluation mode: Value"):
        job.evaluate(deep)


def test_what_is_no_scheduler_is_refused() -> None:
    with pytest.raises(PolylaneError, match=r"must return a learning-rate scheduler, .* not a float"):
        polylane.parallelize(mlp(6, 4), classify, sgd, example=BATCHES[0], scheduler=lambda optimizer: 0.5)
    job = polylane.parallelize(mlp(6, 4), classify, sgd, example=BATCHES[0], scheduler=lambda optimizer: None)
    job.step(BATCHES[0])


def test_a_scheduler_that_wants_a_metric_gets_the_loss_of_the_whole_batch() -> None:
    seen: list[float] = []

    class Watching(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            seen.append(metrics)
            super().step(metrics)

    job = polylane.parallelize(mlp(6, 4), classify, sgd, example=BATCHES[0], scheduler=Watching)
    assert [job.step(batch).loss for batch in BATCHES] == seen


# Leaks


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2,microbatches=3,schedule=1f1b"])
def test_nothing_grows(plan: str) -> None:
    def work(job: Job) -> tuple[int, int]:
        counts = []
        for step in range(20):
            job.step(BATCHES[0])
            if step in (6, 19):
                gc.collect()
                counts.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))
                if step == 6:
                    objects = len(gc.get_objects())
        return counts[1] - counts[0], len(gc.get_objects()) - objects

    for tensors, objects in workers(work, mlp(6, 8, 8, 4), plan):
        assert tensors <= 0 and objects < 100
