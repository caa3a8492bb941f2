"""Codecs at work in a reducer: what is summed by them and what is not, in which order, in how many bytes."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.program.program import GradientBucket
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.transport.c10d import C10dTransport
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support.workers.compressed_sums import (
    KINDS,
    TOGETHER,
    Net,
    Tensors,
    assert_close,
    backward,
    buckets,
    copied,
    drawn,
    entries,
    net,
    residuals_of,
    train,
    trained,
)
from tests.support.workers.thread_transport import LocalTransport, run_local


class Choosy(nn.Module):
    """Uses its second layer on some ranks only, or on none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(6, 7, dtype=torch.float64), nn.Linear(7, 8, dtype=torch.float64)
        for i, parameter in enumerate(self.parameters()):
            parameter.data = drawn(i, *parameter.shape)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return self.seldom(x).square().sum() if both else x.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_nobody_used_have_no_gradient_and_keep_their_memory(kind: str) -> None:
    names = ("seldom.bias", "seldom.weight", "always.bias", "always.weight")
    used = [{0, 1, 2}, {1}, set(), {2}]

    def work(transport: LocalTransport) -> tuple[list[Tensors], list[Tensors], list[Tensors]]:
        model, own = Choosy(), KINDS[kind]()
        shares, sums, memories = list[Tensors](), list[Tensors](), list[Tensors]()
        parameters = dict(model.named_parameters())
        reducer = AllReducer(buckets(3, [names]), parameters, names[:2], transport, own, range(3))
        for step, ranks in enumerate(used):
            model.zero_grad(set_to_none=True)
            reducer.begin_last_backward()
            model(drawn(10 * step + transport.rank, 4, 6), transport.rank in ranks).backward()
            shares.append(gradients(model))
            reducer.launch_remaining()
            reducer.wait_bucket("stage0.0")
            sums.append(gradients(model))
            memories.append(copied(residuals_of(own)))
        return shares, sums, memories

    runs = run_local(3, work)
    for _, sums, memories in runs:
        assert [set(each) for each in sums] == [set(names if ranks else names[2:]) for ranks in used]
        for name in set(names[:2]) & memories[1].keys():
            torch.testing.assert_close(memories[2][name], memories[1][name], rtol=0, atol=1e-12)
    slack = {"bfloat16": 2**-6, "float16": 2**-9}.get(kind, 0.0)  # the terms of the sum partly cancel
    for name in names:
        entered = sum(share.get(name, 0.0) for shares, _, _ in runs for share in shares)
        sent = sum(total.get(name, 0.0) for total in runs[0][1])
        owed = sum(memories[-1].get(name, 0.0) for _, _, memories in runs)
        torch.testing.assert_close(sent + owed, entered, rtol=slack, atol=10 * slack + 1e-9)


def gradients(model: nn.Module) -> Tensors:
    return copied({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_sums_over_the_replicas_of_one_stage_are_compressed(kind: str) -> None:
    """Ranks 0 and 2 are replicas, as are 1 and 3; a weight is tied between all four, of which 3 is silent."""
    tied = GradientBucket("tied0-1.0", (0, 1, 2, 3), ("first.weight",), frozenset({3}))

    def work(transport: LocalTransport) -> tuple[Tensors, Tensors]:
        model, replicas = net(), ((0, 2), (1, 3))[transport.rank % 2]
        parameters = dict(model.named_parameters())
        own = GradientBucket("stage.0", replicas, ("second.weight", "conv.weight"))
        reducer = AllReducer([own, tied], parameters, (), transport, KINDS[kind](), replicas)
        reducer.begin_last_backward()
        backward(model, 0, transport.rank, 4)
        shares = {n: parameters[n].grad.clone() for n in ("second.weight", "first.weight")}
        reducer.launch_remaining()
        for bucket in (own, tied):
            reducer.wait_bucket(bucket.name)
        return {n: parameters[n].grad.clone() for n in shares}, shares

    runs = run_local(4, work)
    total = sum(shares["first.weight"] for _, shares in runs[:3])
    for rank, (sums, _) in enumerate(runs):
        torch.testing.assert_close(sums["first.weight"], total, rtol=0, atol=1e-12)
        pair = runs[rank % 2][1]["second.weight"] + runs[rank % 2 + 2][1]["second.weight"]
        assert torch.allclose(sums["second.weight"], pair, rtol=0, atol=1e-12) == (kind == "plain")


SIZES = {name: parameter.numel() for name, parameter in Net().named_parameters()}
SHAPES = {name: parameter.flatten(1).shape for name, parameter in Net().named_parameters() if parameter.dim() > 1}


def of_rounded(ranks: int, names: tuple[str, ...]) -> int:
    elements = sum(SIZES[name] for name in names)
    part = ceil(elements / ranks)
    return 2 * elements if ranks == 2 else 2 * ranks * part


def of_scaled(ranks: int, names: tuple[str, ...]) -> int:
    """Rounded, and a power of two in each message."""
    return of_rounded(ranks, names) + (2 if ranks == 2 else 2 * ranks)


def of_low_rank(ranks: int, names: tuple[str, ...]) -> int:
    sizes = {n: SIZES[n] for n in names}
    sizes |= {n: min(2 * sum(SHAPES[n]), SIZES[n]) for n in names if n in SHAPES}
    return 8 * sum(sizes.values())


FORMULAS: dict[str, Callable[[int, tuple[str, ...]], int]] = {
    "plain": lambda ranks, names: 8 * sum(SIZES[name] for name in names),
    "bfloat16": of_rounded,
    "float16": of_scaled,
    "powersgd": of_low_rank,
    "top_k": lambda ranks, names: sum(entries(0.1, SIZES[name]) for name in names) * (8 + 4),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_formula(kind: str, ranks: int) -> None:
    expected = {f"stage0.{i}": FORMULAS[kind](ranks, names) for i, names in enumerate(TOGETHER)}
    for run in trained(KINDS[kind], ranks, 2):
        assert run.bytes == [expected] * 2
        assert run.given == [sum(expected.values())] * 2
        # An all-reduce sends every byte but a rank's own part twice, a gathering all of it to each of the others.
        rounded = 1.0 if ranks == 2 else 2 * (ranks - 1) / ranks
        gathered = {"bfloat16": rounded, "float16": rounded, "top_k": ranks - 1.0}
        leaving = gathered.get(kind, 2 * (ranks - 1) / ranks) * sum(expected.values())
        assert run.sent == [pytest.approx(leaving, abs=2 * len(TOGETHER))] * 2  # rounded down for each sum


class Recording:
    """A transport that notes which collectives are asked for."""

    def __init__(self, transport: LocalTransport, calls: dict[int, list[tuple[str, int]]]) -> None:
        self._transport, self._calls = transport, calls[transport.rank]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if name not in ("all_reduce", "all_gather", "all_to_all"):
            return found

        def asked(what: Any, *rest: Any) -> Any:
            self._calls.append((name, what.numel() if isinstance(what, Tensor) else sum(map(len, what))))
            return found(what, *rest)

        return asked


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_ask_for_all_collectives_in_one_order(kind: str) -> None:
    calls: dict[int, list[tuple[str, int]]] = {rank: [] for rank in range(3)}
    trained(KINDS[kind], 3, 1, wrap=lambda transport: Recording(transport, calls))
    assert calls[0] == calls[1] == calls[2]
    rounds = {"plain": 1, "bfloat16": 2, "float16": 2, "powersgd": 2, "top_k": 1}[kind]
    few = 1 if kind == "powersgd" else 0  # buckets in which there is nothing to compress have one round
    assert len(calls[0]) == rounds * len(TOGETHER) - few
    if kind in ("bfloat16", "float16"):  # all first rounds come before all second ones
        assert [name for name, _ in calls[0]] == ["all_to_all"] * 4 + ["all_gather"] * 4
        power = int(kind == "float16")
        parts = [ceil(sum(SIZES[name] for name in names) / 3) + power for names in TOGETHER]
        assert [elements for _, elements in calls[0]] == [*(3 * part for part in parts), *parts]


@pytest.mark.slow  # forked from a process in which threads went backward, a worker stood still in two runs of six
@pytest.mark.parametrize("kind", KINDS)
def test_processes_sum_as_threads_do(kind: str) -> None:
    def work(_: Any) -> list[Tensors]:
        world = World.join()
        ranks = range(world.size)
        channels = [(a, b) for a in ranks for b in ranks if a != b]
        transport = C10dTransport(world, channels, [tuple(ranks)])
        sums = train(KINDS[kind](), net(), range(2), transport).sums
        transport.barrier()
        transport.close()
        return sums

    runs = fork_workers(work, 3)
    for mine, other in zip(runs, trained(KINDS[kind], 3, 2), strict=True):
        assert_close(mine, other.sums)
        assert all(torch.equal(mine[i][name], runs[0][i][name]) for i in range(2) for name in mine[i])


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_leave_during_the_backward_pass(kind: str) -> None:
    calls: dict[int, list[tuple[str, int]]] = {0: [], 1: []}

    def work(transport: LocalTransport) -> int:
        model = net()
        parameters, own = dict(model.named_parameters()), buckets(2)
        reducer = AllReducer(own, parameters, (), Recording(transport, calls), KINDS[kind](), range(2))
        reducer.begin_last_backward()
        backward(model, 0, transport.rank, 2)
        before = len(calls[transport.rank])
        reducer.launch_remaining()
        for bucket in own:
            reducer.wait_bucket(bucket.name)
        return before

    assert run_local(2, work) == [len(TOGETHER)] * 2
