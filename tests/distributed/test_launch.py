"""Forked workers: what they return and say, and that every way of failing ends all of them with one clear error."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polylane.errors import ActionFailed, PeerLost, PolylaneError, WorkerFailed
from polylane.runtime.workers import team as launch
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.threads import limit_to_one_thread
from tests.support.workers import forked_commands
from tests.support.workers.child_processes import children

torch.set_num_threads(1)


class Refused(PolylaneError):
    """A user's mistake of a kind of its own, with a constructor that pickle cannot call."""

    def __init__(self, *, what: str) -> None:
        super().__init__(f"refused: {what}")


class Missing(PolylaneError):
    """One that pickles."""


@pytest.fixture(scope="module", autouse=True)
def warm():
    fork_workers(lambda context: None, 1)  # libuv, under torch's store, opens one pipe for the life of the process


@pytest.fixture(autouse=True)
def nothing_is_left(warm: None):
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    others = children()
    yield
    assert children() <= others  # neither running children nor zombies
    assert len(os.listdir("/proc/self/fd")) <= len(before[0])
    assert set(os.listdir("/dev/shm")) <= before[1]


def wait_for_peers(context: WorkerContext) -> None:
    context.world.connect()
    dist.all_reduce(torch.ones(1))


def test_results_come_by_rank():
    offset = 10  # a closure: nothing needs to be picklable
    results = fork_workers(lambda context: (context.rank + offset, os.getpid()), 3)
    assert [result[0] for result in results] == [10, 11, 12]
    assert len({pid for _, pid in results} | {os.getpid()}) == 4


def test_a_process_group_is_made_when_it_is_asked_for():
    def worker(context: WorkerContext) -> tuple[float, int, str]:
        assert not dist.is_initialized()
        context.world.connect().connect()  # once
        value = torch.tensor(float(context.rank))
        dist.all_reduce(value)
        return value.item(), context.world.size, str(context.device)

    assert fork_workers(worker, 4) == [(6.0, 4, "cpu")] * 4


def test_a_single_worker():
    assert fork_workers(lambda context: context.world.size, 1) == [1]


def test_no_environment_tells_a_worker_from_the_only_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "3")  # this process may be a worker of torchrun's
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert fork_workers(lambda context: [os.environ.get(name) for name in names], 2) == [[None] * 5] * 2
    assert os.environ["RANK"] == "3"


def test_large_results_do_not_block():
    results = fork_workers(lambda context: {"weight": torch.full((3_000_000,), float(context.rank))}, 2)
    assert [result["weight"].sum().item() for result in results] == [0.0, 3_000_000.0]


def test_shared_storage_is_sent_once():
    def worker(context: WorkerContext) -> list[torch.Tensor]:
        weight = torch.zeros(4)
        return [weight, weight[:2]]

    whole, part = fork_workers(worker, 1)[0]
    whole[0] = 5
    assert part[0] == 5


def test_messages_arrive_in_order_and_in_the_calling_thread():
    heard: list[tuple[int, int]] = []

    def worker(context: WorkerContext) -> None:
        for step in range(200):
            context.send_message({"step": step})

    def listen(rank: int, content: dict[str, int]) -> None:
        assert threading.current_thread() is threading.main_thread()
        heard.append((rank, content["step"]))

    fork_workers(worker, 2, listen)
    assert [step for rank, step in heard if rank == 0] == list(range(200))
    assert [step for rank, step in heard if rank == 1] == list(range(200))


def test_a_slow_listener_does_not_hold_the_worker_up():
    def worker(context: WorkerContext) -> float:
        start = time.perf_counter()
        for step in range(40):
            context.send_message({"step": step, "text": "x" * 1000})
        return time.perf_counter() - start

    assert fork_workers(worker, 1, lambda rank, content: time.sleep(0.02))[0] < 40 * 0.02 / 2


def test_an_error_of_the_listener_ends_the_workers():
    def worker(context: WorkerContext) -> None:
        context.send_message({})
        time.sleep(60)

    def listen(rank: int, content: dict[str, int]) -> None:
        raise LookupError("the listener's own")

    with pytest.raises(LookupError, match="own"):
        fork_workers(worker, 2, listen)


@pytest.mark.parametrize("failing", range(3))
def test_one_raises_while_the_others_wait(failing: int):
    def worker(context: WorkerContext) -> None:
        if context.rank == failing:
            raise ValueError("the model is wrong")
        wait_for_peers(context)

    start = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        fork_workers(worker, 3)
    assert time.monotonic() - start < 5
    assert (caught.value.rank, caught.value.error_type) == (failing, "ValueError")
    text = str(caught.value)
    assert text.startswith(f"worker {failing} failed\n")
    assert "the model is wrong" in text and "in worker" in text and text.count("Traceback") == 1
    assert "runtime/workers/team.py" not in text  # the launcher's frames are of no use to the user


def test_one_raises_while_the_others_ignore_sigterm(monkeypatch):
    monkeypatch.setattr(launch, "TERM_SECONDS", 0.3)

    def worker(context: WorkerContext) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        context.world.connect()
        dist.barrier()
        if context.rank == 0:
            raise ValueError("boom")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="boom"):
        fork_workers(worker, 2)
    assert time.monotonic() - start < 8


def test_the_echo_waits_for_the_cause():
    def worker(context: WorkerContext) -> None:
        if context.rank == 0:
            raise PeerLost(1, "receiving", "closed")
        time.sleep(0.3)
        raise ValueError("the cause")

    with pytest.raises(WorkerFailed, match="the cause") as caught:
        fork_workers(worker, 2)
    assert caught.value.rank == 1


def test_an_echo_alone_is_told():
    def worker(context: WorkerContext) -> None:
        if context.rank == 0:
            wait_for_peers(context)

    with pytest.raises(WorkerFailed) as caught:
        fork_workers(worker, 2)
    assert caught.value.rank == 0


def test_what_cleaning_up_raises_does_not_hide_the_action():
    def worker(context: WorkerContext) -> None:
        try:
            try:
                raise ValueError("the cause")
            except ValueError as error:
                raise ActionFailed(0, stage=1) from error
        finally:
            raise PeerLost(1, "closing", "gone")

    with pytest.raises(WorkerFailed, match="the cause") as caught:
        fork_workers(worker, 1)
    assert caught.value.stage == 1


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_one_is_killed(name: str):
    def worker(context: WorkerContext) -> None:
        faulthandler.disable()  # pytest's; it would print a page
        if context.rank == 1:
            os.kill(os.getpid(), getattr(signal, name))
        wait_for_peers(context)

    with pytest.raises(WorkerFailed, match=f"worker 1 failed: it was killed by {name}") as caught:
        fork_workers(worker, 3)
    assert (caught.value.rank, caught.value.error_type) == (1, name)


def test_one_leaves_through_the_back_door():
    with pytest.raises(WorkerFailed, match=r"worker 0 failed: it ended without a result \(exit code 3\)"):
        fork_workers(lambda context: os._exit(3), 1)


def test_sys_exit():
    """Whatever its code: a worker that leaves has no result, and the others would wait for it."""
    with pytest.raises(WorkerFailed, match=r"worker 1 failed: sys.exit\(0\) at .*:\d+ ended it before its work"):
        fork_workers(lambda context: sys.exit(0) if context.rank else wait_for_peers(context), 2)
    with pytest.raises(WorkerFailed, match=r"sys.exit\(3\) at .*test_launch.py"):
        fork_workers(lambda context: sys.exit(3), 2)


def test_a_result_that_cannot_be_sent():
    with pytest.raises(WorkerFailed, match="pickle"):
        fork_workers(lambda context: lambda: None, 2)


def test_an_action_failed_tells_where():
    def worker(context: WorkerContext) -> None:
        try:
            raise ZeroDivisionError("by nothing")
        except ZeroDivisionError as error:
            raise ActionFailed(
                context.rank, stage=1, microbatch=3, module="layers.3.attn", source="model.py:42: x = 1 / 0"
            ) from error

    with pytest.raises(WorkerFailed) as caught:
        fork_workers(worker, 1)
    failed = caught.value
    assert (failed.stage, failed.microbatch, failed.module) == (1, 3, "layers.3.attn")
    assert str(failed).startswith(
        "worker 0 failed at stage 1, microbatch 3, in layers.3.attn (model.py:42: x = 1 / 0)\n\nTraceback"
    )
    assert str(failed).endswith("ZeroDivisionError: by nothing") and "ActionFailed" not in str(failed)


def test_bad_input_is_raised_again_as_it_was():
    def missing(context: WorkerContext) -> None:
        raise Missing("the recipe has no function 'model'")

    with pytest.raises(Missing, match=r"^the recipe has no function 'model'$"):
        fork_workers(missing, 2)


def test_bad_input_that_does_not_pickle_keeps_its_sentence():
    def refuse(context: WorkerContext) -> None:
        raise Refused(what="the plan")

    with pytest.raises(PolylaneError, match=r"^refused: the plan$"):
        fork_workers(refuse, 2)


def test_bad_input_met_within_an_action():
    def worker(context: WorkerContext) -> None:
        raise ActionFailed(0, stage=1) from Missing("the loss is NaN at step 3")

    with pytest.raises(Missing, match=r"^the loss is NaN at step 3$"):
        fork_workers(worker, 1)


def test_what_cannot_be_forked_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(PolylaneError, match="at least one worker"):
        fork_workers(lambda context: None, 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PolylaneError, match="already started CUDA"):
        fork_workers(lambda context: None, 1)


def test_one_thread_each_where_cores_are_few():
    limit_to_one_thread()
    assert fork_workers(lambda context: torch.get_num_threads(), os.cpu_count() or 1) == [1] * (os.cpu_count() or 1)


def test_a_worker_may_have_workers_of_its_own():
    def worker(context: WorkerContext) -> list[float]:
        samples = torch.utils.data.TensorDataset(torch.arange(4.0))
        return [x.item() for (x,) in torch.utils.data.DataLoader(samples, num_workers=1, batch_size=None)]

    assert fork_workers(worker, 1) == [[0.0, 1.0, 2.0, 3.0]]


def test_four_workers_start_at_once():
    start = time.monotonic()
    began = fork_workers(lambda context: time.monotonic(), 4)
    assert max(began) - start < 3  # measured: under 0.1 s; the bound only guards against hanging


# ------------------------------------------------------------------------------------------ what ends the parent itself

SCRIPT = """
    import os, sys, time, torch
    torch.set_num_threads(1)
    from polylane.runtime.workers.team import fork_workers

    def worker(context):
        context.send_message({"pid": os.getpid()})
        time.sleep(60)

    pids = []
    def listen(rank, content):
        pids.append(content["pid"])
        if len(pids) == 3:
            print(*pids, flush=True)

    try:
        fork_workers(worker, 3, listen)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


@pytest.fixture
def script():
    process = forked_commands.start([sys.executable, "-c", textwrap.dedent(SCRIPT)], start_new_session=True)
    yield process
    process.kill()
    process.communicate()


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status  # nobody may be there to bury it: that is not ours


def all_gone(pids: list[int], within: float) -> bool:
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def workers_of(script: subprocess.Popen[str]) -> list[int]:
    assert script.stdout is not None
    pids = [int(pid) for pid in script.stdout.readline().split()]
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    return pids


@pytest.mark.parametrize("whole_group", [False, True])  # True is what a terminal does
def test_control_c(script: subprocess.Popen[str], whole_group: bool):
    pids = workers_of(script)
    (os.killpg if whole_group else os.kill)(script.pid, signal.SIGINT)
    output, _ = script.communicate(timeout=10)
    assert (output, script.returncode) == ("interrupted\n", 130)
    assert not any(alive(pid) for pid in pids)


def test_control_c_twice(script: subprocess.Popen[str]):
    pids = workers_of(script)
    script.send_signal(signal.SIGINT)
    script.send_signal(signal.SIGINT)
    script.communicate(timeout=10)
    assert all_gone(pids, within=3)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_the_parent_dies(script: subprocess.Popen[str], name: str):
    pids = workers_of(script)
    script.send_signal(getattr(signal, name))
    script.wait(timeout=10)
    assert all_gone(pids, within=3)
