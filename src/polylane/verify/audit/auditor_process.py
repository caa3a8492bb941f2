"""Auditor process: what replays audited steps by the user's own code, beside the workers.

It knows of no ranks, its output is discarded, and the workers compute first. Its Python state goes on from one audited
step to the next: what a checkpoint carries is the plan's, the rest has seen the audited steps alone.
"""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import named_parameters
from polylane.errors import PolylaneError, describe_error
from polylane.graph.batch import flatten
from polylane.parent_death import die_with_parent
from polylane.runtime.checkpoint.state_board import BoardReader, BoardRecord
from polylane.runtime.parameters.materialize import is_on_meta, materialize
from polylane.runtime.plain_data.serialization import decode, encode, serializable
from polylane.runtime.workers.launch_environment import hide_ranks
from polylane.runtime.workers.world import affine_cores
from polylane.verify.audit.audit_settings import watch_settings
from polylane.verify.audit.device_rounding import DeviceRounding
from polylane.verify.audit.step_replay import StepReplay, StepVerdict

NICENESS = 5  # the workers compute first

# Reads the whole batch that begins after some samples of an epoch (from 0), by the user's own data set.
ReadBatch = Callable[[int, int], Any]


@serializable
@dataclass(frozen=True)
class StepOrder:
    """A step that is to be replayed.

    Attributes:
        step: number of the step, from 0.
        objective: name of the loss.
        loss: of the step, as the plan computed it.
        epoch, samples: where in the data its batch begins.
        leaves: leaves of the whole batch, where the auditor has no data set to read it from; else None.
        settings: what the user's Python holds now, see :meth:`AuditSettings.read_values`.
        before: the plan's state with which the step began.
        after: the plan's state after it, with its gradients.
    """

    step: int
    objective: str
    loss: float
    epoch: int
    samples: int
    leaves: Sequence[Any] | None
    settings: Mapping[str, Any]
    before: BoardRecord
    after: BoardRecord


@dataclass(frozen=True)
class AuditedTraining:
    """What the auditor has of a training.

    Attributes:
        prepared: the training, compiled for its plan, with the user's model.
        example: a batch, for its form.
        clip_norm: bound on the 2-norm of all gradients, or None.
        seed: of all random numbers.
        rounding: how the training's device rounds.
        read_batch: reads batches from the user's data set; None: they come with the orders.
        begins_as_built: whether step 1 begins with the weights that the model was built with.
    """

    prepared: CompiledTraining
    example: Any
    clip_norm: float | None
    seed: int
    rounding: DeviceRounding
    read_batch: ReadBatch | None = None
    begins_as_built: bool = False


def run_auditor(
    build: Callable[[], AuditedTraining], boards: tuple[int, int], orders: Connection, parent: int, threads: int = 1
) -> None:
    """Become the auditor, and serve orders until there are no more.

    Args:
        build: returns the training; what it raises is the verdict on every step.
        boards: descriptors of the memory that holds the state before an audited step, and of that after it.
        orders: connection to rank 0.
        parent: number of rank 0's process, with which this one ends.
        threads: number of the host's cores that it may compute on.
    """
    gc.freeze()
    _leave_the_workers(parent)
    torch.set_num_threads(threads)
    server: _AuditServer | None = None
    refusal = ""
    try:
        server = _AuditServer(build(), boards)
    except Exception as error:
        refusal = _describe(error)
    while True:
        started = time.process_time()
        try:
            order = decode(orders.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            verdict = StepVerdict(order.step + 1, refusal=refusal) if server is None else server.replay(order)
        except Exception as error:  # of the user's own code, in a process where it never ran before
            verdict = StepVerdict(order.step + 1, refusal=_describe(error))
        verdict = replace(verdict, seconds=time.process_time() - started)
        try:
            orders.send_bytes(encode(verdict))
        except OSError:
            os._exit(0)


class _AuditServer:
    """Replays steps of a training.

    Args:
        training: what this process has of the training.
        boards: descriptors of the memory of states, before and after an audited step.
    """

    def __init__(self, training: AuditedTraining, boards: tuple[int, int]) -> None:
        self._training, self._boards = training, boards
        self._replays: dict[str, StepReplay] = {}
        # Before any step: what a script changes later is held against this.
        self._settings = watch_settings(training.prepared)
        self._required = _required_gradients(training.prepared)

    def replay(self, order: StepOrder) -> StepVerdict:
        """Make a step again, from the state and with the batch and the settings that its order has."""
        self._settings[order.objective].write_values(order.settings)
        training, prepared = self._training, self._training.prepared
        if is_on_meta(prepared.model):  # the values come with every order
            materialize(prepared.model, prepared.init, training.seed, torch.device("cpu"), lambda name, tensor: tensor)
        if order.objective not in self._replays:
            self._replays[order.objective] = StepReplay(
                prepared,
                order.objective,
                training.clip_norm,
                training.seed,
                training.rounding,
                training.example,
                self._required,
            )
        if order.leaves is not None:
            batch = flatten(training.example)[1](list(order.leaves))
        else:
            assert training.read_batch is not None
            batch = training.read_batch(order.epoch, order.samples)
        old_state, new_state = (
            BoardReader(board, state) for board, state in zip(self._boards, (order.before, order.after), strict=True)
        )
        replay = self._replays[order.objective]
        if order.step == 0 and training.begins_as_built and (name := replay.find_other_start(old_state)):
            return StepVerdict(1, difference=f"before step 1 {name} is not what it was in the model that was built")
        return replay.replay(order.step, batch, order.loss, old_state, new_state)


def _describe(error: Exception) -> str:
    """Return why a step cannot be replayed."""
    return str(error) if isinstance(error, PolylaneError) else f"{describe_error(error)}{_last_line(error)}"


def _leave_the_workers(parent: int) -> None:
    """Become a process that is nobody's worker: without ranks, output, or a claim on a core."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    hide_ranks()
    _forget_process_group()
    _reopen_files()
    os.nice(NICENESS)
    with suppress(OSError):  # where memory runs out, it goes first
        Path("/proc/self/oom_score_adj").write_text("1000")


def _reopen_files() -> None:
    """Have places of one's own in the files that are read: a data set reads from the same ones in the training."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # the folder's own, which is closed by now; a pipe, a socket
            descriptor = int(name)
            is_read_only = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if is_read_only and stat.S_ISREG(os.fstat(descriptor).st_mode):
                offset, new_descriptor = (
                    os.lseek(descriptor, 0, os.SEEK_CUR),
                    os.open(f"/proc/self/fd/{name}", os.O_RDONLY),
                )
                os.lseek(new_descriptor, offset, os.SEEK_SET)
                os.dup2(new_descriptor, descriptor)
                os.close(new_descriptor)


def _forget_process_group() -> None:
    """Let ``torch.distributed`` say that it is not initialised: this copy of a group must never be used."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.distributed_c10d._update_default_pg(None)


def _required_gradients(prepared: CompiledTraining) -> dict[str, bool]:
    """Return, for each parameter, whether it requires a gradient now, before any step."""
    return {name: p.requires_grad for name, p in named_parameters(prepared.model, prepared.losses)}


def _last_line(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def run_new_process() -> None:
    """Be the auditor in a new process: the function that builds its training is the first message."""
    parent, orders, *boards = map(int, sys.argv[1:])
    connection = Connection(orders)
    content = connection.recv_bytes()  # of the process that started this one, through a pipe of its own
    # The workers compute on accelerators, so that most of the host's cores are idle.
    threads = max(1, affine_cores() // 2)
    run_auditor(lambda: pickle.loads(content)(), (boards[0], boards[1]), connection, parent, threads)
