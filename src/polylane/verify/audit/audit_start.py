"""Start of audits: the process that replays steps, had before the job takes the model apart, or why there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from polylane.compile.compiled_training import CompiledTraining
from polylane.plan.plan import AnyPlan, Plan
from polylane.probe.machine import available_memory
from polylane.runtime.nameless_file import open_nameless_file
from polylane.runtime.workers.world import World
from polylane.verify.audit import AuditMode
from polylane.verify.audit.auditor import Auditor, fork_auditor, spawn_auditor
from polylane.verify.audit.auditor_process import AuditedTraining, ReadBatch
from polylane.verify.audit.device_rounding import DeviceRounding
from polylane.verify.audit.step_replay import read_rounding

MEMORY_COPIES = 10  # of the weights: the auditor's, its optimizer's, and two states on the boards
MEMORY_SHARE = 0.5  # part of the host's free memory that these may take


@dataclass
class AuditStart:
    """What one worker has of audits before its job is made.

    Attributes:
        mode: whether, and how often, steps are audited, and what follows from a difference.
        note: why none are; "" where some are.
        example: a batch, for its form.
        auditor: the process that replays steps; None on other ranks than 0.
        boards: descriptors of the memory for states before and after a step; on rank 0.
        reads_data: whether the auditor reads batches from the user's data set.
        prepared: the training, compiled for its plan; where there is an auditor.
        is_built_again: whether the auditor has built the training itself, so that it has other objects than this
            process had at the start.
    """

    mode: AuditMode
    note: str
    example: Any
    auditor: Auditor | None = None
    boards: tuple[int, int] | None = None
    reads_data: bool = False
    prepared: CompiledTraining | None = None
    is_built_again: bool = False


# Returns what an auditor has of a training that it loads itself, by its plan and rounding; must be picklable.
Rebuild = Callable[[Plan, DeviceRounding], AuditedTraining]


def start_auditor(
    mode: AuditMode,
    prepared: CompiledTraining,
    world: World,
    *,
    example: Any,
    clip_norm: float | None = None,
    seed: int = 0,
    read_batch: ReadBatch | None = None,
    begins_as_built: bool = False,
    rebuild: Rebuild | None = None,
) -> AuditStart:
    """Start the auditor on rank 0, before the job takes the model apart; every worker calls it.

    Args:
        mode: whether, and how often, steps are audited, and what follows from a difference.
        prepared: the training, compiled for its plan.
        world: this worker's rank and device among all workers.
        example: a batch, for its form.
        clip_norm: bound on the 2-norm of all gradients, or None.
        seed: of all random numbers.
        read_batch: reads batches from the user's data set; None: the step's own batches are taken.
        begins_as_built: whether step 1 begins with the weights that the model has now; a script may load others.
        rebuild: loads the training in another process; None: only this process has it.
    """
    note = "" if mode != "off" else "off"
    note = note or _why_not(prepared.plan)
    if note or world.rank:
        return AuditStart(mode, note, example)
    # Autograd has a thread for each accelerator, without which no fork of this process can go backward.
    is_built_again = torch.accelerator.is_available()
    if note := _why_not_here(prepared, is_built_again and rebuild is None):
        return AuditStart(mode, note, example)
    rounding = read_rounding(prepared, world.device)
    training = AuditedTraining(prepared, example, clip_norm, seed, rounding, read_batch, begins_as_built)
    try:
        boards = open_nameless_file("audit"), open_nameless_file("audit")
        try:
            if is_built_again:
                assert rebuild is not None
                auditor = spawn_auditor(partial(rebuild, prepared.plan, rounding), boards)
            else:
                auditor = fork_auditor(training, boards)
            return AuditStart(mode, "", example, auditor, boards, read_batch is not None, prepared, is_built_again)
        except OSError:
            for board in boards:
                os.close(board)
            raise
    except OSError as refused:
        return AuditStart(mode, f"no process can be had for it ({refused.strerror or refused})", example)


def _why_not(plan: Plan) -> str:
    """Return why the steps of a plan have no single loop to be held against; "" where they have one."""
    if plan.is_asynchronous:
        return f"schedule={plan.schedule} trains with weights of several steps: polylane verify replays its rule"
    if plan.sync.has_servers and plan.sync.is_replica_local:
        return "servers take updates in an order of their own: polylane verify replays it"
    return describe_rounded_gradients(plan)


def describe_rounded_gradients(plan: AnyPlan) -> str:
    """Return why gradients that are rounded between workers cannot be audited; "" where a plan rounds none."""
    if plan.sync.wire == "same" and plan.sync.compress is None:
        return ""
    words = ",".join(plan.sync.to_words())
    return f"{words}: gradients lose digits on their way, which is no difference to be found"


def _why_not_here(prepared: CompiledTraining, is_unforkable: bool) -> str:
    """Return why a process beside this one cannot have the model a second time; "" where it can.

    Args:
        prepared: the training, compiled for its plan.
        is_unforkable: whether it would have to be forked beside an accelerator.
    """
    if is_unforkable:
        return (
            "autograd cannot run in a forked process on a machine with a GPU: polylane train is audited by a "
            "process that loads the recipe, and polylane verify checks the plan"
        )
    devices = {tensor.device.type for tensor in (*prepared.model.parameters(), *prepared.model.buffers())}
    if unusable := devices - {"cpu", "meta"}:
        return f"the model was built on {unusable.pop()}, which another process cannot use: build it on the CPU"
    needed = MEMORY_COPIES * sum(tensor.nbytes for tensor in (*prepared.model.parameters(), *prepared.model.buffers()))
    free = available_memory()
    if needed <= MEMORY_SHARE * free:
        return ""
    return f"a second model takes {needed >> 20:,} MiB on the host of rank 0, of which {free >> 20:,} MiB are free"
