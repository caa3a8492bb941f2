"""The world of threads: order, exact sums, objects, and that no failure leaves a thread waiting."""

from __future__ import annotations

import time

import pytest
import torch

from polylane.errors import PeerLost
from polylane.runtime.transport import c10d, protocol
from tests.support.workers import thread_transport
from tests.support.workers.thread_transport import LocalTransport, local_world, run_local


def test_both_transports_are_of_one_interface():
    names = [name for name in vars(protocol.Transport) if not name.startswith("_")]
    assert "all_reduce" in names
    for kind in (LocalTransport, c10d.C10dTransport):
        assert all(hasattr(kind, name) for name in names)


def test_messages_come_in_the_order_of_asking():
    def worker(transport: LocalTransport) -> list[float]:
        if transport.rank == 0:
            for value in (1.0, 2.0, 3.0):
                transport.send(torch.tensor(value), 1).wait()
            return []
        first, second, third = (transport.receive((), torch.float32, 0) for _ in range(3))
        return [third.wait().item(), first.wait().item(), second.wait().item()]

    assert run_local(2, worker)[1] == [3.0, 1.0, 2.0]


def test_what_is_sent_is_what_it_was_then():
    left, right = local_world(2)
    tensor = torch.zeros(2, requires_grad=True)
    left.send(tensor, 1)
    with torch.no_grad():
        tensor += 1
    received = right.receive((2,), torch.float32, 0).wait()
    assert received.tolist() == [0.0, 0.0] and not received.requires_grad


def test_sums_are_exact_and_in_place():
    parts = [
        torch.tensor([1e16, 0.1], dtype=torch.float64),
        torch.tensor([1.0, 0.2]).double(),
        torch.tensor([-1e16, 0.3]).double(),
    ]

    def worker(transport: LocalTransport) -> torch.Tensor:
        mine = parts[transport.rank].clone()
        assert transport.all_reduce(mine, (2, 0, 1)).wait().data_ptr() == mine.data_ptr()
        return mine

    results = run_local(3, worker)
    assert all(torch.equal(result, (parts[0] + parts[1]) + parts[2]) for result in results)


def test_sums_of_several_groups_at_once():
    def worker(transport: LocalTransport) -> tuple[float, float, float]:
        mine = [torch.tensor(float(transport.rank)) for _ in range(3)]
        half = (0, 1) if transport.rank < 2 else (2, 3)
        sums = [
            transport.all_reduce(mine[0], half),
            transport.all_reduce(mine[1], range(4)),
            transport.all_reduce(mine[2], (transport.rank,)),
        ]
        for pending in reversed(sums):
            pending.wait()
        return mine[0].item(), mine[1].item(), mine[2].item()

    assert run_local(4, worker) == [(1, 6, 0), (1, 6, 1), (5, 6, 2), (5, 6, 3)]


def test_a_strided_sum():
    def worker(transport: LocalTransport) -> torch.Tensor:
        whole = torch.ones(2, 4)
        transport.all_reduce(whole[:, 1], range(2)).wait()
        return whole

    assert run_local(2, worker)[0].tolist() == [[1, 2, 1, 1]] * 2


def test_objects():
    def worker(transport: LocalTransport) -> list[int]:
        transport.barrier()
        return transport.all_gather_object(transport.rank)

    assert run_local(2, worker) == [[0, 1], [0, 1]]


def test_objects_are_copies():
    value = [1]
    assert run_local(1, lambda transport: transport.all_gather_object(value)[0])[0] is not value


def test_empty_tensors_do_not_travel():
    def worker(transport: LocalTransport) -> torch.Tensor:
        if transport.rank == 0:
            transport.send(torch.empty(0, 3), 1).wait()
            return torch.empty(0)
        return transport.receive((0, 3), torch.float32, 0).wait()

    assert run_local(2, worker)[1].shape == (0, 3)


def test_traffic_is_counted():
    left, right = local_world(2)
    left.send(torch.zeros(3, dtype=torch.float64), 1)
    right.receive((3,), torch.float64, 0).wait()
    assert (left.counters.messages["send"], left.counters.bytes["send"]) == (1, 24)
    assert (right.counters.messages["receive"], right.counters.bytes["receive"]) == (1, 24)


def test_another_shape_is_refused():
    left, right = local_world(2)
    left.send(torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"rank 0 sent torch.float32 \(3,\), rank 1 expected torch.float32 \(4,\)"):
        right.receive((4,), torch.float32, 0).wait()


def test_what_nobody_sums_is_refused():
    with pytest.raises(TypeError, match="bool"):
        local_world(1)[0].all_reduce(torch.ones(1, dtype=torch.bool), (0,))
    with pytest.raises(ValueError, match="not one of ranks"):
        local_world(1)[0].all_reduce(torch.ones(1), (0, 1))
    with pytest.raises(ValueError, match="no peer 0"):
        local_world(1)[0].send(torch.ones(1), 0)


@pytest.mark.parametrize("waiting", ["receive", "sum", "barrier", "object"])
def test_a_failure_ends_every_wait(waiting: str):
    def worker(transport: LocalTransport) -> None:
        if transport.rank == 1:
            time.sleep(0.05)
            raise ZeroDivisionError("the cause")
        if waiting == "receive":
            transport.receive((1,), torch.float32, 1).wait()
        elif waiting == "sum":
            transport.all_reduce(torch.ones(1), range(3)).wait()
        elif waiting == "barrier":
            transport.barrier()
        else:
            transport.all_gather_object(1)

    with pytest.raises(ZeroDivisionError, match="the cause"):
        run_local(3, worker)


def test_who_left_is_not_waited_for():
    def worker(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.receive((1,), torch.float32, 1).wait()

    with pytest.raises(PeerLost, match="lost rank 1") as caught:
        run_local(2, worker)
    assert caught.value.peer == 1


def test_a_deadlock_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(thread_transport, "TIMEOUT_SECONDS", 0.1)

    def worker(transport: LocalTransport) -> None:
        transport.receive((1,), torch.float32, 1 - transport.rank).wait()

    with pytest.raises(PeerLost, match="no answer"):
        run_local(2, worker)


def test_nothing_is_kept():
    world = local_world(2)
    world[0].send(torch.ones(1), 1)
    world[1].receive((1,), torch.float32, 0).wait()
    assert not world[0]._hub._values
