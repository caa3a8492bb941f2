"""Workers of an agent leave together: once one has left with a code but 0, the agent ends the others."""

from __future__ import annotations

import threading
import time

from torch.distributed import HashStore, TCPStore

from polylane.runtime.workers.launch_environment import Launch
from polylane.runtime.workers.stop_request import StopRequest
from polylane.runtime.workers.torchrun_worker import TorchrunWorker


def make_worker(rank: int, store: HashStore | None, grace: float = 20.0) -> TorchrunWorker:
    worker = TorchrunWorker(Launch(True, rank, 2, rank, 2, "torchrun"), StopRequest(), grace, str)
    worker._waiting_store = store
    return worker


def test_all_wait_for_rank_0() -> None:
    store, left = HashStore(), list[int]()

    def leave(rank: int) -> None:
        make_worker(rank, store).wait_for_first()
        left.append(rank)

    other = threading.Thread(target=leave, args=[1])
    other.start()
    time.sleep(0.2)
    assert not left, "rank 0 has files to write yet"
    leave(0)
    other.join(20)
    assert sorted(left) == [0, 1]


def test_nobody_waits_longer_than_the_grace() -> None:
    began = time.monotonic()
    make_worker(1, HashStore(), grace=0.5).wait_for_first()
    make_worker(1, None).wait_for_first()  # nobody has met
    assert time.monotonic() - began < 10


def test_a_worker_that_waits_for_rank_0_hears_of_the_others() -> None:
    """The thread that watches asks the store meanwhile, and a client of a TCPStore is locked while it waits."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    store.set("process/0", "another agent 1")
    worker = make_worker(1, None)
    worker.meet_peers(store, 2)
    waiting = threading.Thread(target=worker.wait_for_first)
    waiting.start()
    time.sleep(0.3)
    began = time.monotonic()
    assert not worker._has_anyone_reported()
    assert time.monotonic() - began < 5 and waiting.is_alive()
    store.set("finished", "")
    waiting.join(20)
    assert not waiting.is_alive()
