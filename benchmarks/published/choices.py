"""What is chosen for a published training of sharded replicas: the fastest recomputation and microbatch that fit.

Whoever ran it had found them by trial. Here nothing of them is told: model, devices, batch and what replicas share out
are, and every plan with these is predicted, its time by simulation and its memory by what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from benchmarks.published.costs import captured, cluster
from benchmarks.published.rows import AnyRow, Decoder, Row
from benchmarks.published.scores import Case, mean_error
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import CostModel, predict
from polylane.plan.recompute import Mode
from polylane.plan.spec import Spec
from polylane.plan.sync import SyncOptions
from polylane.planner.problem import CapturedProblem, build_cost_model, fit_plan

RECOMPUTE: tuple[Mode, ...] = ("none", "full")


@dataclass(frozen=True)
class Choice:
    """One way to train a row's model.

    Attributes:
        recompute: what the backward pass recomputes.
        microbatch: samples of a replica at a time.
        seconds: of a step, as predicted.
        memory: bytes of a worker at the peak, as predicted.
        capacity: bytes that it has.
    """

    recompute: Mode
    microbatch: int
    seconds: float
    memory: int
    capacity: float

    @property
    def fits(self) -> bool:
        """Whether the worker has that much memory."""
        return self.memory <= self.capacity


def can_choose(row: AnyRow) -> bool:
    """Whether a row leaves a choice that is priced: sharded replicas, all products in one dtype."""
    return isinstance(row, Row) and row.shard != "none" and row.products == row.method.dtype


def choices(row: Row) -> Iterator[Choice]:
    """Yield every way with the row's batch, from the smallest microbatch."""
    share = row.batch // row.data
    for recompute in RECOMPUTE:
        # FSDP casts parameters to 16 bits before the passes: so does float16 here, at the rates of bfloat16, which with
        # masters is autocast and keeps more.
        dtype = "float16" if row.method.masters else row.method.dtype
        method = replace(row.method, dtype=dtype, recompute=recompute)
        found = priced(row.model, row.device, row.gpus, row.per_host, row.link, method)
        for microbatch in (size for size in range(1, share + 1) if share % size == 0):
            sync = SyncOptions(shard=row.shard)
            spec = Spec(data=row.data, microbatches=share // microbatch, sync=sync)
            prediction = predict(found, *fit_plan(found, spec, row.batch), row.batch, exact=False)
            memory, capacity = prediction.stages[0].memory.total, found.cluster.device(0).memory
            yield Choice(recompute, microbatch, prediction.seconds, memory, capacity)


@cache
def priced(model: Decoder, device: str, gpus: int, per_host: int, link: str, method: TrainingOptions) -> CostModel:
    """What predictions of a model on a cluster rest on, with all of its layers."""

    def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adam([each for _, each in parameters])

    graph = captured(model, False, model.layers)
    return build_cost_model(CapturedProblem(graph, optimizer), cluster(device, gpus, per_host, link), method)


def choose(row: Row) -> tuple[Choice, Choice | None]:
    """The way that was run, and the fastest one that fits, if one does."""
    every = list(choices(row))
    ran = next(each for each in every if (each.recompute, each.microbatch) == (row.method.recompute, row.microbatch))
    return ran, min((each for each in every if each.fits), key=lambda each: each.seconds, default=None)


def report(found: Sequence[AnyRow]) -> Iterator[str]:
    """Yield a line for each row that leaves a choice, then the summary."""
    told, chosen, same, alike, short = list[Case](), list[Case](), 0, 0, 0
    for row in found:
        if not isinstance(row, Row) or not can_choose(row):
            continue
        ran, best = choose(row)
        told.append(Case(row.name, row.seconds, ran.seconds))
        short += not ran.fits
        if best is None:
            yield f"  nothing fits: {row.name}"
            continue
        chosen.append(Case(row.name, row.seconds, best.seconds))
        alike += best.recompute == ran.recompute
        same += best == ran
        yield (
            f"  {chosen[-1].error:+7.1%}  recomputes {best.recompute}, {best.microbatch} at a time, "
            f"{best.memory / best.capacity:.0%} of the memory; ran {ran.recompute}, {ran.microbatch} "
            f"({told[-1].error:+.1%}, {ran.memory / ran.capacity:.0%}): {row.name}"
        )
    yield (
        f"{len(told)} rows, error {mean_error(told):.1%} as they were run, {mean_error(chosen):.1%} as chosen; "
        f"recomputation as run in {alike}, microbatch as well in {same}; {short} ran that should not fit"
    )
