"""Attempt: a name for one start of all workers, under which nothing of an earlier start is found.

torchrun's agent keeps one store for all attempts: after a restart it still has the addresses of workers that are dead,
and who reads these fails with "connection refused". No number that torchrun gives tells attempts apart on every host:
TORCHELASTIC_RESTART_COUNT is each agent's own, and does not count changes of the hosts. So rank 0 draws a name, and
tells it only to who is there now: each worker asks with a word of its own, and an answer to another word is an old one.

    worker            asks: word              reads the answer to its word, confirms: name
    rank 0            answers: word, name     has all confirmations of this name: done
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from polylane.errors import PeerLost

PAUSE_SECONDS = 0.005


def name_attempt(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that only the workers of this start know; a collective of the workers.

    Args:
        store: store of all workers, which may have entries of earlier starts.
        rank: rank of this worker, from 0.
        size: number of workers of the attempt.
        timeout: longest wait for the other workers.

    Raises:
        PeerLost: a worker did not come in time.
    """
    end, token = time.monotonic() + timeout.total_seconds(), secrets.token_hex(8)
    if rank == 0:
        for peer in range(1, size):
            _answer_until_confirmed(store, peer, token, end)
        return token
    store.set(f"ask/{rank}", token)
    while True:
        word, _, name = _read(store, f"answer/{rank}").partition(" ")
        if word == token:
            store.set(f"confirm/{rank}", name)
            return name
        _pause(0, end)


def _answer_until_confirmed(store: Store, peer: int, name: str, end: float) -> None:
    answered = ""
    while _read(store, f"confirm/{peer}") != name:
        word = _read(store, f"ask/{peer}")
        if word != answered:  # an old one first, perhaps: a worker of this attempt then asks anew
            store.set(f"answer/{peer}", f"{word} {name}")
            answered = word
        _pause(peer, end)


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _pause(peer: int, end: float) -> None:
    if time.monotonic() > end:
        raise PeerLost(peer, "meeting it", "it did not come in time")
    time.sleep(PAUSE_SECONDS)
