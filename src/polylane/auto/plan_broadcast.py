"""Broadcast from rank 0 under torchrun: its result, or the reason why it has none, on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from polylane.auto.same_capture import RecordedProblem, find_difference
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PeerLost, PolylaneError, format_plural
from polylane.plan.plan import AnyPlan, Plan
from polylane.runtime.plain_data import plain_objects as objects
from polylane.runtime.plain_data.serialization import register_type
from polylane.runtime.workers.failure import Failure
from polylane.runtime.workers.launch_environment import find_launcher
from polylane.runtime.workers.threads import threads_of_idle_cores
from polylane.runtime.workers.world import World

T = TypeVar("T")

# Rank 0 may measure for a long time while the others wait. A rank that dies is noticed at once, by its closed socket.
PATIENCE = timedelta(days=1)

# Plans are broadcast as JSON, never pickled; `_file` is the file that messages about the plan name.
register_type(
    Plan,
    lambda plan: [plan.model_dump_json(), plan._file],
    lambda content: Plan.model_validate_json(content[0], context={"file": content[1]}),
)


def compute_on_rank0(world: World, find: Callable[[], T]) -> T:
    """Compute a result on rank 0 and return it on every rank; the others sleep meanwhile.

    Args:
        world: the process group of all workers, more than one.
        find: called on rank 0 alone; its result must be plain data, see
            :mod:`polylane.runtime.plain_data.serialization`.

    Raises:
        PolylaneError: on every rank, where rank 0 raised it.
        PeerLost: on the others, where rank 0 raised anything else.
    """
    # A separate group: gloo sleeps while it waits, where NCCL keeps the device busy, and the time limit is PATIENCE.
    world.connect()
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert group is not None
    world.authenticate_group(group)
    outcome: Any = None  # (value, message of a user's mistake, message of another failure): one of them is not None
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = (find(), None, None)
        except Exception as error:
            outcome, cause = (None, *_told(error)), error
    value, refusal, reason = objects.broadcast(outcome, 0, group)
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    if cause is not None:
        raise cause
    if refusal is not None:
        raise PolylaneError(refusal)
    if reason is not None:
        raise PeerLost(0, "waiting for its plan", reason)
    result: T = value
    return result


def _told(error: Exception) -> tuple[str | None, str | None]:
    """Return what is broadcast of an exception: (a user's mistake, None), or (None, another failure), as messages."""
    failure = Failure.of_exception(0, error)
    if failure.bad_input is not None:
        return failure.error_message, None
    return None, f"{failure.error_type}: {failure.error_message}"


def compile_on_all_ranks(world: World, problem: TrainingProblem, spec: AnyPlan) -> CompiledTraining:
    """Compile the problem on every worker, with the plan that rank 0 completes and so the same cuts everywhere.

    Args:
        world: the process group of all workers.
        problem: the same model, losses and form of batches on each of them.
        spec: the requested plan, in one line or complete.

    Raises:
        PolylaneError: on every worker, where rank 0 could not compile, or another worker's model is not the same.
    """
    if spec.processes != world.size:
        launcher = find_launcher() or "the launcher"
        raise PolylaneError(
            f"the plan takes {format_plural(spec.processes, 'worker')}, {launcher} started {world.size}"
        )
    problem = RecordedProblem.of(problem)
    # Cuts rest on measured times, which differ from worker to worker: rank 0 compiles first, and the others compile for
    # the complete plan that it found.
    if world.rank == 0:
        with threads_of_idle_cores(world):
            prepared, refusal = _try_compile(problem, spec)
        world.all_gather_object(
            (None if prepared is None else prepared.plan, None if refusal is None else str(refusal))
        )
        if refusal is not None:
            raise refusal
    else:
        decision, refused = world.all_gather_object(None)[0]
        if refused is not None:
            raise PolylaneError(refused)
        with threads_of_idle_cores(world, int(os.environ.get("LOCAL_WORLD_SIZE", world.size))):
            prepared, refusal = _try_compile(problem, decision)
    # Every worker learns of every failure, so that none waits for one that has stopped.
    refusals: list[str | None] = world.all_gather_object(None if refusal is None else str(refusal))
    if (difference := find_difference(world, problem.described)) is not None:
        raise PolylaneError(difference)  # it says more than that rank 0's plan does not fit another model
    for rank, reason in enumerate(refusals):
        if reason is not None:
            raise PolylaneError(reason if rank == 0 else f"on rank {rank}: {reason}")
    assert prepared is not None
    return prepared


def _try_compile(problem: TrainingProblem, plan: AnyPlan) -> tuple[CompiledTraining | None, PolylaneError | None]:
    try:
        return compile_training(problem, plan), None
    except PolylaneError as error:
        return None, error
