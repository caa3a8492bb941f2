"""Launches: command lines of trainings, run to their end, with the moments at which they said what had happened."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from polylane.runtime.workers.world import accelerator_type
from tests.chaos.faults import Course
from tests.support.hosts import DATA_LINK, Hosts

POLL_SECONDS = 0.02
FAULTY_TRAIN = "tests.chaos.faulty_train"

Poll = Callable[[], int | None]
Tend = Callable[[Sequence[tuple[float, str]]], None]


@dataclass(frozen=True)
class Ending:
    """How a command line ended.

    Attributes:
        code: its exit code, negative for the signal that killed it; None where it did not end in time.
        ended: seconds since 1970 at its end.
        text: what it printed on stderr.
        said: the moment at which each line of stderr was there.
    """

    code: int | None
    ended: float
    text: str
    said: Sequence[tuple[float, str]]


def run_command(
    course: Course,
    ranks: int,
    words: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    limit: float,
    hosts: Hosts | None = None,
    tend: Tend = lambda lines: None,
    is_stdout_full: bool = False,
) -> Ending:
    """Run ``polylane WORDS`` with what :mod:`.faulty_train` puts into its workers, and wait for its end.

    Args:
        course: over what the training's workers talk, and who starts them.
        ranks: number of the training's workers.
        words: the command line of polylane, without the program's name.
        folder: a folder for what it prints.
        variables: additional variables of its environment.
        limit: seconds after which it is killed.
        hosts: the hosts of a course of two.
        tend: called again and again, with all that was said so far.
        is_stdout_full: whether stdout is a device that takes nothing, in place of a file.
    """
    environment = {**variables, "POLYLANE_TRANSPORT": course.transport}
    out, error = (folder / f"{name}.{time.time_ns()}" for name in ("stdout", "stderr"))
    out = Path("/dev/full") if is_stdout_full else out
    with ExitStack() as meanwhile:
        if course.launcher == "own" and accelerator_type() is None:
            launched = [_fork(words, environment, out, error)]
        elif course.launcher == "own":
            launched = [_start_python([FAULTY_TRAIN, *words], environment, out, error)]
        elif hosts is None:
            launched = [
                _start_torchrun(["--standalone", "--nproc-per-node", str(ranks)], words, environment, out, error)
            ]
        else:
            launched = _start_on_hosts(hosts, meanwhile, ranks, words, environment, out, error)
        for pid, poll in launched:
            meanwhile.callback(_end, pid, poll)  # also where this command itself is broken off
        deadline, lines, at = time.time() + limit, list[tuple[float, str]](), 0
        while None in (codes := [poll() for _, poll in launched]) and time.time() < deadline:
            at = _follow(error, at, lines)
            tend(lines)
            time.sleep(POLL_SECONDS)
        end_time = time.time()
    code = None if None in codes else next((exit_code for exit_code in codes if exit_code), 0)
    _follow(error, at, lines)
    text = error.read_text(encoding="utf-8", errors="replace")
    return Ending(code, end_time, text, lines)


def _end(pid: int, poll: Poll) -> None:
    """Kill a process that is still there, and wait for its end."""
    if poll() is None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while poll() is None:
        time.sleep(POLL_SECONDS)


def _follow(path: Path, at: int, lines: list[tuple[float, str]]) -> int:
    """Read what a file has more than before; return how much has been read."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(at)
        new = file.read()
        lines += [(time.time(), line) for line in new.decode(errors="replace").splitlines()]
        return at + len(new)
    return at


def _fork(words: Sequence[str], environment: Mapping[str, str], out: Path, error: Path) -> tuple[int, Poll]:
    """Start it as a fork of this process, where torch is imported already."""
    process = multiprocessing.get_context("fork").Process(target=_become, args=(words, environment, out, error))
    process.start()
    assert process.pid is not None
    return process.pid, lambda: process.exitcode


def _become(words: Sequence[str], environment: Mapping[str, str], out: Path, error: Path) -> None:
    from tests.chaos.faulty_train import main

    os.setsid()
    for number, path in ((1, out), (2, error)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(environment)
    _forget_temporary_folder()
    main(words)


def _forget_temporary_folder() -> None:
    import tempfile

    tempfile.tempdir = None  # it was found by the environment of the process that was forked


def _start_on_hosts(
    hosts: Hosts,
    meanwhile: ExitStack,
    ranks: int,
    words: Sequence[str],
    environment: Mapping[str, str],
    out: Path,
    error: Path,
) -> list[tuple[int, Poll]]:
    """Start an agent of torchrun on each host, with half of the workers; the store is there while `meanwhile` is."""
    store = hosts.open_store()
    meanwhile.callback(lambda: store.host)  # a store without a reference ends
    # Memory is shared inside a host, and gloo goes over the link that can drop.
    environment = {**environment, "GLOO_SOCKET_IFNAME": DATA_LINK}
    if environment["POLYLANE_TRANSPORT"] == "shared_memory":
        environment["POLYLANE_TRANSPORT"] = ""
    launched, counts = [], (ranks - ranks // 2, ranks // 2)
    for host, options, count in zip(hosts.hosts, hosts.agent_options(store, out.name), counts, strict=True):
        with host.enter():
            agent_options = [*options, "--nproc-per-node", str(count)]
            launched.append(_start_torchrun(agent_options, words, environment, out, error))
    return launched


def _start_torchrun(
    options: Sequence[str], words: Sequence[str], environment: Mapping[str, str], out: Path, error: Path
) -> tuple[int, Poll]:
    restarts = words[words.index("--max-restarts") + 1] if "--max-restarts" in words else "0"
    agent = ["torch.distributed.run", *options, "--max-restarts", restarts]
    return _start_python([*agent, "-m", "--", FAULTY_TRAIN, *words], environment, out, error)


def _start_python(module: Sequence[str], environment: Mapping[str, str], out: Path, error: Path) -> tuple[int, Poll]:
    """Start a module with arguments as a process of its own.

    Workers that are new processes need it: multiprocessing imports the main module of the process that starts them.
    """
    # A library of torch's that prints for every worker how many threads it gives it, unless this is set.
    found = os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))  # where tests is
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": found, **environment}
    with out.open("ab") as to, error.open("ab") as to_error:
        process = subprocess.Popen(
            [sys.executable, "-m", *module], stdout=to, stderr=to_error, env=variables, start_new_session=True
        )
    return process.pid, process.poll
