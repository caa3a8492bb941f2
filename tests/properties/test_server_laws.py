"""Laws of asynchronous parameter servers, whatever the order in which gradients come."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives, named_parameters
from polylane.program.server_assignment import assign_parameters
from polylane.runtime.sync.parameter_server.messages import Channel, MessageHead, MessageKind, open_local_channel
from polylane.runtime.sync.parameter_server.packing import ServerShard, plan_server_shards
from polylane.runtime.sync.parameter_server.server import ParameterServer, ServedWorker
from polylane.runtime.sync.parameter_server.weights import build_weights
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify, mlp, sgd

REPLICAS = 3
CPU = torch.device("cpu")


@cache
def prepared() -> CompiledTraining:
    plan = f"data={REPLICAS},servers=1,staleness=any"
    return compile_training(mlp(6, 4), build_objectives(classify, sgd, None), batch_of(8), plan)


class Workers:
    """The workers' ends of their lines to one server, which is driven by hand."""

    def __init__(self, staleness: int | str) -> None:
        given, (share,) = prepared(), assign_parameters(prepared().partitions, prepared().plan)
        self.model = dict(named_parameters(given.model, []))
        own = plan_server_shards(given, share, self.model)
        ends = {trade.rank: open_local_channel(0, "", "") for trade in own}
        clients = {trade.rank: ServedWorker(trade, ends[trade.rank][1]) for trade in own}
        begin = partial(build_weights, given, None, CPU)
        self.server = ParameterServer(0, 0, clients, ["loss"], staleness, begin, CPU, ())
        self.lines: dict[int, tuple[ServerShard, Any]] = {trade.rank: (trade, ends[trade.rank][0]) for trade in own}
        self.server.start()
        trade, line = self.lines[0]
        line.put(MessageHead(MessageKind.WEIGHTS), trade.full_packings[0].pack(self.model))
        line.get(lambda head: ())
        self.clocks, self.versions, self.waiting = [0] * REPLICAS, [0] * REPLICAS, set[int]()

    def push(self, replica: int) -> None:
        trade, line = self.lines[replica]
        packing = trade.gradient_packings["loss"]
        flags = bytes(len(packing.names) * [1])
        head = MessageHead(MessageKind.GRADIENTS, 0, self.clocks[replica], self.versions[replica], flags=flags)
        line.put(head, packing.pack(self.model))
        self.clocks[replica] += 1
        self.waiting.add(replica)
        until(lambda: len(self.server.log) == sum(self.clocks))
        self.take()

    def take(self) -> None:
        """Take the answers that are there."""
        with self.server._lock:  # it is between two messages
            answered = {r for r in self.waiting if not self.lines[r][1]._inbox.empty()}
        for replica in answered:
            self.versions[replica] = get(self.lines[replica][1]).version
        self.waiting -= answered

    def end(self, replica: int) -> None:
        self.lines[replica][1].put(MessageHead(MessageKind.END))


def get(line: Channel) -> MessageHead:
    return line.get(lambda head: ())[0]


def until(true: Any) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def too_far(workers: Workers, replica: int, live: Iterable[int], staleness: int | str) -> bool:
    slowest = min(workers.clocks[r] for r in live)
    return isinstance(staleness, int) and workers.clocks[replica] - slowest > staleness


@settings(max_examples=subsets.examples(40), deadline=None)
@given(st.one_of(st.integers(1, 3), st.just("any")), st.lists(st.integers(0, REPLICAS - 1), max_size=25))
def test_who_waits(staleness: int | str, order: list[int]) -> None:
    """Whatever the order: a replica waits just as long as it is too far ahead of the slowest, which never waits."""
    workers = Workers(staleness)
    for replica in order:
        if replica in workers.waiting:
            continue  # it has no new weights to compute with
        workers.push(replica)
        every = range(REPLICAS)
        assert workers.waiting == {r for r in every if too_far(workers, r, every, staleness)}
    updates = list(workers.server.log)
    assert [update.version for update in updates] == list(range(1, len(updates) + 1))
    for update in updates:
        assert 0 <= update.staleness < update.version
        if isinstance(staleness, int):
            assert update.steps_ahead <= staleness
            assert update.staleness <= (REPLICAS - 1) * (2 * staleness + 1)
    live = set(range(REPLICAS))
    for replica in sorted(live, key=lambda r: workers.clocks[r]):  # who has ended holds nobody up
        workers.end(replica)
        live.discard(replica)
        until(lambda ended=replica: ended in workers.server._ended_ranks)
        workers.take()
        assert workers.waiting - {replica} == {r for r in live if too_far(workers, r, live, staleness)}
    workers.server.join()
    assert workers.server.error is None
