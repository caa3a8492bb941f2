"""Injection: how a fault gets into a worker, around the function that this trains with.

Nothing of the product knows of faults. The process that starts the training, or torchrun's worker, puts
:class:`FaultyLoop` in the place of the training loop; in a worker it wraps the job's steps and its data.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from polylane.checkpoint.commit import MANIFEST
from polylane.checkpoint.manifest import read_manifest
from polylane.checkpoint.store import CheckpointStore
from polylane.commands.logs.step_log import TrainingOutcome
from polylane.commands.running.recipe_training import RecipeTraining
from polylane.commands.running.training_loop import RecipeLoop
from polylane.runtime.data.loader import is_mapped
from polylane.runtime.job import Job
from tests.chaos.control_groups import forbid_processes, freeze_process
from tests.chaos.faults import DAMAGES, DEATHS, LIMITS, LOADS, Fault, FaultKind, FaultLog
from tests.chaos.isolation import list_children
from tests.support.hosts import drop_link

DELAY_SECONDS = 0.02  # longest time from the beginning of a step to the death of a worker
DELAY_OPERATORS = 12  # most operators of a pass before the one that raises
FILLER = "filler"  # file that fills a disk


class InjectedError(RuntimeError):
    """The exception that a fault raises, as one of the user's code would."""


class FaultyLoop:
    """The training loop, with a fault that strikes once.

    Args:
        fault: what strikes this training; None: nothing does, and only the log is written.
        log: where this worker writes its first step, and the fault that it struck.
        job: this worker's part in the training.
        training: the recipe's model and data, with the options.
        others: further arguments of the training loop.
    """

    def __init__(self, fault: Fault | None, log: FaultLog, job: Job, training: RecipeTraining, *others: Any) -> None:
        self._injector = Injector(fault, log, job, training)
        if fault is not None and fault.kind in LOADS:
            training = replace(training, train=_open_faulty(training.train, self._injector))
        job.step = self._injector.wrap_step(job.step)  # type: ignore[method-assign]
        self._job, self._training, self._others = job, training, others

    def run(self) -> TrainingOutcome:
        """Train as the training loop does."""
        try:
            return RecipeLoop(self._job, self._training, *self._others).run()
        finally:
            self._injector.free_disk()


class Injector:
    """One worker's part in a fault.

    Args:
        fault: what strikes the training; None: nothing does.
        log: where it proves that it struck.
        job: this worker's part in the training.
        training: the recipe's model and data, with the options.
    """

    def __init__(self, fault: Fault | None, log: FaultLog, job: Job, training: RecipeTraining) -> None:
        self._fault, self._log, self._job = fault, log, job
        self._checkpoints = training.request.checkpoints
        # Of the attempts of a training the first one is struck, and the others show how it recovers.
        self._is_armed = fault is not None and fault.rank == job.world.rank and not log.read("struck")
        self._has_begun, self._operators, self._filler = False, 0, Path()
        self._full_until: int | None = None

    def is_due(self) -> bool:
        """Whether the fault strikes the step that is made, or loaded, now."""
        return self._is_armed and self._fault is not None and self._job.position.step + 1 >= self._fault.step

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the job's step with the fault around it."""

        def wrapped(batch: Any, objective: str | None = None) -> Any:
            number = self._job.position.step + 1
            if not self._has_begun:
                self._log.write("first step", rank=self._job.world.rank, step=number)
            if self._full_until is not None and number >= self._full_until:
                self.free_disk()
            with self._prepare() if self.is_due() else nullcontext():
                result = step(batch, objective)
            if not self._has_begun:
                self._has_begun = True
                self._log.write("at work", rank=self._job.world.rank, step=number)
            return result

        return wrapped

    def strike(self, **facts: Any) -> None:
        """Say that the fault strikes now; it does so at once after this."""
        assert self._fault is not None
        self._is_armed = False
        # A folder that gets its name while they are listed is missed by one of two looks at most.
        folders = sorted({name for _ in range(2) for name in self._list_folders()})
        step = self._job.position.step + 1
        self._log.write("struck", rank=self._job.world.rank, step=step, kind=self._fault.kind, folders=folders, **facts)

    def _list_folders(self) -> list[str]:
        return [] if self._checkpoints is None else [folder.name for folder in self._checkpoints.glob("*")]

    def raise_error(self, target: str) -> None:
        """Raise as the user's code would."""
        raise InjectedError(f"injected into the {target}")

    def _prepare(self) -> Any:
        """Have the fault strike this step, and return what the step is made in."""
        assert self._fault is not None
        kind = self._fault.kind
        if kind in DEATHS | {FaultKind.STOP, FaultKind.LINK, FaultKind.FROZEN, FaultKind.HANGUP}:
            striking = threading.Timer(self._fault.delay * DELAY_SECONDS, self._strike_process, (kind,))
            striking.start()
            self._is_armed = False
            if kind is FaultKind.LINK:
                return _finished_by(striking)
        elif kind in (FaultKind.FORWARD, FaultKind.BACKWARD, FaultKind.INTERPRETER):
            return _FaultyOperators(self)
        elif kind is FaultKind.OPTIMIZER:
            for local_optimizer in self._job.worker.stepping():
                local_optimizer.optimizer.register_step_pre_hook(lambda *_: self._raise_in_optimizer())
            self._is_armed = False
        elif kind is FaultKind.FULL_DISK:
            self._fill_disk()
        elif kind is FaultKind.STDOUT:
            self.strike()
            print("a line of the recipe's own", flush=True)
        elif kind is FaultKind.WRITER and (writer := _find_writer()) is not None:
            self.strike(writer=writer)
            os.kill(writer, signal.SIGSTOP)
        elif kind in LIMITS:
            self.strike()
            self._reach_limit(kind)
        elif kind in DAMAGES and (damaged := self._damage(kind)):
            self.strike(damaged=str(damaged))
            os.kill(os.getpid(), signal.SIGKILL)
        return nullcontext()

    def _strike_process(self, kind: FaultKind) -> None:
        self.strike()
        if kind is FaultKind.LINK:
            self._log.write("link down", state=drop_link())
            return
        if kind is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind is FaultKind.FROZEN:
            freeze_process(os.getpid(), self._log.path)
        elif kind is FaultKind.HANGUP:
            os.kill(os.getppid(), signal.SIGHUP)
        elif kind is FaultKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind is FaultKind.SEGFAULT:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        else:
            os._exit(0)

    def _reach_limit(self, kind: FaultKind) -> None:
        """Ask for a file or a process that the system refuses, as the user's code would."""
        if kind is FaultKind.PROCESSES:
            forbid_processes(os.getpid(), self._log.path)
            subprocess.run([sys.executable, "-c", ""], check=True)
            return
        soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard_limit))  # what is open stays open
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))

    # What raises ------------------------------------------------------------------------------------------------------

    def count_operator(self) -> None:
        """Count an operator of the pass that the fault strikes; raise if it is the one."""
        assert self._fault is not None
        self._operators += 1
        if self._is_armed and self._operators > self._fault.delay * DELAY_OPERATORS:
            self.strike()
            if self._fault.kind is FaultKind.INTERPRETER:
                _hold_interpreter()
            self.raise_error(f"{self._fault.kind} pass")

    def is_struck(self, is_differentiable: bool, in_backward: bool) -> bool:
        """Whether an operator is one of those that the fault may strike.

        Args:
            is_differentiable: whether autograd follows one of its inputs.
            in_backward: whether a backward pass calls it.
        """
        assert self._fault is not None
        if self._fault.kind is FaultKind.FORWARD:
            return is_differentiable and not in_backward
        return in_backward or self._fault.kind is FaultKind.INTERPRETER

    def _raise_in_optimizer(self) -> None:
        self.strike()
        self.raise_error("optimizer")

    def raise_in_data(self) -> None:
        """Raise as the data set would, or as a process of its own loader would."""
        assert self._fault is not None
        if self._fault.kind is FaultKind.LOADER:
            self.raise_error("data set")
        next(iter(DataLoader(_RaisingData(), num_workers=1)))  # type: ignore[arg-type]

    # What lies on the disk --------------------------------------------------------------------------------------------

    def _damage(self, kind: FaultKind) -> Path | None:
        """Damage the newest complete checkpoint, if there are two; return the file."""
        assert self._fault is not None and self._checkpoints is not None
        complete = CheckpointStore(self._checkpoints).list_steps()
        if len(complete) < 2:
            return None
        newest = complete[-1][1]
        if kind is FaultKind.NO_MANIFEST:
            (newest / MANIFEST).unlink()
            return newest / MANIFEST
        random_ = random.Random(self._fault.delay)
        with suppress(OSError):  # it was removed meanwhile, for a newer one: the next step is as good
            name = random_.choice([name for name, size in read_manifest(newest).files.items() if size])
            with (newest / name).open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if kind is FaultKind.TRUNCATED:
                    file.truncate(random_.randrange(size))
                else:
                    file.seek(random_.randrange(size))
                    (byte,) = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ (1 << random_.randrange(8))]))
            return newest / name
        return None

    def _fill_disk(self) -> None:
        """Leave no room on the disk of the run's folder, or let this process and its writer write nothing."""
        assert self._fault is not None and self._checkpoints is not None
        self._filler = self._checkpoints.parent / FILLER
        self._full_until = self._job.position.step + 1 + self._fault.lasts
        if self._fault.whole_disk:
            with suppress(OSError), self._filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
            free_bytes = shutil.disk_usage(self._filler.parent).free
            self.strike(filled=self._filler.stat().st_size, left=free_bytes)
        else:
            self.strike(limited=True)
            self._limit_files(0)

    def free_disk(self) -> None:
        """Make room again, if this worker has taken it."""
        if self._full_until is None or self._fault is None:
            return
        self._full_until = None
        if self._fault.whole_disk:
            self._filler.unlink(missing_ok=True)
        else:
            self._limit_files(resource.RLIM_INFINITY)
        self._log.write("freed", rank=self._job.world.rank, step=self._job.position.step + 1)

    def _limit_files(self, size: int) -> None:
        """Let this process and its children, the writer of checkpoints among them, write files of a size at most."""
        for pid in (os.getpid(), *list_children()):
            with suppress(OSError, ValueError):
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def _find_writer() -> int | None:
    """Return the process that writes this worker's checkpoints; None before there is one."""
    for pid in list_children():
        with suppress(OSError):
            if b"polylane.checkpoint.writer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def _hold_interpreter() -> None:
    """Wait in native code, with the interpreter's lock, for a lock that is never released; signals do not end that."""
    library = ctypes.PyDLL(None)  # its functions are called with the interpreter's lock, unlike those of a CDLL
    mutex = ctypes.create_string_buffer(256)  # PTHREAD_MUTEX_INITIALIZER is zeros
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


@contextmanager
def _finished_by(thread: threading.Thread) -> Iterator[None]:
    """A step that is not left before a thread is done, which takes longer than a short step."""
    yield
    thread.join()


class _FaultyOperators(TorchDispatchMode):
    """A step in which one operator raises, or does not return."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._injector = injector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        differentiable = torch.is_grad_enabled() and any(
            isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args
        )
        if self._injector.is_struck(differentiable, in_backward):
            self._injector.count_operator()
        return func(*args, **(kwargs or {}))


class _RaisingData:
    """Data whose sample raises; at module level, since a process of a loader may pickle it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise InjectedError("injected into the data set")


def _open_faulty(dataset: Any, injector: Injector) -> Any:
    return _FaultySamples(dataset, injector) if is_mapped(dataset) else _FaultyStream(dataset, injector)


class _FaultySamples:
    """A map-style data set of which one sample raises, as often as it is read."""

    def __init__(self, dataset: Any, injector: Injector) -> None:
        self._dataset, self._injector, self._raising = dataset, injector, None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if self._injector.is_due():
            self._injector.strike()
            self._raising = index
        if self._raising is not None and index == self._raising:
            self._injector.raise_in_data()
        return self._dataset[index]


class _FaultyStream:
    """An iterable data set of which one sample raises."""

    def __init__(self, dataset: Any, injector: Injector) -> None:
        self._dataset, self._injector = dataset, injector

    def __iter__(self) -> Iterator[Any]:
        for sample in self._dataset:
            if self._injector.is_due():
                self._injector.strike()
                self._injector.raise_in_data()
            yield sample
