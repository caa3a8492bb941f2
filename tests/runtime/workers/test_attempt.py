"""A name for each start of the workers, in a store that still has the entries of starts before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from polylane.errors import PeerLost
from polylane.runtime.workers.attempt import name_attempt

SOON = timedelta(seconds=10)


def start(store: dist.Store, size: int) -> set[str]:
    """The names that all workers of one start agree on, each in a thread of its own."""
    with ThreadPoolExecutor(size) as pool:
        return set(pool.map(lambda rank: name_attempt(store, rank, size, SOON), range(size)))


def test_every_start_has_one_name_of_its_own() -> None:
    """Also where workers come and go between: their old questions and answers are in the store."""
    store = dist.HashStore()
    names = [start(store, size) for size in (3, 3, 2, 1, 3)]
    assert [len(each) for each in names] == [1] * 5
    assert len(set.union(*names)) == 5


def test_a_worker_that_does_not_come_is_missed() -> None:
    store = dist.HashStore()
    start(store, 2)  # of which the store has the answers
    with pytest.raises(PeerLost, match="rank 1"):
        name_attempt(store, 0, 2, timedelta(seconds=0.05))
    with pytest.raises(PeerLost, match="rank 0"):
        name_attempt(store, 1, 2, timedelta(seconds=0.05))
