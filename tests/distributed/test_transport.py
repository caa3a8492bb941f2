"""Tensors between forked workers over torch.distributed: every dtype, order, groups, and peers that die."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from polylane.errors import PeerLost
from polylane.runtime.transport.c10d import C10dTransport
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World

torch.set_num_threads(1)

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]
SMALL_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *COMPLEX, *SMALL_FLOATS, *WHOLE, torch.bool]


def pair(context: WorkerContext) -> C10dTransport:
    return C10dTransport(context.world, channels=[(0, 1), (1, 0)], groups=[(0, 1)])


def sample(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(12).reshape(3, 4)
    return (values % 2 if dtype == torch.bool else values).to(dtype)


def exchange(context: WorkerContext, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rank 0 sends, rank 1 receives and returns."""
    transport = pair(context)
    if context.rank == 0:
        pending = [transport.send(tensor, 1) for tensor in tensors]
    else:
        pending = [transport.receive(tensor.shape, tensor.dtype, 0) for tensor in tensors]
    received = [transfer.wait() for transfer in pending]
    return received if context.rank == 1 else []


def test_every_dtype_travels():
    sent = [sample(dtype) for dtype in DTYPES]
    received = fork_workers(lambda context: exchange(context, sent), 2)[1]
    for before, after in zip(sent, received, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), before.dtype


def test_every_layout_travels():
    base = torch.randn(4, 6)
    sent = [
        base.t(),
        base[::2, 1:],
        base[0, 0],
        torch.empty(0, 3),
        base.expand(2, 4, 6),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, requires_grad=True),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    received = fork_workers(lambda context: exchange(context, sent), 2)[1]
    for before, after in zip(sent, received, strict=True):
        assert torch.equal(before, after) and after.is_contiguous() and not after.requires_grad


def test_messages_come_in_the_order_of_asking():
    def worker(context: WorkerContext) -> list[float]:
        transport = pair(context)
        peer = 1 - context.rank
        sends = [transport.send(torch.full((1000,), float(step)), peer) for step in range(20)]
        receives = [transport.receive((1000,), torch.float32, peer) for _ in range(20)]
        values = [pending.wait()[0].item() for pending in reversed(receives)]
        for pending in sends:
            pending.wait()
        return values[::-1]

    assert fork_workers(worker, 2) == [[float(step) for step in range(20)]] * 2


def test_large_messages_in_both_directions_do_not_block():
    def worker(context: WorkerContext) -> float:
        transport = pair(context)
        peer = 1 - context.rank
        sending = transport.send(torch.full((5_000_000,), 1.0 + context.rank), peer)
        received = transport.receive((5_000_000,), torch.float32, peer).wait()
        sending.wait()
        return received.mean().item()

    assert fork_workers(worker, 2) == [2.0, 1.0]


def test_a_send_nobody_waits_for_arrives():
    def worker(context: WorkerContext) -> float:
        transport = pair(context)
        if context.rank == 1:
            time.sleep(0.05)
            return transport.receive((2_000_000,), torch.float32, 0).wait().sum().item()
        transport.send(torch.ones(2_000_000), 1)  # the tensor and the handle are dropped at once
        transport.close()
        return 0.0

    assert fork_workers(worker, 2)[1] == 2_000_000


def test_transports_with_tags_do_not_mix():
    def worker(context: WorkerContext) -> list[float]:
        first = C10dTransport(context.world, channels=[(0, 1)], tag=1)
        second = C10dTransport(context.world, channels=[(0, 1)], tag=2)
        if context.rank == 0:
            sends = [first.send(torch.tensor(1.0), 1), second.send(torch.tensor(2.0), 1)]
            return [pending.wait().item() for pending in sends]
        from_second = second.receive((), torch.float32, 0).wait().item()
        return [first.receive((), torch.float32, 0).wait().item(), from_second]

    assert fork_workers(worker, 2)[1] == [1.0, 2.0]


def test_sums_of_several_groups_at_once():
    def worker(context: WorkerContext) -> tuple[float, ...]:
        transport = C10dTransport(context.world, groups=[(0, 1), (2, 3), (1,), (3, 2, 1, 0)])
        mine = [torch.tensor([float(context.rank)]) for _ in range(3)]
        half = (0, 1) if context.rank < 2 else (3, 2)
        sums = [
            transport.all_reduce(mine[0], half),
            transport.all_reduce(mine[1], range(4)),
            transport.all_reduce(mine[2], (context.rank,)),
        ]
        for pending in reversed(sums):
            pending.wait()
        return tuple(tensor.item() for tensor in mine)

    assert fork_workers(worker, 4) == [(1, 6, 0), (1, 6, 1), (5, 6, 2), (5, 6, 3)]


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_sums_of_every_summable_dtype(dtype: torch.dtype):
    def worker(context: WorkerContext) -> bool:
        tensor = sample(dtype)
        pair(context).all_reduce(tensor, (0, 1)).wait()
        return torch.equal(tensor, sample(dtype) * 2)

    assert fork_workers(worker, 2) == [True, True]


def test_a_strided_sum_is_in_place():
    def worker(context: WorkerContext) -> list[list[float]]:
        whole = torch.ones(2, 4)
        pair(context).all_reduce(whole[:, 1], (0, 1)).wait()
        return whole.tolist()

    assert fork_workers(worker, 2) == [[[1, 2, 1, 1]] * 2] * 2


def test_objects():
    def worker(context: WorkerContext) -> list[int]:
        transport = C10dTransport(context.world)
        transport.barrier()
        return transport.all_gather_object(context.rank)

    assert fork_workers(worker, 3) == [[0, 1, 2]] * 3


def test_traffic_is_counted():
    def worker(context: WorkerContext) -> tuple[dict[str, int], dict[str, int]]:
        transport = pair(context)
        peer = 1 - context.rank
        sending = transport.send(torch.zeros(4), peer)
        transport.receive((4,), torch.float32, peer).wait()
        sending.wait()
        transport.send(torch.zeros(0), peer).wait()
        transport.all_reduce(torch.zeros(8, dtype=torch.float64), (0, 1)).wait()
        transport.all_gather_object(1)
        return dict(transport.counters.messages), dict(transport.counters.bytes)

    messages = {"send": 1, "receive": 1, "all_reduce": 1, "object": 1}
    assert fork_workers(worker, 2)[0] == (messages, {"send": 16, "receive": 16, "all_reduce": 64})


def test_what_was_not_declared_is_refused():
    def worker(context: WorkerContext) -> list[str]:
        transport = C10dTransport(context.world, channels=[(0, 1)], groups=[(0, 1)])
        said = []
        for attempt in (
            lambda: transport.send(torch.ones(1), (context.rank + 2) % 3),
            lambda: transport.receive((1,), torch.float32, (context.rank + 1) % 3),
            lambda: transport.all_reduce(torch.ones(1), (1, 2)),
            lambda: transport.all_reduce(torch.ones(1, dtype=torch.bool), (0, 1)),
            lambda: C10dTransport(context.world, channels=[(0, 3)]),
        ):
            with pytest.raises((ValueError, TypeError)) as caught:
                attempt()
            said.append(str(caught.value))
        return said

    said = fork_workers(worker, 3)[0]
    assert said[0].startswith("rank 0 has no channel from 0 to 2")
    assert said[2].startswith("rank 0 has no group (1, 2)")
    assert "torch.bool" in said[3]


def test_alone_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    transport = C10dTransport(World.join(), groups=[(0,)])
    assert transport.all_reduce(torch.ones(2), (0,)).wait().tolist() == [1, 1]
    assert transport.all_gather_object("mine") == ["mine"]
    transport.barrier()
    transport.close()


@pytest.mark.parametrize("doing", ["receive", "send", "sum", "object", "barrier"])
def test_a_peer_that_dies_is_named(doing: str):
    def worker(context: WorkerContext) -> None:
        transport = pair(context)
        transport.barrier()
        if context.rank == 1:
            time.sleep(0.05)
            context.send_message({"pid": os.getpid()})
            time.sleep(60)
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            while True:
                wait_for_the_other(transport, doing)
        context.send_message(
            {"peer": caught.value.peer, "said": str(caught.value), "seconds": time.monotonic() - start}
        )
        time.sleep(0.1)

    heard: list[dict[str, object]] = []

    def listen(rank: int, content: dict[str, object]) -> None:
        if "pid" in content:
            os.kill(int(str(content["pid"])), signal.SIGKILL)
        else:
            heard.append(content)

    with pytest.raises(Exception, match="worker 1 failed: it was killed by SIGKILL"):
        fork_workers(worker, 2, listen)
    for content in heard:  # the parent may have ended the survivor before it could speak
        assert content["peer"] == (1 if doing in ("receive", "send") else None)
        assert str(content["said"]).startswith("lost ") and float(str(content["seconds"])) < 5


def wait_for_the_other(transport: C10dTransport, doing: str) -> None:
    if doing == "receive":
        transport.receive((10,), torch.float32, 1).wait()
    elif doing == "send":
        transport.send(torch.ones(100_000), 1).wait()
    elif doing == "sum":
        transport.all_reduce(torch.ones(3), (0, 1)).wait()
    elif doing == "object":
        transport.all_gather_object(1)
    else:
        transport.barrier()


def test_one_element_with_any_stride_travels() -> None:
    """torch calls it contiguous, whatever its stride is."""

    def work(context: WorkerContext) -> list[float]:
        transport, group = pair(context), (0, 1)
        column = torch.arange(6.0).view(2, 3)[:1, 1:].t()[:1]  # 1 x 1 of stride (1, 3)
        one = (torch.arange(8.0) + context.rank)[5::4]
        found = [transport.all_reduce(column.clone() if context.rank else column, group).wait()]
        found.append(transport.all_gather(one, group).wait())
        found.append(transport.broadcast((torch.arange(8.0) * context.rank)[3::8], 1, group).wait())
        found += transport.all_to_all([one, one], [one.shape, one.shape], group).wait()
        sending = transport.send(one, 1 - context.rank)
        found.append(transport.receive(one.shape, one.dtype, 1 - context.rank).wait())
        sending.wait()
        return torch.cat([value.flatten() for value in found]).tolist()

    first, second = fork_workers(work, 2)
    assert first == [2.0, 5.0, 6.0, 3.0, 5.0, 6.0, 6.0] and second == [2.0, 5.0, 6.0, 3.0, 5.0, 6.0, 5.0]
