"""The shared-memory transport inside one process: hubs over socket pairs, a thread for each rank."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from polylane.errors import PeerLost
from polylane.runtime.transport import c10d, protocol
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.transport.shared_memory.transport import SharedMemoryTransport
from polylane.runtime.workers.world import World
from tests.support.workers.thread_transport import LocalTransport

T = TypeVar("T")

torch.set_num_threads(1)


def hubs(size: int, bound: int = 1 << 30, timeout: float = 20.0) -> list[MessageHub]:
    lines: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low):
            lines[low][high], lines[high][low] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [MessageHub(rank, own, bound, timeout, spins=False) for rank, own in enumerate(lines)]


def over(hub: MessageHub, size: int) -> SharedMemoryTransport:
    world = World(hub.rank, size, hub.rank, torch.device("cpu"), "gloo")
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    return SharedMemoryTransport(hub, world, pairs, [range(size)])


def run(size: int, worker: Callable[[SharedMemoryTransport], T], **options: float) -> list[T]:
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(hub: MessageHub) -> None:
        try:
            transport = over(hub, size)
            results[hub.rank] = worker(transport)
            transport.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(hub,), daemon=True) for hub in hubs(size, **options)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def test_all_transports_are_of_one_interface():
    names = [name for name in vars(protocol.Transport) if not name.startswith("_")]
    assert {"all_gather", "reduce_scatter", "broadcast", "all_to_all"} <= set(names)
    for kind in (SharedMemoryTransport, LocalTransport, c10d.C10dTransport):
        assert all(hasattr(kind, name) for name in names)


def test_what_is_sent_is_what_it_was_then():
    left, right = (over(hub, 2) for hub in hubs(2))
    for size in (2, 20_000, 200_000):
        tensor = torch.zeros(size, requires_grad=True)
        left.send(tensor, 1)
        with torch.no_grad():
            tensor += 1
        received = right.receive((size,), torch.float32, 0).wait()
        assert received.abs().sum() == 0 and not received.requires_grad


def test_a_received_tensor_is_its_owners_alone():
    """Large ones stay where they came: they may be written to, and outlive everything."""
    left, right = (over(hub, 2) for hub in hubs(2))
    received = []
    for value in range(8):
        left.send(torch.full((200_000,), float(value)), 1)
        received.append(right.receive((200_000,), torch.float32, 0).wait().add_(100))
    left.close()
    right.close()
    del left, right
    assert [tensor.unique().tolist() for tensor in received] == [[100.0 + value] for value in range(8)]


def test_blocks_are_used_again():
    left, right = (over(hub, 2) for hub in hubs(2))
    for _ in range(100):
        left.send(torch.ones(100_000), 1)
        right.receive((100_000,), torch.float32, 0).wait()
        right.send(torch.ones(1), 0)
        left.receive((1,), torch.float32, 1).wait()
    assert len(left._hub._blocks._all) < 5


def test_files_are_private_and_nameless():
    left, _ = (over(hub, 2) for hub in hubs(2))
    left.send(torch.ones(100_000), 1)
    (arena,) = left._hub._blocks._arenas
    status = os.fstat(arena.descriptor)
    assert status.st_mode & 0o777 == 0o600 and status.st_nlink == 0 and status.st_uid == os.getuid()


@pytest.mark.parametrize("elements", [3, 50_000])
def test_another_shape_or_dtype_is_refused(elements: int):
    left, right = (over(hub, 2) for hub in hubs(2))
    left.send(torch.zeros(elements), 1)
    said = rf"rank 0 sent torch.float32 \({elements},\), rank 1 expected torch.float64 \({elements},\)"
    with pytest.raises(ValueError, match=said):
        right.receive((elements,), torch.float64, 0).wait()
    one, other = left.all_reduce(torch.zeros(elements, 2), (0, 1)), right.all_reduce(torch.zeros(2, elements), (0, 1))
    for pending, said in ((one, "rank 1 asked for all_reduce of torch.float32"), (other, "rank 0 asked for")):
        with pytest.raises(ValueError, match=said):
            pending.wait()


def test_another_collective_is_refused():
    def worker(transport: SharedMemoryTransport) -> str:
        tensor = torch.zeros(60_000)
        with pytest.raises(ValueError) as caught:
            if transport.rank == 2:
                transport.all_gather(tensor, range(3)).wait()
            else:
                transport.all_reduce(tensor, range(3)).wait()
        return str(caught.value)

    said = run(3, worker)
    assert said[0] == said[1].replace("rank 1 asked", "rank 0 asked")
    assert said[0].startswith("rank 2 asked for all_gather of torch.float32 (60000,), where rank 0 asked for ")


def test_sums_have_the_same_bits_everywhere():
    for elements in (5, 40_001):
        parts = [torch.randn(elements) * 10.0**rank for rank in range(4)]

        def worker(transport: SharedMemoryTransport, parts: list[torch.Tensor] = parts) -> torch.Tensor:
            mine = parts[transport.rank].clone()
            result = transport.all_reduce(mine, (3, 1, 0, 2)).wait()
            assert result.data_ptr() == mine.data_ptr()
            return mine

        expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
        assert all(torch.equal(result, expected) for result in run(4, worker))


def test_a_sender_short_of_memory_waits_for_its_readers():
    def worker(transport: SharedMemoryTransport) -> float:
        if transport.rank == 0:
            for value in range(20):
                transport.send(torch.full((100_000,), float(value)), 1)
            return transport.receive((1,), torch.float32, 1).wait().item()
        time.sleep(0.05)
        held = [transport.receive((100_000,), torch.float32, 0).wait() for _ in range(20)]  # none is let go of
        assert [tensor[0].item() for tensor in held] == list(range(20))
        transport.send(torch.ones(1), 0)
        return 1.0

    assert run(2, worker, bound=1 << 21) == [1.0, 1.0]


def test_a_full_socket_holds_nobody_up():
    """Nobody receives yet; what the socket has no room for goes out while this rank waits for something else."""

    def worker(transport: SharedMemoryTransport) -> list[float]:
        peer = 1 - transport.rank
        pending = [transport.send(torch.full((2000,), float(value)), peer) for value in range(2000)]
        receives = [transport.receive((2000,), torch.float32, peer) for _ in pending]
        return [receive.wait()[-1].item() for receive in receives]

    assert run(2, worker) == [[float(value) for value in range(2000)]] * 2


def test_close_sends_what_is_left():
    left, right = (over(hub, 2) for hub in hubs(2))
    for value in range(2000):
        left.send(torch.full((2000,), float(value)), 1)
    assert left._hub.links[1].has_queued
    closing = threading.Thread(target=left.close)
    closing.start()
    received = [right.receive((2000,), torch.float32, 0).wait()[0].item() for _ in range(2000)]
    closing.join()
    assert received == list(range(2000))


def test_several_threads_wait_over_one_hub():
    """What one of them reads for another reaches it; and a second thread can send while the first one sleeps."""

    def ranks(hub: MessageHub) -> None:
        first, second = over(hub, 2), over(hub, 2)
        peer = 1 - hub.rank

        def play(transport: SharedMemoryTransport, starts: bool) -> None:
            for step in range(200):
                if starts:
                    transport.send(torch.tensor(float(step)), peer)
                assert transport.receive((), torch.float32, peer).wait().item() == step
                if not starts:
                    transport.send(torch.tensor(float(step)), peer)

        threads = [threading.Thread(target=play, args=(each, hub.rank == i)) for i, each in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        done.append(not any(thread.is_alive() for thread in threads))

    done: list[bool] = []
    outer = [threading.Thread(target=ranks, args=(hub,), daemon=True) for hub in hubs(2)]
    for thread in outer:
        thread.start()
    for thread in outer:
        thread.join(30)
    assert done == [True, True]


@pytest.mark.parametrize("waits", ["here", "elsewhere"])
def test_what_a_thread_had_no_room_for_goes_out_while_another_sleeps(waits: str):
    """The one that sleeps waits for what only comes once all that the other one has sent is there."""
    left, right = hubs(2, timeout=20)
    sleeper, sender = over(left, 2), over(left, 2)
    first, second = over(right, 2), over(right, 2)
    left.links[1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)  # a few messages
    came: list[float] = []
    sleeping = threading.Thread(target=lambda: came.append(sleeper.receive((), torch.float32, 1).wait().item()))
    sleeping.start()
    while not left._is_polling:
        time.sleep(0.001)
    for value in range(50):
        sender.send(torch.full((2000,), float(value)), 1)
    assert left.links[1].has_queued

    def answer() -> None:
        got = [second.receive((2000,), torch.float32, 0).wait()[0].item() for _ in range(50)]
        assert got == list(range(50))
        second.send(torch.tensor(7.0), 0)
        first.send(torch.tensor(8.0), 0)

    answering = threading.Thread(target=answer)
    answering.start()
    if waits == "here":
        assert sender.receive((), torch.float32, 1).wait().item() == 7
    sleeping.join(10)
    answering.join(10)
    assert came == [8.0] and not left.links[1].has_queued


def test_a_block_that_was_let_go_of_is_answered_for_while_another_thread_sleeps():
    """Who sleeps went to sleep before there was anything to answer for."""
    left, right = hubs(2, timeout=20)
    sleeper, waiter = over(left, 2), over(left, 2)
    first, second = over(right, 2), over(right, 2)
    second.send(torch.ones(200_000), 0)
    held = waiter.receive((200_000,), torch.float32, 1).wait()
    sleeping = threading.Thread(target=lambda: sleeper.receive((), torch.float32, 1).wait())
    sleeping.start()
    while not left._is_polling:
        time.sleep(0.001)
    del held  # the block that it lay in is right's again once right has been told

    def answer() -> None:
        with right.lock:
            right._handle_until(lambda: right._blocks.bytes_used == 0, None, "waiting for the block")
        second.send(torch.tensor(7.0), 0)
        first.send(torch.tensor(8.0), 0)

    answering = threading.Thread(target=answer)
    answering.start()
    assert waiter.receive((), torch.float32, 1).wait().item() == 7
    for thread in (sleeping, answering):
        thread.join(10)
        assert not thread.is_alive()


def test_what_came_before_the_end_is_still_read():
    left, right = (over(hub, 2) for hub in hubs(2))
    right.send(torch.ones(1), 0)  # left leaves without reading it
    left.send(torch.full((100_000,), 2.0), 1)
    left.close()
    assert right.receive((100_000,), torch.float32, 0).wait().unique().tolist() == [2.0]
    with pytest.raises(PeerLost, match=r"lost rank 0 while receiving torch.float32 \(\)") as caught:
        right.receive((), torch.float32, 0).wait()
    assert caught.value.peer == 0
    with pytest.raises(PeerLost, match="lost rank 0"):
        right.send(torch.ones(1), 0)


def test_who_does_not_answer_is_lost():
    left, _ = (over(hub, 2) for hub in hubs(2, timeout=0.05))
    with pytest.raises(PeerLost, match=r"no answer in 0\.05 s"):
        left.all_reduce(torch.ones(1), (0, 1)).wait()


def test_a_forked_child_does_not_hide_that_its_parent_has_gone():
    left, right = hubs(2)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        transport = over(left, 2)
        right._release()
        start = time.monotonic()
        with pytest.raises(PeerLost):
            transport.receive((1,), torch.float32, 1).wait()
        assert time.monotonic() - start < 10
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_descriptors_are_given_back():
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(3):
        left, right = (over(hub, 2) for hub in hubs(2))
        left.send(torch.ones(100_000), 1)
        right.receive((100_000,), torch.float32, 0).wait()
        left.close()
        right.close()
        left = right = None  # type: ignore[assignment]
    assert count() == before
    for hub in hubs(2):
        over(hub, 2)
    del hub
    assert count() == before  # also of transports that nobody closed


def test_traffic_is_counted():
    def worker(transport: SharedMemoryTransport) -> dict[str, int]:
        ranks = range(4)
        transport.send(torch.zeros(10), (transport.rank + 1) % 4)
        transport.receive((10,), torch.float32, (transport.rank - 1) % 4).wait()
        transport.all_reduce(torch.zeros(40_000), ranks).wait()
        transport.all_gather(torch.zeros(100), ranks).wait()
        transport.reduce_scatter(torch.zeros(400), ranks).wait()
        transport.broadcast(torch.zeros(50), 1, ranks).wait()
        transport.all_to_all([torch.zeros(r) for r in range(4)], [(transport.rank,)] * 4, ranks).wait()
        transport.all_gather_object(1)
        assert transport.counters.sent == transport.counters.wire.total() - transport.counters.wire["header"]
        return dict(transport.counters.wire)

    first, second, *_ = run(4, worker)
    assert first.pop("header") > 0
    ring = 2 * 160_000 * 3 // 4
    assert first == {
        "send": 40,
        "all_reduce": ring,
        "all_gather": 1200,
        "reduce_scatter": 1200,
        "all_to_all": 24,
    }
    assert second["broadcast"] == 600 and second["all_to_all"] == 20


def test_sums_and_parts_are_checked():
    transport = over(hubs(2)[0], 2)
    for attempt, said in (
        (lambda: transport.reduce_scatter(torch.zeros(3), (0, 1)), "3 elements are no 2 equal parts"),
        (lambda: transport.reduce_scatter(torch.zeros(3), (0, 1), [1, 1]), "sizes .* are no parts of 3 elements"),
        (lambda: transport.all_gather(torch.zeros(3), (0, 1), [1, 3]), "does not fit sizes"),
        (lambda: transport.all_gather(torch.zeros(3, 1), (0, 1)), "of one dimension"),
        (lambda: transport.broadcast(torch.zeros(3), 2, (0, 1)), "rank 2 cannot be the source"),
        (lambda: transport.all_to_all([torch.zeros(3)], [(3,)], (0, 1)), "1 pieces and 1 shapes for the 2 ranks"),
    ):
        with pytest.raises(ValueError, match=said):
            attempt()
    with pytest.raises(TypeError, match="bool"):
        transport.reduce_scatter(torch.zeros(2, dtype=torch.bool), (0, 1))


@pytest.mark.parametrize("size", [2, 3])
def test_large_sums_in_any_order_of_waits(size: int):
    parts = torch.randn(size, 3, 1_300_001, dtype=torch.float64)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part

    def worker(transport: SharedMemoryTransport) -> bool:
        draw, right = random.Random(transport.rank), True
        for _ in range(5):
            whole = parts[transport.rank].clone()
            sums = [transport.all_reduce(row, range(size)) for row in whole]
            draw.shuffle(sums)
            for pending in sums:
                pending.wait()
            right = right and torch.equal(whole, expected)
        assert transport.counters.sent == 15 * (2 * 10_400_008 * (size - 1) // size)
        return right

    assert run(size, worker) == [True] * size


def test_large_sums_of_different_shapes_are_refused():
    def worker(transport: SharedMemoryTransport) -> str:
        with pytest.raises(ValueError) as caught:
            transport.all_reduce(torch.zeros(3_000_000 + transport.rank), (0, 1)).wait()
        return str(caught.value)

    said = run(2, worker)
    assert said[0].startswith(
        "rank 1 asked for all_reduce of torch.float32 (3000001,), where rank 0 asked for all_reduce"
    )
