"""Shared memory between forked workers: all that holds over gloo, random programs, many and large messages, death."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from polylane.errors import PeerLost, PolylaneError
from polylane.runtime.transport import c10d
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.transport.shared_memory import transport as shared_memory
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.distributed import test_transport
from tests.support import subsets
from tests.support.workers.thread_transport import LocalTransport, run_local

torch.set_num_threads(1)


def connected(world: World, *arguments: Any, **options: Any) -> Transport:
    transport = choose_transport(world)(world, *arguments, **options)
    assert world.size == 1 or isinstance(transport, shared_memory.SharedMemoryTransport)
    return transport


def everyone(context: WorkerContext) -> Transport:
    ranks = range(context.world.size)
    return connected(context.world, [(a, b) for a in ranks for b in ranks if a != b], [ranks])


ALIKE: list[Callable[[], None]] = [
    test_transport.test_every_dtype_travels,
    test_transport.test_every_layout_travels,
    test_transport.test_messages_come_in_the_order_of_asking,
    test_transport.test_large_messages_in_both_directions_do_not_block,
    test_transport.test_a_send_nobody_waits_for_arrives,
    test_transport.test_transports_with_tags_do_not_mix,
    test_transport.test_sums_of_several_groups_at_once,
    test_transport.test_a_strided_sum_is_in_place,
    test_transport.test_objects,
    test_transport.test_traffic_is_counted,
    test_transport.test_what_was_not_declared_is_refused,
]


@pytest.mark.parametrize("law", ALIKE, ids=lambda law: law.__name__)
def test_it_is_as_over_gloo(law: Callable[[], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(test_transport, "C10dTransport", connected)
    law()


def test_every_summable_dtype():
    def worker(context: WorkerContext) -> bool:
        transport = everyone(context)
        dtypes = [*test_transport.FLOATS, *test_transport.COMPLEX, torch.int64, torch.int32, torch.int8, torch.uint8]
        tensors = [test_transport.sample(dtype) for dtype in dtypes]
        tensors += [torch.ones(70_000, dtype=dtype) for dtype in dtypes]
        sums = [transport.all_reduce(tensor.clone(), range(3)) for tensor in tensors]
        return all(torch.equal(sum_.wait(), tensor * 3) for sum_, tensor in zip(sums, tensors, strict=True))

    assert fork_workers(worker, 3) == [True] * 3


# --------------------------------------------------------------------------------------------------- random programs

KINDS = ("send", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
ELEMENTS = (0, 1, 7, 300, 9_000, 40_000, 90_000, 400_000)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.uint8)


@dataclass(frozen=True)
class Step:
    """One operation of a program that all ranks run."""

    kind: str
    ranks: tuple[int, ...]
    number: int
    dtype: torch.dtype
    sizes: tuple[int, ...]  # for each of ranks
    transport: int

    def value(self, rank: int, elements: int, more: int = 0) -> torch.Tensor:
        """What a rank gives."""
        generator = torch.Generator().manual_seed(self.number * 1000 + rank * 10 + more)
        return (torch.randn(elements, generator=generator, dtype=torch.float64) * 50).to(self.dtype)

    def ask(self, transport: Transport) -> Any:
        """Begin it at one of its ranks."""
        rank, whole = transport.rank, sum(self.sizes)
        index = self.ranks.index(rank)
        if self.kind == "send":
            if index == 0:
                return transport.send(self.value(rank, whole), self.ranks[1])
            return transport.receive((whole,), self.dtype, self.ranks[0])
        if self.kind == "all_reduce":
            return transport.all_reduce(self.value(rank, whole), self.ranks)
        if self.kind == "all_gather":
            return transport.all_gather(self.value(rank, self.sizes[index]), self.ranks, self.sizes)
        if self.kind == "reduce_scatter":
            return transport.reduce_scatter(self.value(rank, whole), self.ranks, self.sizes)
        if self.kind == "broadcast":
            return transport.broadcast(self.value(rank, whole), self.ranks[0], self.ranks)
        pieces = [self.value(rank, size, i) for i, size in enumerate(self.sizes)]
        return transport.all_to_all(pieces, [(self.sizes[index],)] * len(self.ranks), self.ranks)


def groups(size: int) -> list[tuple[int, ...]]:
    """Groups that overlap."""
    found = [tuple(range(size)), (0, 1), (size - 2, size - 1), (0, size - 1), tuple(range(1, size))]
    return [group for group in dict.fromkeys(found) if len(group) > 1]


def program(seed: int, size: int, length: int = 25) -> list[Step]:
    draw = random.Random(seed)
    steps = []
    for number in range(length):
        kind = draw.choice(KINDS)
        ranks = list(draw.choice(groups(size)))
        draw.shuffle(ranks)
        members = tuple(ranks[:2] if kind == "send" else ranks)
        dtype = draw.choice(DTYPES)
        sizes = tuple(draw.choice(ELEMENTS) // len(members) for _ in members)
        steps.append(Step(kind, members, seed * 100 + number, dtype, sizes, draw.randrange(2)))
    return steps


def played(steps: Sequence[Step], transports: Sequence[Transport], seed: int) -> list[Any]:
    """Run a rank's steps: a few at a time, merged at random from those of each transport, and waited for at random."""
    rank = transports[0].rank
    draw = random.Random(seed * 100 + rank)
    pending: list[tuple[int, Any]] = []
    results: dict[int, Any] = {}
    for first in range(0, len(steps), 6):
        some = [step for step in steps[first : first + 6] if rank in step.ranks]
        queues = [[step for step in some if step.transport == i] for i in range(len(transports))]
        while any(queues):
            step = draw.choice([queue for queue in queues if queue]).pop(0)
            pending.append((step.number, step.ask(transports[step.transport])))
        for _ in range(draw.randrange(len(pending) + 1) if first + 6 < len(steps) else len(pending)):
            number, waiting = pending.pop(draw.randrange(len(pending)))
            results[number] = waiting.wait()
    return [results[number] for number in sorted(results)]


SEEDS = range(6)


@cache
def local_results(size: int) -> list[list[list[Any]]]:
    def in_order(transport: LocalTransport) -> list[list[Any]]:
        return [
            [step.ask(transport).wait() for step in program(seed, size) if transport.rank in step.ranks]
            for seed in SEEDS
        ]

    return run_local(size, in_order)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("size", subsets.one_in(3, [2, 3, 4], first=1))
def test_random_programs_have_the_same_results(size: int):
    expected = local_results(size)

    def worker(context: WorkerContext) -> list[bool]:
        shared_memory.IN_TURNS = 1 << 20  # that every way of summing comes up
        ranks = range(size)
        connect = choose_transport(context.world)
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        transports = [connect(context.world, pairs, groups(size)) for _ in range(2)]
        found = []
        for index, seed in enumerate(SEEDS):
            found.append(same(expected[context.rank][index], played(program(seed, size), transports, seed)))
        for transport in transports:
            transport.close()
        return found

    assert fork_workers(worker, size) == [[True] * len(SEEDS)] * size


@pytest.mark.parametrize("size", subsets.one_in(2, [2, 3], first=1))
def test_gloo_has_the_same_results(size: int):
    """To rounding: it sums in another order."""
    expected = local_results(size)

    def worker(context: WorkerContext) -> list[str]:
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        transport = c10d.C10dTransport(context.world, pairs, groups(size))
        found = []
        for index, seed in enumerate(SEEDS[:3]):
            mine = [step for step in program(seed, size) if context.rank in step.ranks]
            for step, wanted in zip(mine, expected[context.rank][index], strict=True):
                got = step.ask(transport).wait()
                for a, b in zip(*([x] if not isinstance(x, list) else x for x in (got, wanted)), strict=True):
                    close = 0.02 if step.dtype == torch.bfloat16 else 1e-5
                    if a.dtype != b.dtype or not torch.allclose(a, b, rtol=close, atol=close * 50):
                        found.append(f"{step} {a} {b}")
        transport.barrier()
        transport.close()
        return found

    assert fork_workers(worker, size) == [[]] * size


def test_rounds_of_random_sizes_arrive_whole():
    """A value read before it was written, or overwritten before it was read, would change a checksum."""

    def worker(context: WorkerContext) -> bool:
        transport, draw = everyone(context), random.Random(5)
        peer = (context.rank + 1) % 3
        for number in range(300):
            elements = draw.choice((100, 17_000, 40_000, 100_000))
            value = torch.full((elements,), float(number + context.rank))
            transport.send(value, peer)
            total = transport.all_reduce(value, range(3))
            before = transport.receive((elements,), torch.float32, (context.rank - 1) % 3).wait()
            assert bool((before == number + (context.rank - 1) % 3).all())
            assert bool((total.wait() == 3 * number + 3).all())
        return True

    assert fork_workers(worker, 3) == [True] * 3


# ---------------------------------------------------------------------------------------------------- many and large


def test_a_thousand_sends_that_nobody_has_asked_for_yet():
    def worker(context: WorkerContext) -> bool:
        transport, peer = everyone(context), 1 - context.rank
        for number in range(1000):
            transport.send(torch.full((50 + 30 * number,), float(number)), peer)
        transport.barrier()
        received = [transport.receive((50 + 30 * n,), torch.float32, peer).wait() for n in range(1000)]
        transport.close()
        return all(bool((tensor == number).all()) for number, tensor in enumerate(received))

    assert fork_workers(worker, 2) == [True, True]


def test_64_mb_in_both_directions():
    def worker(context: WorkerContext) -> tuple[float, float]:
        transport, peer = everyone(context), 1 - context.rank
        mine = torch.full((16 << 20,), float(context.rank + 1))
        sending, total = transport.send(mine, peer), transport.all_reduce(mine, (0, 1))
        received = transport.receive(mine.shape, mine.dtype, peer).wait()
        sending.wait()
        return received.mean().item(), total.wait().mean().item()

    assert fork_workers(worker, 2) == [(2.0, 3.0), (1.0, 3.0)]


def test_more_ranks_than_cores():
    """Who waits does not compute."""

    def worker(context: WorkerContext) -> tuple[bool, float]:
        transport = everyone(context)
        for number in range(20):
            for elements in (3, 30_000):
                total = transport.all_reduce(torch.full((elements,), float(number)), range(8)).wait()
                assert bool((total == 8 * number).all())
        transport.barrier()
        before = time.process_time()
        if context.rank == 0:
            time.sleep(0.5)
        transport.barrier()
        return True, time.process_time() - before

    assert all(well and seconds < 0.1 for well, seconds in fork_workers(worker, 8))


# ----------------------------------------------------------------------------------------------------------- choosing


def test_the_choice(monkeypatch: pytest.MonkeyPatch):
    def worker(context: WorkerContext) -> type:
        return type(choose_transport(context.world)(context.world, [(0, 1)], [(0, 1)]))

    assert fork_workers(worker, 2) == [shared_memory.SharedMemoryTransport] * 2
    for asked, kind in (("gloo", c10d.C10dTransport), ("shared_memory", shared_memory.SharedMemoryTransport)):
        monkeypatch.setenv("POLYLANE_TRANSPORT", asked)
        assert fork_workers(worker, 2) == [kind] * 2
    monkeypatch.setenv("POLYLANE_TRANSPORT", "pigeon")
    with pytest.raises(PolylaneError, match="POLYLANE_TRANSPORT=pigeon is no transport: say gloo or shared_memory"):
        fork_workers(worker, 2)


def test_a_choice_that_cannot_be(monkeypatch: pytest.MonkeyPatch):
    def apart(context: WorkerContext) -> type:
        from polylane.runtime.transport.shared_memory import rendezvous

        monkeypatch.setattr(rendezvous, "host_identity", lambda: ("this", str(context.rank)))
        return type(choose_transport(context.world)(context.world, [(0, 1)], [(0, 1)]))

    assert fork_workers(apart, 2) == [c10d.C10dTransport] * 2
    monkeypatch.setenv("POLYLANE_TRANSPORT", "shared_memory")
    with pytest.raises(PolylaneError, match="shared_memory cannot be: ranks 0 and 1 are on different hosts"):
        fork_workers(apart, 2)


def test_if_one_cannot_connect_nobody_does():
    def worker(context: WorkerContext) -> type:
        from polylane.runtime.transport.shared_memory import rendezvous

        rendezvous.CONNECT_SECONDS = 0.2
        if context.rank == 1:
            rendezvous._peer_user = lambda connection: os.getuid() + 1  # the system says it is somebody else
        return type(choose_transport(context.world)(context.world, [(0, 1)], [(0, 1)]))

    assert fork_workers(worker, 3) == [c10d.C10dTransport] * 3


def test_if_one_cannot_listen_all_hear_of_it(monkeypatch: pytest.MonkeyPatch):
    def worker(context: WorkerContext) -> type:
        if context.rank == 1:
            monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
        return type(choose_transport(context.world)(context.world, [(0, 1)], [(0, 1)]))

    assert fork_workers(worker, 3) == [c10d.C10dTransport] * 3
    monkeypatch.setenv("POLYLANE_TRANSPORT", "shared_memory")
    with pytest.raises(PolylaneError, match="rank 1: its system lets it listen at no local socket"):
        fork_workers(worker, 3)


def test_different_choices_are_refused():
    def worker(context: WorkerContext) -> None:
        os.environ["POLYLANE_TRANSPORT"] = "gloo" if context.rank else ""
        choose_transport(context.world)

    with pytest.raises(PolylaneError, match="is not set at rank 0 and gloo at rank 1"):
        fork_workers(worker, 2)


def test_closed_and_opened_again():
    def worker(context: WorkerContext) -> list[float]:
        connect = choose_transport(context.world)
        found = []
        for _ in range(3):
            first, second = connect(context.world, groups=[(0, 1)]), connect(context.world, groups=[(0, 1)])
            found.append(second.all_reduce(torch.ones(1), (0, 1)).wait().item())
            first.close()
            found.append(second.all_reduce(torch.ones(1), (0, 1)).wait().item())
            second.close()
        return found

    assert fork_workers(worker, 2) == [[2.0] * 6] * 2


# -------------------------------------------------------------------------------------------------------------- death


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for temporary files that no other run on this machine writes to; of a short name, for sockets."""
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def left_behind() -> set[str]:
    return {str(path) for path in Path(tempfile.gettempdir()).iterdir() if "polylane" in path.name}


@pytest.mark.parametrize("doing", ["receive", "send", "sum", "large sum", "object", "barrier"])
def test_a_peer_that_dies_is_named_at_once(doing: str):
    def worker(context: WorkerContext) -> None:
        transport = everyone(context)
        transport.all_reduce(torch.ones(100_000), range(3)).wait()
        transport.barrier()
        if context.rank == 1:
            context.send_message({"pid": os.getpid()})
            time.sleep(60)
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            while True:
                wait_for_the_other(transport, doing)
        context.send_message({"peer": caught.value.peer, "seconds": time.monotonic() - start})
        time.sleep(0.3)

    heard: list[dict[str, Any]] = []
    killed: list[float] = []

    def listen(rank: int, content: dict[str, Any]) -> None:
        if "pid" in content:
            time.sleep(0.05)
            os.kill(content["pid"], signal.SIGKILL)
            killed.append(time.monotonic())
        else:
            heard.append({**content, "after": time.monotonic() - killed[0]})

    before = left_behind()
    with pytest.raises(Exception, match="worker 1 failed: it was killed by SIGKILL"):
        fork_workers(worker, 3, listen)
    # The parent may have ended the survivors before they could speak.
    assert all(content["peer"] == 1 and content["after"] < 1 for content in heard)
    assert left_behind() == before


def wait_for_the_other(transport: Transport, doing: str) -> None:
    if doing == "receive":
        transport.receive((10,), torch.float32, 1).wait()
    elif doing == "send":
        transport.send(torch.ones(100_000), 1).wait()
    elif doing == "sum":
        transport.all_reduce(torch.ones(3), range(3)).wait()
    elif doing == "large sum":
        transport.all_reduce(torch.ones(100_000), range(3)).wait()
    elif doing == "object":
        transport.all_gather_object(1)
    else:
        transport.barrier()


def test_nothing_is_left_when_all_are_killed():
    def worker(context: WorkerContext) -> None:
        transport = everyone(context)
        transport.send(torch.ones(1_000_000), (context.rank + 1) % 2)
        transport.barrier()
        context.send_message({"pid": os.getpid()})
        time.sleep(60)

    pids: list[int] = []

    def listen(rank: int, content: dict[str, Any]) -> None:
        pids.append(content["pid"])
        if len(pids) == 2:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    before = left_behind()
    with pytest.raises(Exception, match="killed by SIGKILL"):
        fork_workers(worker, 2, listen)
    assert left_behind() == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
