"""Faults: what may go wrong with a training, drawn from a seed, and the log in which each proves that it struck."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")

VARIABLE = "POLYLANE_FAULT"  # in the environment of a training: the file with the fault that strikes it

Launcher = Literal["own", "torchrun"]
LAUNCHERS: tuple[Launcher, ...] = ("own", "torchrun")
TRANSPORTS = ("shared_memory", "gloo")
Recovery = Literal["restart", "resume", "none"]


class FaultKind(StrEnum):
    """What goes wrong; the text is what people read, and what ``--only`` takes."""

    KILL = "kill"
    STOP = "stop"
    SEGFAULT = "segfault"
    EXIT = "exit"
    INTERPRETER = "interpreter"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LOADER = "loader"
    LOADER_WORKER = "loader-worker"
    LINK = "link"
    FROZEN = "frozen"
    HANGUP = "hangup"
    STDOUT = "stdout"
    WRITER = "writer"
    DESCRIPTORS = "descriptors"
    PROCESSES = "processes"
    FULL_DISK = "full-disk"
    FLIPPED = "flipped-byte"
    TRUNCATED = "truncated"
    NO_MANIFEST = "no-manifest"


# By what a fault is: the process of a worker ends, or stands still; the user's code raises; a checkpoint is damaged,
# and a worker killed so that the checkpoint is needed.
DEATHS = frozenset({FaultKind.KILL, FaultKind.SEGFAULT, FaultKind.EXIT})
HANGS = frozenset({FaultKind.STOP, FaultKind.INTERPRETER, FaultKind.LINK, FaultKind.FROZEN})
LIMITS = frozenset({FaultKind.DESCRIPTORS, FaultKind.PROCESSES})
# torchrun's agent waits without a bound for a worker that cannot be killed, and ends by signals in a way of its own.
OF_OWN_LAUNCHER = frozenset({FaultKind.FROZEN, FaultKind.HANGUP})
GOES_ON = frozenset({FaultKind.FULL_DISK, FaultKind.STDOUT, FaultKind.WRITER})  # the training, by itself
RAISES = frozenset({FaultKind.FORWARD, FaultKind.BACKWARD})
LOADS = frozenset({FaultKind.LOADER, FaultKind.LOADER_WORKER})
DAMAGES = frozenset({FaultKind.FLIPPED, FaultKind.TRUNCATED, FaultKind.NO_MANIFEST})

MEANINGS = {
    FaultKind.KILL: "kill -9 of a worker",
    FaultKind.STOP: "SIGSTOP of a worker",
    FaultKind.SEGFAULT: "a worker reads address 0",
    FaultKind.EXIT: "os._exit(0) in a worker",
    FaultKind.INTERPRETER: "native code that waits with Python's interpreter lock",
    FaultKind.FORWARD: "an operator of a forward pass raises",
    FaultKind.BACKWARD: "an operator of a backward pass raises",
    FaultKind.OPTIMIZER: "the optimizer raises",
    FaultKind.LOADER: "the data set raises",
    FaultKind.LOADER_WORKER: "the data set raises in a process of its own",
    FaultKind.LINK: "the link between two hosts carries nothing",
    FaultKind.FROZEN: "a worker is frozen: not even kill -9 ends it",
    FaultKind.HANGUP: "SIGHUP of the launcher, as of a terminal that is closed",
    FaultKind.STDOUT: "stdout is a disk that is full",
    FaultKind.WRITER: "SIGSTOP of a checkpoint's writer",
    FaultKind.DESCRIPTORS: "a worker may open no more files",
    FaultKind.PROCESSES: "a worker may start no more processes",
    FaultKind.FULL_DISK: "the disk of the run's folder is full for a while",
    FaultKind.FLIPPED: "a byte of the newest checkpoint flips, then kill -9",
    FaultKind.TRUNCATED: "a file of the newest checkpoint is cut off, then kill -9",
    FaultKind.NO_MANIFEST: "the newest checkpoint's manifest is removed, then kill -9",
}


@dataclass(frozen=True)
class Course:
    """The conditions of a training: how it is split, and over what its workers talk.

    Attributes:
        plan: the line of a plan.
        transport: "shared_memory" or "gloo", as the variable POLYLANE_TRANSPORT says.
        launcher: "own" where polylane starts the workers, "torchrun" where torchrun does.
        hosts: number of hosts that the workers are on; two are torchrun's, and share memory inside each at most.
    """

    plan: str
    transport: str
    launcher: Launcher
    hosts: int = 1

    def __str__(self) -> str:
        return f"{self.plan} · {self.transport} · {self.launcher}" + (f" · {self.hosts} hosts" * (self.hosts > 1))


@dataclass(frozen=True)
class Fault:
    """One fault, as it was drawn.

    Attributes:
        kind: word for what goes wrong.
        rank: rank of the worker that it strikes.
        step: the training step, from 1, in which it strikes, or in a later one where it cannot then.
        delay: where in the step, from 0 to 1.
        recovery: "restart" where the workers are started again, "resume" where the command is called again, "none"
            where the training goes on by itself.
        lasts: steps until a disk has room again.
        whole_disk: whether the run's folder is a disk of its own, which can be filled.
        log: path of the log of the training's faults.
    """

    kind: FaultKind
    rank: int
    step: int
    delay: float
    recovery: Recovery
    lasts: int
    whole_disk: bool
    log: str

    def write(self, path: Path) -> None:
        """Write it into a file, for the processes of the training."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Fault:
        """Read it from the file that :meth:`write` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return Fault(**{**data, "kind": FaultKind(data["kind"])})


@dataclass(frozen=True)
class FaultLog:
    """What happened to a training, a line of JSON each, written by whoever did it.

    Attributes:
        path: of the file, which all processes of the training append to.
    """

    path: Path

    def write(self, event: str, **facts: Any) -> None:
        """Append an event with the time and this process; it is there when the call returns."""
        line = json.dumps({"event": event, "time": time.time(), "pid": os.getpid(), **facts}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def read(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a name, the earliest first."""
        if not self.path.exists():
            return []
        entries = (json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines())
        return [entry for entry in entries if entry["event"] == event]


def draw_pairs(
    random_: random.Random, kinds: Sequence[FaultKind], courses: Sequence[Course]
) -> Iterator[tuple[FaultKind, Course]]:
    """Yield kinds of faults and the trainings that they strike, without end; all kinds, and all trainings, alike.

    A link drops in trainings on several hosts, and nothing else is tried on these.
    """
    alone = [course for course in courses if course.hosts == 1]
    on_one_host = _draw_rounds(random_, alone)
    on_own_launcher = _draw_rounds(random_, [course for course in alone if course.launcher == "own"])
    on_several = _draw_rounds(random_, [course for course in courses if course.hosts > 1])
    for kind in _draw_rounds(random_, kinds):
        suited = on_own_launcher if kind in OF_OWN_LAUNCHER else on_one_host
        yield kind, next(on_several if kind is FaultKind.LINK else suited)


def _draw_rounds(random_: random.Random, items: Sequence[T]) -> Iterator[T]:
    """Yield all items in some order, then all in another one, and so on."""
    while True:
        yield from random_.sample(items, len(items))


def draw_fault(
    random_: random.Random, kind: FaultKind, ranks: Sequence[int], steps: int, save_every: int, disk: bool, log: Path
) -> Fault:
    """Draw the moment of a fault, its rank, and how the training is to go on.

    Args:
        random_: source of all draws.
        kind: word for what goes wrong.
        ranks: the workers at which it can strike.
        steps: number of the training's steps, of which the first and the last two are spared.
        save_every: steps between two checkpoints.
        disk: whether the run's folder is a disk of its own.
        log: path of the log that the fault writes.
    """
    rank, delay = random_.choice(ranks), random_.random()
    recovery = random_.choice(("restart", "resume")) if kind in DEATHS | HANGS | DAMAGES else "resume"
    first_step, last_step = 2, steps - 2
    if kind is FaultKind.LINK:
        recovery = random_.choice(("none", "restart", "resume"))
    if kind in DAMAGES:  # there are two checkpoints by then
        first_step = min(2 * save_every + 2, last_step)
    if kind is FaultKind.FULL_DISK:
        recovery, last_step = "none", max(first_step, steps - 4 * save_every)
    elif kind in GOES_ON:
        recovery, last_step = "none", steps - 2 * save_every
    step = random_.randint(first_step, max(first_step, last_step))
    return Fault(kind, rank, step, delay, recovery, 2 * save_every, disk, str(log))  # type: ignore[arg-type]
