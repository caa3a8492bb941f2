"""The staged transport is as the one below it: here the device that it copies from and to is the CPU itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polylane.runtime.transport import protocol
from polylane.runtime.transport.c10d import C10dTransport
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.transport.staged import HostStaging, StagedConnections, StagedTransport
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from tests.distributed import test_shared_memory, test_transport

torch.set_num_threads(1)

CPU = torch.device("cpu")


@pytest.mark.parametrize("law", test_shared_memory.ALIKE, ids=lambda law: law.__name__)
def test_it_is_as_over_gloo(law: Callable[[], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(test_transport, "C10dTransport", StagedConnections(C10dTransport, CPU))
    law()


def test_every_collective_is_as_in_the_transport_below():
    def run(transport: protocol.Transport) -> list[Any]:
        rank, ranks = transport.rank, (0, 1, 2)
        own = torch.arange(6.0) + 10 * rank
        target = own.reshape(2, 3).t()  # strided: written to where it is
        pieces = [own[: peer + 1].clone() for peer in ranks]
        found = [
            transport.all_gather(own[: rank + 1], (2, 0, 1), (3, 1, 2)).wait(),
            transport.reduce_scatter(own, ranks, (1, 2, 3)).wait(),
            transport.broadcast(target, 1, ranks).wait(),
            *transport.all_to_all(pieces, [(rank + 1,)] * 3, ranks).wait(),
            transport.all_reduce(own.clone(), (rank,)).wait(),
            transport.broadcast(own.clone(), rank, (rank,)).wait(),
            transport.all_reduce(torch.empty(0), ranks).wait(),
        ]
        counted = transport.counters
        transport.barrier()
        return [found, target, transport.all_gather_object(rank), counted.given, counted.messages.total()]

    def worker(context: WorkerContext) -> tuple[list[Any], list[Any]]:
        world, ranks = context.world, (0, 1, 2)
        channels = [(a, b) for a in ranks for b in ranks if a != b]
        plain = choose_transport(world)
        arguments = channels, [ranks, *[(rank,) for rank in ranks]]
        return run(plain(world, *arguments)), run(StagedConnections(plain, CPU)(world, *arguments))

    for inner, staged in fork_workers(worker, 3):
        torch.testing.assert_close(staged, inner, rtol=0, atol=0)


def test_the_own_piece_of_an_exchange_stays_where_it_is():
    def worker(context: WorkerContext) -> bool:
        transport = StagedConnections(C10dTransport, CPU)(context.world, [(0, 1), (1, 0)], [(0, 1)])
        own = [torch.ones(2), torch.zeros(3)]
        back = transport.all_to_all(own, [(2,) if context.rank == 0 else (3,)] * 2, (0, 1)).wait()
        return back[context.rank] is own[context.rank]

    assert fork_workers(worker, 2) == [True, True]


class _RecordedEvent:
    """An event that writes down when it is recorded and waited for."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self, stream: object) -> None:
        self.log.append("recorded")

    def synchronize(self) -> None:
        self.log.append("waited for")


def test_a_copy_to_the_host_is_complete_before_anyone_reads_it(monkeypatch: pytest.MonkeyPatch):
    """On an accelerator: pinned memory, a copy that does not block, an event after it, and a wait for that event."""
    log: list[str] = []
    staging = HostStaging(torch.device("cuda", 0))
    plain = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, pin_memory, **k: (log.append(f"pinned {pin_memory}"), plain(*a, **k))[1]
    )
    monkeypatch.setattr(torch, "Event", lambda device: _RecordedEvent(log))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "the current stream")
    copy = torch.Tensor.copy_

    def noted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        log.append(f"copied, blocking: {not non_blocking}")
        return copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    assert torch.equal(staging.to_host(torch.arange(3.0)), torch.arange(3.0))
    assert log == ["pinned True", "copied, blocking: False", "recorded", "waited for"]
    log.clear()
    assert torch.equal(staging.write_back(torch.ones(3), torch.zeros(3)), torch.ones(3))
    # Into pinned memory of its own first: the inner transport's may be overwritten by another worker.
    assert log == ["pinned True", "copied, blocking: True", "copied, blocking: False"]


def test_it_has_the_interface_of_transports():
    names = [name for name in vars(protocol.Transport) if not name.startswith("_")]
    assert all(hasattr(StagedTransport, name) for name in names)
