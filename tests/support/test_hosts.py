"""Two hosts of one machine share nothing but their links: what was sent over one that is down arrives once it is up."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from polylane.runtime.transport.shared_memory.rendezvous import host_identity
from tests.support.hosts import STORE_ADDRESS, Hosts, data_address, drop_link, host_names, read_link


@pytest.fixture
def two() -> Iterator[Hosts]:
    made = Hosts.make()
    if isinstance(made, str):
        pytest.skip(f"no hosts can be made: {made}")
    with closing(made):
        yield made


def test_a_link_drops_and_carries_again(two: Hosts) -> None:
    here = socket.gethostname()
    first, second = two.hosts
    with second.enter():
        listening = socket.create_server((data_address(2), 0))
    with first.enter(), listening:
        sending = socket.create_connection(listening.getsockname(), timeout=5)
        receiving, _ = listening.accept()
        with sending, receiving:
            sending.sendall(b"1")
            assert receiving.recv(1) == b"1"
            assert drop_link() == "DOWN"
            sending.sendall(b"2")
            receiving.settimeout(0.3)
            with pytest.raises(TimeoutError):
                receiving.recv(1)
            assert two.raise_link() == ["UP", "UP"] and read_link() == "UP"
            receiving.settimeout(20)
            assert receiving.recv(1) == b"2"
    assert socket.gethostname() == here


def test_the_store_is_reached_from_both_while_the_link_is_down(two: Hosts) -> None:
    with two.middle.enter(), socket.create_server((STORE_ADDRESS, 0)) as listening:
        port = listening.getsockname()[1]
        for host in two.hosts:
            with host.enter():
                drop_link()
                socket.create_connection((STORE_ADDRESS, port), timeout=5).close()


def test_they_are_two_hosts_to_whom_runs_there(two: Hosts) -> None:
    seen = []
    for host in two.hosts:
        with host.enter():
            seen.append((socket.gethostname(), host_identity()))
    assert tuple(name for name, _ in seen) == host_names(2)
    assert len({host_identity(), *(identity for _, identity in seen)}) == 3


def test_who_cannot_make_them_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Hosts.make() == "only root may make them"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert Hosts.make() == "there is no command ip (of iproute2)"
