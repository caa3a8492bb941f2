"""The bytes in a measured timeline are those that travelled: by the partition, by both ends, and by the transport."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from polylane.compile.sample_shares import Batch
from polylane.graph.partition import StageCrossing
from polylane.observe.timeline import Span, Timeline, match_messages
from polylane.plan.plan import Plan
from polylane.runtime.job import Job
from polylane.schedule.action import ActionKind
from tests.support import models, subsets
from tests.support.workers.training import batch_of, mlp, sgd, workers

SAMPLES = 6


def plan(*meshes: dict[str, int]) -> Plan:
    """Four stages of a U-Net, of which the skip of the outer level goes from the first straight to the last."""
    nodes = [["down.0", "max_pool2d"], ["down.1", "bottom"], ["widen.0", "up.0"], ["widen.1", "loss/to"]]
    stages: list[dict[str, Any]] = []
    for own, mesh in zip(nodes, meshes, strict=True):
        first = sum(len(stage["devices"]) for stage in stages)
        stages.append({"nodes": own, "devices": list(range(first, first + prod(mesh.values()))), "mesh": mesh})
    return Plan.model_validate({"stages": stages, "schedule": "1f1b", "microbatches": 2})


PLANS = {
    "chain": plan({}, {}, {}, {}),
    "mixed": plan({}, {"data": 2}, {"tensor": 2}, {}),
    "data": "data=2",
    "tensor": "tensor=2",
    "all": "data=2,pipeline=2,tensor=2,microbatches=2",
}


@dataclass
class Seen:
    """What one worker saw of a step."""

    timeline: Timeline
    crossings: tuple[StageCrossing, ...]
    samples: int  # for which the crossings' bytes are
    local: dict[tuple[str, int], int]  # (value, microbatch) -> bytes of what this worker has of it
    handed: int  # bytes given to its transports


def one_step(job: Job, batch: Any) -> Seen:
    handed = -sum(counters.given for counters in job.worker.counters)
    result = job.step(batch)
    handed += sum(counters.given for counters in job.worker.counters) - result._vector.nbytes  # itself apart
    timeline = result.timeline
    worker = job._role._cache.compiled_for("loss", Batch.whole(batch)).executor
    local = {
        (name, share.microbatch): prod(wire.shape(share.samples)) * wire.dtype.itemsize
        for name, wire in worker.resharder.value_specs.items()
        for share in job._role.shares(SAMPLES)
    }
    partition = worker.program.partition
    return Seen(timeline, partition.crossings, partition.graph.samples, local, handed)


@functools.cache
def unet(name: str, dtype: torch.dtype = torch.float32) -> list[Seen]:
    """What every worker saw of one step by a plan."""
    case = models.example_case("unet")
    images, masks = case.batch(SAMPLES, 0)
    batch = (images.to(dtype), masks)
    torch.manual_seed(0)
    model = case.model().to(dtype)
    return workers(lambda job: one_step(job, batch), model, PLANS[name], loss=case.loss, optimizer=sgd, example=batch)


def only(timeline: Timeline, kind: ActionKind) -> list[Span]:
    return [span for span in timeline.spans if span.action.kind is kind]


@pytest.mark.parametrize("dtype", subsets.one_in(2, [torch.float32, torch.float64], first=1))
def test_every_crossing_has_the_bytes_that_the_partition_says(dtype: torch.dtype) -> None:
    seen = unet("chain", dtype)[0]
    sent: Counter[tuple[str | None, bool, int, int | None]] = Counter()
    for span in only(seen.timeline, ActionKind.SEND):
        sent[span.action.value, span.action.gradient, span.rank, span.action.peer] += span.bytes
    expected = {}
    for crossing in seen.crossings:
        whole, rest = divmod(crossing.bytes * SAMPLES, seen.samples)
        assert rest == 0 and crossing.requires_grad
        for consumer in crossing.consumers:
            expected[crossing.value, False, crossing.producer, consumer] = whole
            expected[crossing.value, True, consumer, crossing.producer] = whole
    assert sent == expected and len(expected) >= 8


def test_a_skip_goes_directly() -> None:
    timeline = unet("chain")[0].timeline
    skip = [s for s in timeline.spans if s.action.value == "down.0.5/relu" and s.action.microbatch == 0]
    bytes_of_it = 3 * 4 * 32 * 32 * 4  # samples, channels, pixels, float32
    assert sorted((s.rank, str(s.action.kind), s.action.peer, s.action.gradient, s.bytes) for s in skip) == [
        (0, "receive", 3, True, bytes_of_it),
        (0, "send", 3, False, bytes_of_it),
        (3, "receive", 0, False, bytes_of_it),
        (3, "send", 0, True, bytes_of_it),
    ]


@pytest.mark.parametrize("name", subsets.one_in(3, ["chain", "mixed", "all"]))
def test_what_is_sent_is_received(name: str) -> None:
    timeline = unet(name)[0].timeline
    sends, receives = only(timeline, ActionKind.SEND), only(timeline, ActionKind.RECEIVE)
    pairs = match_messages(timeline.spans)
    assert len(pairs) == len(sends) == len(receives) > 0
    assert all(send.bytes == receive.bytes > 0 for send, receive in pairs)
    assert sum(span.bytes for span in sends) == sum(span.bytes for span in receives)


def test_each_rank_gets_its_own_part_once() -> None:
    """Of a value from all who have a piece of it, of a gradient from each stage that read the value."""
    seen = unet("mixed")
    got: Counter[tuple[int, str | None, int | None, bool]] = Counter()
    for span in only(seen[0].timeline, ActionKind.RECEIVE):
        got[span.rank, span.action.value, span.action.microbatch, span.action.gradient] += span.bytes
    readers = {crossing.value: len(crossing.consumers) for crossing in seen[0].crossings}
    assert {gradient for *_, gradient in got} == {True, False}
    for (rank, value, microbatch, gradient), size in got.items():
        assert value is not None and microbatch is not None
        assert size == seen[rank].local[value, microbatch] * (readers[value] if gradient else 1)
    pieces = {seen[rank].local["up.0.5/relu", 0] for rank in range(6)}
    assert len(pieces) > 1  # somebody has a part of it


@pytest.mark.parametrize("name", subsets.one_in(2, PLANS))
def test_nothing_travels_uncounted(name: str) -> None:
    """Statistics, operators that are split, buckets: what was sent is what the transports were handed."""
    seen = unet(name)
    timeline = seen[0].timeline
    assert timeline.sent() == tuple(worker.handed for worker in seen)
    inside = [
        span for span in timeline.spans if span.action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD) and span.bytes
    ]
    assert bool(inside) == (name != "chain") and all(span.waited > 0 for span in inside)


def test_a_reduce_has_the_bytes_of_its_bucket() -> None:
    model = mlp(6, 8, 4)
    for timeline in workers(lambda job: job.step(batch_of(8)).timeline, model, "data=2"):
        reduced = [(span.rank, span.bytes) for span in only(timeline, ActionKind.REDUCE)]
        assert sorted(reduced) == [(rank, 8 * sum(p.numel() for p in model.parameters())) for rank in range(2)]
        assert timeline.sent() == tuple(size for _, size in sorted(reduced))


def test_alone_nothing_is_sent() -> None:
    def of_one(job: Job) -> Timeline:
        return job.step(batch_of(8)).timeline

    (timeline,) = workers(of_one, nn.Sequential(nn.Linear(6, 4)).double(), "data=1")
    assert timeline.sent() == (0,) and timeline.spans
