"""Contenders that take turns on the same machine: each in processes of its own, which sleep while another one runs."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from polylane.profiling.machine_load import measure_undisturbed
from polylane.runtime.workers.parent_tie import tie_to_parent

# What one worker of a contender does: given its rank, it sets itself up and returns the function that runs one step.
Setup = Callable[[int], Callable[[], Any]]


def make_parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark, with the option that all of them have.

    Args:
        module: name of the benchmark's module, as python -m takes it.
        about: docstring of the module, which --help prints.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    said = "one short turn of all that is asked for, to see that it works: its figures mean nothing"
    parser.add_argument("--quick", action="store_true", help=said)
    return parser


@dataclass
class Contender:
    """One way of training the same model.

    Attributes:
        name: as it stands in the table.
        workers: processes it takes.
        setup: see :data:`Setup`; runs in each of them, inside a gloo process group when there are several.
        threads: intra-op threads of each.
        answers: what the last step of the last turn returned, by rank.
    """

    name: str
    workers: int
    setup: Setup
    threads: int = 1
    pipes: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    extra: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)


def _serve(contender: Contender, rank: int, port: int, pipe: Connection, parent: int) -> None:
    tie_to_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(contender.threads)
    if contender.workers > 1:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(contender.workers),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(contender.workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        torch.distributed.init_process_group("gloo")
    step = contender.setup(rank)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        lead, count = asked
        for _ in range(lead):
            step()
        if contender.workers > 1:
            torch.distributed.barrier()
        start = time.perf_counter()
        result = None
        for _ in range(count):
            result = step()
        pipe.send(((time.perf_counter() - start) / count, result))
    os._exit(0)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(contenders: Sequence[Contender]) -> Iterator[None]:
    """Start every contender's processes; end them afterwards."""
    context = multiprocessing.get_context("fork")
    try:
        for contender in contenders:
            port = _free_port()
            for rank in range(contender.workers):
                mine, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(contender, rank, port, theirs, os.getpid()))
                process.start()
                theirs.close()
                contender.pipes.append(mine)
                contender.processes.append(process)
            for pipe in contender.pipes:
                pipe.recv()
        yield
    finally:
        for contender in contenders:
            for pipe, process in zip(contender.pipes, contender.processes, strict=True):
                try:
                    pipe.send(None)
                except OSError:
                    process.kill()
                process.join()


def turn(contender: Contender, steps: int, lead: int = 0) -> float:
    """Let one contender run some steps: seconds a step, of its slowest worker; ``lead`` steps before do not count."""
    for pipe in contender.pipes:
        pipe.send((lead, steps))
    answers = [pipe.recv() for pipe in contender.pipes]
    contender.extra.append(answers[0][1])
    contender.answers = [answer for _, answer in answers]
    return max(seconds for seconds, _ in answers)


def race(contenders: Sequence[Contender], rounds: int, steps: int, warm_up: int = 2, lead: int = 0) -> None:
    """Rounds in which every contender has its turn, in an order that turns round with the rounds.

    A turn that other programs disturb is repeated once, and the less disturbed one counts; a single round is a try.

    Args:
        contenders: who takes part.
        rounds, steps: turns of each, and steps of a turn.
        warm_up: steps before the first round.
        lead: steps of every turn that do not count: after its pause a contender finds caches full of the others'.
    """
    disturbed = 0
    with running(contenders):
        for contender in contenders:
            turn(contender, warm_up)
        for number in range(rounds):
            shift = number % len(contenders)
            for contender in [*contenders[shift:], *contenders[:shift]]:
                if rounds == 1:
                    contender.seconds.append(turn(contender, steps, lead))
                    continue
                seconds, load = measure_undisturbed(lambda _, racer=contender: turn(racer, steps, lead))
                contender.seconds.append(seconds)
                disturbed += load.is_disturbing
    if disturbed:
        print(f"{disturbed} of {rounds * len(contenders)} turns were disturbed by other programs, twice each")


def table(contenders: Sequence[Contender], base: str) -> str:
    """Median step, its spread, and the speed-up over ``base`` (median of the rounds' ratios)."""
    reference = next(c for c in contenders if c.name == base)
    lines = [f"| {'':34} | step, ms | spread | speed-up |", f"|{'-' * 36}|---------:|-------:|---------:|"]
    for c in contenders:
        ratios = [r / s for r, s in zip(reference.seconds, c.seconds, strict=True)]
        low, high = min(c.seconds), max(c.seconds)
        spread = (high - low) / 2 / c.median
        lines.append(f"| {c.name:34} | {c.median * 1e3:8.1f} | {spread:5.0%} | {statistics.median(ratios):7.2f}x |")
    return "\n".join(lines)
