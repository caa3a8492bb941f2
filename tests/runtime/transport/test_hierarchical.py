"""Collectives that climb from workers to hosts and come down again: parts, columns, bytes, and the plain result."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time

import pytest
import torch

from polylane.errors import PeerLost
from polylane.runtime.transport.hierarchical import (
    HierarchicalConnections,
    HierarchicalTransport,
    HostTree,
    cross_host_groups,
    group_by_host,
)
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.transport.shared_memory.rendezvous import HostRendezvous, connect_hub
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support import subsets

torch.set_num_threads(1)

HOSTS = {"2 x 2": "aabb", "interleaved": "abab", "1 + 3": "abbb", "apart": "abcd", "2 + 1 + 1": "aabc"}


def hierarchical_for(world: World, hosts: str) -> HierarchicalConnections:
    """What makes the transports of workers on several hosts, all of which are this one; every worker calls it.

    Args:
        world: this worker among all.
        hosts: a letter for the host of every rank.
    """
    meeting = HostRendezvous.meet_workers(world)
    hub = connect_hub(world, meeting, hosts)
    meeting.stop_listening()
    assert isinstance(hub, MessageHub), hub
    return HierarchicalConnections(world, hub, hosts)


def test_parts_and_rings():
    assert group_by_host((3, 0, 1, 2), "abab") == [(0, 2), (1, 3)]
    assert cross_host_groups([(0, 2), (1, 3)]) == [(0, 1), (2, 3)]
    assert cross_host_groups([(0,), (1, 2, 3)]) == [(0, 1)]


def test_bytes_on_the_wire():
    """Inside a host of m, 2 n (m - 1) / m from each; between h hosts, 2 n / m (h - 1) / h."""
    even = HostTree((0, 1), 0, (0, 2), True)
    assert even.part_sizes(101) == [50, 51]
    assert even.bytes_sent(100, 8) == 8 * (50 + 50) + 2 * 400 // 2
    leader, other = HostTree((1, 2, 3), 0, (0, 1), False), HostTree((1, 2, 3), 1, (), False)
    assert leader.bytes_sent(100, 4) == 4 * 200 + 400 and other.bytes_sent(100, 4) == 400


@pytest.mark.parametrize("hosts", subsets.one_in(2, [pytest.param(hosts, id=name) for name, hosts in HOSTS.items()]))
def test_sums_are_the_plain_sum(hosts: str):
    generator = torch.Generator().manual_seed(3)
    sizes = (1, 3, 1000, 70_001)
    values = [torch.randn(4, size, dtype=torch.float64, generator=generator) for size in sizes]

    def worker(context: WorkerContext) -> tuple[list[float], float]:
        groups = [(0, 1, 2, 3), (0, 1), (1, 2, 3)]
        pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
        transport = hierarchical_for(context.world, hosts)(context.world, pairs, groups)
        assert isinstance(transport, HierarchicalTransport)
        wrong, rank = list[float](), context.rank
        sending = [transport.send(value[rank], (rank + 1) % 4) for value in values]
        coming = [transport.receive((size,), torch.float64, (rank - 1) % 4) for size in sizes]
        mine = {group: [value[rank].clone() for value in values] for group in groups if rank in group}
        sums = [transport.all_reduce(each, group) for group, own in mine.items() for each in own]
        for pending in reversed(sums):
            pending.wait()
        for group, own in mine.items():
            for got, value in zip(own, values, strict=True):
                wrong.append(float((got - value[list(group)].sum(0)).abs().max()))
        for got, value, sent in zip(coming, values, sending, strict=True):
            wrong.append(float((got.wait() - value[(rank - 1) % 4]).abs().max()))
            sent.wait()
        gathered = transport.all_gather(torch.tensor([float(rank)]), range(4)).wait()
        transport.barrier()
        transport.close()
        return wrong, float((gathered - torch.arange(4.0)).abs().max())

    for wrong, gathered in fork_workers(worker, 4):
        assert max(wrong) < 1e-12 and gathered == 0


@pytest.mark.parametrize("hosts", subsets.one_in(2, [pytest.param(hosts, id=name) for name, hosts in HOSTS.items()]))
def test_other_collectives_are_the_plain_ones(hosts: str):
    """Parts of different sizes, one of them empty, in an order of the ranks that is not theirs."""
    values = torch.randn(4, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    order, sizes = (2, 0, 3, 1), (300, 0, 500, 200)
    own_size = dict(zip(order, sizes, strict=True))
    starts = dict(zip(order, (0, 300, 300, 800), strict=True))

    def worker(context: WorkerContext) -> list[float]:
        rank, everyone = context.rank, (0, 1, 2, 3)
        transport = hierarchical_for(context.world, hosts)(context.world, [], [everyone])
        part = slice(starts[rank], starts[rank] + own_size[rank])
        # Started together, and waited for in another order.
        gathering = transport.all_gather(values[0, part].clone(), order, sizes)
        scattering = transport.reduce_scatter(values[rank].clone(), order, sizes)
        target = [values[rank, ::2].clone() if rank == 2 else torch.zeros(500, dtype=torch.float64) for _ in range(2)]
        sending = [transport.broadcast(tensor, 2, everyone) for tensor in target]
        equal_parts = transport.all_gather(values[rank, :7].clone(), everyone)
        wrong = [values[2, ::2] - pending.wait() for pending in reversed(sending)]
        wrong += [values[2, ::2] - tensor for tensor in target]
        wrong.append(values[:, :7].flatten() - equal_parts.wait())
        wrong.append(values.sum(0)[part] - scattering.wait())
        wrong.append(values[0] - gathering.wait())
        transport.barrier()
        transport.close()
        return [float(difference.abs().max()) if difference.numel() else 0.0 for difference in wrong]

    for wrong in fork_workers(worker, 4):
        assert max(wrong) < 1e-12


def test_closed_and_opened_again():
    def worker(context: WorkerContext) -> list[float]:
        connect, found = hierarchical_for(context.world, "aabb"), list[float]()
        for _ in range(3):
            first, second = (connect(context.world, groups=[range(4), (0, 1), (2, 3)]) for _ in range(2))
            near = (0, 1) if context.rank < 2 else (2, 3)
            for transport in (first, second):
                found += [transport.all_reduce(torch.ones(5), group).wait()[0].item() for group in (range(4), near)]
                transport.barrier()
                transport.close()
        return found

    assert fork_workers(worker, 4) == [[4.0, 2.0] * 6] * 4


@pytest.mark.parametrize("death", ["an error", "a signal"])
def test_a_peer_that_dies_while_it_sums_is_seen_at_once(death: str):
    """Its sum can never end: the others have not asked for it. That must not keep it, and its connections, alive."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fork_ = multiprocessing.get_context("fork")
    heard = fork_.SimpleQueue()

    def live(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        world = World.join()
        transport = hierarchical_for(world, "aabb")(world, [(1, rank) for rank in (0, 2, 3)], [range(4)])
        transport.barrier()
        if rank == 1:
            pending = transport.all_reduce(torch.ones(1000), range(4))
            time.sleep(0.3)  # by now its thread waits for the others
            if death == "a signal":
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(2)  # what is raised here is nobody's to read
            raise RuntimeError(str(pending))
        try:
            transport.receive((3,), torch.float32, 1).wait()
        except PeerLost as lost:
            heard.put((rank, lost.peer))
            os._exit(0)

    workers = [fork_.Process(target=live, args=(rank,)) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    late = [worker for worker in workers if worker.is_alive()]
    for worker in late:
        worker.kill()
    assert not late
    assert sorted(heard.get() for _ in range(3)) == [(0, 1), (2, 1), (3, 1)]
