"""Two hosts, pretended on this machine: their watches say one sentence, and each ends its own workers."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from polylane.diagnosis import judgement, patience
from polylane.diagnosis.host_post import HostPost
from polylane.diagnosis.page_layout import Phase, read_verdict
from polylane.diagnosis.report import HangReport
from polylane.errors import CallsDiffer, WorkerHung
from polylane.runtime.progress import host_board, host_watch, joint_watch
from polylane.runtime.progress import watch as watch_module
from polylane.runtime.progress.host_board import Board, Host, HostBoard
from polylane.runtime.progress.joint_watch import JointWatch
from polylane.runtime.progress.script_calls import ask_watch
from polylane.runtime.progress.watch import OnHang
from polylane.runtime.progress_page import ProgressMemory, ProgressWriter

HOSTS = (Host("a", (0,)), Host("b", (1,)))
BOUND = 0.6
SECRET = b"what both know"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of tests are busy, but not for as long as those of trainings."""
    monkeypatch.setattr(patience, "SILENT_LEAST", 1.5)
    monkeypatch.setattr(joint_watch, "SPREAD_SECONDS", 0.5)
    monkeypatch.setattr(joint_watch, "LOST_SECONDS", 1.0)
    monkeypatch.setattr(joint_watch, "FRESH_SECONDS", 1.0)
    monkeypatch.setattr(joint_watch, "UNANSWERED_SECONDS", 0.3)
    monkeypatch.setattr(host_board, "PERIOD_SECONDS", 0.2)
    monkeypatch.setattr(host_board, "RETRY_SECONDS", 0.2)


@contextmanager
def worker(
    rank: int, begun: int, waits: bool, calls: str = "", asks: bool = False
) -> Iterator[tuple[int, ProgressMemory]]:
    """A process that is in a step, has begun some operations with the other one, and perhaps waits for the last.

    Args:
        rank: its rank.
        begun: number of those operations.
        waits: whether it waits for the last.
        calls: method that it is in, of a script; "" where there is none. It ends with status 7 if others differ.
        asks: whether it has lost the other one, and asks the watch; it ends with status 8 if that knows nothing.
    """
    memory = ProgressMemory.allocate()
    ready, told = os.pipe()
    if not (pid := os.fork()):
        progress = ProgressWriter(memory, rank, is_script=bool(calls))
        line = progress.add_line("0: 0, 1", (0, 1))
        assert line is not None
        progress.enter(Phase.TRAINING)
        progress.begin_round(0, 3, False)
        numbers = [progress.begin_operation(line) for _ in range(begun)]
        if waits:
            progress.begin_wait(line, numbers[-1])
        if progress.calls is not None:
            progress.calls.begin(calls)
        os.write(told, b".")
        if asks:
            os._exit(9 if ask_watch(progress.words) else 8)
        with suppress(CallsDiffer):
            time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    os.close(ready), os.close(told)
    try:
        yield pid, memory
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@dataclass
class Watched:
    """What came of a host's watch."""

    said: list[str] = field(default_factory=list)
    kept: list[HangReport] = field(default_factory=list)
    hung: WorkerHung | None = None
    differ: CallsDiffer | None = None


def watch_until(
    own: int, memory: ProgressMemory, port: int, until: Callable[[Watched], bool], on_hang: OnHang, found: Watched
) -> None:
    board = Board(HOSTS, own, "127.0.0.1", port, "watch/test", SECRET)
    watch = JointWatch(board, {own: memory}, on_hang, BOUND, found.kept.append, found.said.append)
    deadline = time.monotonic() + 20
    try:
        while not until(found) and time.monotonic() < deadline:
            watch.look()
            time.sleep(0.05)
    except WorkerHung as hung:
        found.hung = hung
    except CallsDiffer as differ:
        found.differ = differ
    finally:
        time.sleep(watch.spread_seconds)  # as before workers are ended
        watch.end(1.0)
        watch.close()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def watch_both(
    store: TCPStore,
    waits: tuple[bool, bool],
    begun: tuple[int, int],
    stopped: int | None,
    on_hang: OnHang = "stop",
    seconds: float = 0.0,
    calls: tuple[str, str] = ("", ""),
) -> list[Watched]:
    """What both watches say until both have said something, and for some seconds after that."""
    found = [Watched(), Watched()]
    since = dict[int, float]()

    def is_over(each: Watched) -> bool:
        if each.said:
            since.setdefault(id(each), time.monotonic())
        return time.monotonic() - since.get(id(each), math.inf) > seconds

    with worker(0, begun[0], waits[0], calls[0]) as first, worker(1, begun[1], waits[1], calls[1]) as second:
        if stopped is not None:
            os.kill((first, second)[stopped][0], signal.SIGSTOP)
        threads = [
            threading.Thread(
                target=watch_until,
                args=(own, memory, store.port, is_over, on_hang, found[own]),
            )
            for own, (_, memory) in enumerate((first, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_worker_is_named_alike_by_both_hosts_and_ended_by_its_own(store: TCPStore, stopped: int) -> None:
    waits = (stopped != 0, stopped != 1)
    found = watch_both(store, waits, (2 - (stopped == 0), 2 - (stopped == 1)), stopped)
    own, other = found[stopped], found[1 - stopped]
    assert own.hung is not None and own.hung.ranks == (stopped,) and own.said == []
    assert other.hung is None and other.said == [f"the training hangs: {own.hung.error_message}"]
    assert f"rank {stopped} (process " in other.said[0]
    assert f" on {HOSTS[stopped].name}) has made no progress" in other.said[0]
    assert "it is stopped" in other.said[0] and f"rank {1 - stopped} waits for it" in other.said[0]
    # The host that judges keeps what the workers of all hosts were doing.
    (kept,) = found[0].kept
    assert kept.culprits == (stopped,) and [each.rank for each in kept.ranks] == [0, 1]
    assert kept.ranks[stopped].stacks


def test_a_dead_link_is_named_alike_by_both_hosts_and_both_end(store: TCPStore) -> None:
    found = watch_both(store, (True, True), (2, 2), None)
    sentences = [each.hung.error_message for each in found if each.hung is not None]
    assert len(sentences) == 2 and sentences[0] == sentences[1]
    assert sentences[0].startswith("rank 0 on a and rank 1 on b have all begun")
    assert sentences[0].endswith("the link between a and b carries nothing")
    assert [each.hung.ranks for each in found if each.hung] == [(0,), (1,)]


def test_a_host_that_nothing_is_heard_of_is_named(store: TCPStore) -> None:
    found = Watched()
    with worker(0, 2, True) as (_, memory):
        watch_until(0, memory, store.port, lambda each: bool(each.said), "stop", found)
    assert found.hung is not None and found.hung.ranks == (0,)
    assert found.hung.error_message.startswith("b, with rank 1, has not been heard from for ")
    assert "rank 0 on a has waited for rank 1 for " in found.hung.error_message and not found.hung.traceback


def test_a_host_that_is_silent_once_a_connection_broke_is_named_at_once(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SILENT_LEAST", 30.0)  # else it is waited for
    found = Watched()
    with worker(0, 2, True, asks=True) as (_, memory):
        watch_until(0, memory, store.port, lambda each: bool(each.said), "stop", found)
    assert found.hung is not None and found.hung.ranks == (0,)
    assert found.hung.error_message.startswith("b, with rank 1, has not been heard from for ")
    assert "connections with it have broken" in found.hung.error_message
    assert found.kept[0].culprits == (1,)


def test_who_has_lost_a_worker_that_has_ended_learns_that(store: TCPStore) -> None:
    found = Watched()
    with worker(0, 2, True, asks=True) as (_, memory), worker(1, 1, False) as (other, its_memory):
        os.kill(other, signal.SIGKILL)
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
        board = Board(HOSTS, 1, "127.0.0.1", store.port, "watch/test", SECRET)
        watch = JointWatch(board, {1: its_memory}, "stop", BOUND, found.kept.append, found.said.append)
        watch.look()
        watch.end(5.0, is_well=False)
        answers = list[Any]()

        def has_answered(each: Watched) -> bool:
            with memoryview(memory.page) as page:
                answers.append(read_verdict(page))
            return answers[-1] is not None

        watch_until(0, memory, store.port, has_answered, "stop", found)
    assert answers[-1] == {"ended": "rank 1 on b"} and found.hung is None


def test_a_store_that_does_not_answer_is_named() -> None:
    found = Watched()
    with worker(1, 2, True) as (_, memory):
        watch_until(1, memory, 1, lambda each: bool(each.said), "stop", found)  # nobody listens at port 1
    assert found.hung is not None and found.hung.ranks == (1,)
    assert found.hung.error_message.startswith("b has not heard of a for ")
    assert "nor has torchrun's store at 127.0.0.1:1 answered" in found.hung.error_message


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_whoever_is_to_wait_waits_and_both_hosts_say_so_once(store: TCPStore, stopped: int) -> None:
    waits = (stopped != 0, stopped != 1)
    begun = (2 - (stopped == 0), 2 - (stopped == 1))
    found = watch_both(store, waits, begun, stopped, "wait", joint_watch.ALONE_SECONDS + joint_watch.ANSWER_SECONDS)
    (sentence,) = found[0].said
    assert found[1].said == [sentence] and found[0].hung is None and found[1].hung is None
    assert f"rank {stopped} (process " in sentence and "it is stopped" in sentence
    assert sentence.endswith("; the training waits for it, as it is to (on hang: wait)")


# ---- the board -------------------------------------------------------------------------------------------------------


class FakeStore:
    """A store of this process, that counts what it is asked for."""

    def __init__(self) -> None:
        self.values, self.read = dict[str, bytes](), 0

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.read += len(keys)
        return [self.values[key] for key in keys]


def boards(count: int, patience: float = 60.0, secrets: dict[int, bytes] | None = None) -> list[HostBoard]:
    hosts = tuple(Host(f"h{rank}", (rank,)) for rank in range(count))
    return [
        HostBoard(Board(hosts, own, "", 0, "name", (secrets or {}).get(own, b"")), patience) for own in range(count)
    ]


def test_the_first_host_judges_and_the_others_read_it_alone() -> None:
    store, every = FakeStore(), boards(9)
    for _ in range(2):
        for each in every:
            each.exchange(store)
    assert [each.heard().judge for each in every] == [0] * 9
    assert sorted(every[0].heard().posts) == list(range(1, 9))
    assert all(sorted(each.heard().posts) == [0] for each in every[1:])
    assert store.read <= 4 * 9 * 2


def test_another_host_judges_once_the_first_is_silent_and_no_more_when_it_is_heard_again() -> None:
    store, (first, second, third) = FakeStore(), boards(3, patience=0.15)
    first.exchange(store)
    deadline = time.monotonic() + 10
    while second.heard().judge != 1 or third.heard().judge != 1:
        second.exchange(store)
        third.exchange(store)
        time.sleep(0.01)
        assert time.monotonic() < deadline
    assert second.heard().silences[0] >= 0.15
    first.exchange(store)
    second.exchange(store)
    assert second.heard().judge == 0
    first.post(HostPost(has_ended=True), hurries=False)  # whoever has ended well judges no more, and is not silent
    first.exchange(store)
    second.exchange(store)
    assert second.heard().judge == 1 and second.heard().posts[0].has_ended


def test_time_in_which_the_store_did_not_answer_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(host_board.time, "monotonic", lambda: now[0])
    store, (first, second) = FakeStore(), boards(2)
    second.exchange(store)
    first.exchange(store)
    for gap, silence in ((1.0, 1.0), (2.0, 3.0), (100.0, 3.0), (1.0, 4.0)):
        now[0] += gap
        assert first.heard().unanswered == gap
        first.exchange(store)
        assert first.heard().silences == {1: silence}
    now[0] += 50.0
    first.pass_over(50.0)
    assert first.heard().silences == {1: 4.0} and first.heard().unanswered == 0.0


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    store, (first, second) = FakeStore(), boards(2, secrets={0: b"one", 1: b"two"})
    second.exchange(store)
    first.exchange(store)
    assert first.heard().posts == {}


def test_an_older_post_is_not_heard_again() -> None:
    store, (first, second) = FakeStore(), boards(2)
    second.exchange(store)
    old = store.values["1"]
    second.exchange(store)
    first.exchange(store)
    store.values["1"] = old
    first.exchange(store)
    assert first.heard().posts[1].number == 2


# ---- which host a worker is on ---------------------------------------------------------------------------------------


def card(identity: str, name: str, number: str, pid: int) -> list[object]:
    return [identity, name, number, "n", pid, 3, 4]


def test_two_agents_on_machines_of_one_name_are_two_hosts() -> None:
    cards = [
        card("0 vm", "vm", "0", 10),
        card("1 vm", "vm", "1", 10),
        card("0 vm", "vm", "0", 11),
        card("2 x", "x", "2", 9),
    ]
    orders = host_watch.make_orders(cards, 2)
    assert orders["pages"] == [[0, 10, 3, 4], [2, 11, 3, 4]] and orders["own"] == 0
    assert orders["hosts"] == [["vm (node 0)", [0, 2]], ["vm (node 1)", [1]], ["x", [3]]]
    assert host_watch.make_orders(cards, 3)["own"] == 2


def test_calls_that_differ_are_named_alike_by_both_hosts(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgement, "PARTING_SECONDS", 0.3)
    monkeypatch.setattr(watch_module, "PARTING_SECONDS", 0.3)
    found = watch_both(store, (True, True), (1, 1), None, calls=("job.save", "job.step"))
    first, second = (str(each.differ) for each in found)
    assert first == second and first.startswith("rank 0 is in job.save (") and ", rank 1 in job.step (" in first
