"""Runs of a plan on one team of forked workers: each run has a job of its own, made from the same model.

Forking workers and touching their memory for the first time takes longer than most runs of small models do. What a run
left in its process is undone before the next: shards become whole tensors again, and weights, buffers, gradients,
random states and the state of the user's Python get their values from before the first run. All else is new with the
new job: optimizers, schedulers, connections, servers, and whatever was compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polylane.graph.python_state.gradient_hooks import has_gradient_hooks
from polylane.runtime.job import Job
from polylane.runtime.parameters.model_tensors import replace_data
from polylane.runtime.stale_weights import allow_own_calls
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.verify.record import ComparedTraining


def run_on_workers(training: ComparedTraining, *runs: Callable[[Job], Any]) -> list[list[Any]]:
    """Return the results of every run, each a list with one result per process of the plan, servers included.

    Every run gives the numbers that it gives on workers of its own.

    Args:
        training: the training that is compared; the caller's model is not changed.
        runs: called with a new job on every process, one after the other.
    """
    if len(runs) > 1 and not can_start_again(training):
        return [result for run in runs for result in run_on_workers(training, run)]

    @allow_own_calls()  # a proof looks at what each worker holds, and puts whole weights back between runs
    def run_each(context: WorkerContext) -> list[Any]:
        start_again = record_start(training) if len(runs) > 1 else None
        results = []
        for number, run in enumerate(runs):
            if number and start_again is not None:
                start_again()
            results.append(_run_job(training, run))
        return results

    return [list(results) for results in zip(*fork_workers(run_each, training.prepared.plan.processes), strict=True)]


def _run_job(training: ComparedTraining, run: Callable[[Job], Any]) -> Any:
    example, clip_norm, seed = training.batches[0], training.clip_norm, training.seed
    job = Job(training.prepared, World.join(), example=example, clip_norm=clip_norm, seed=seed)
    result = run(job)
    job.close()
    return result


def can_start_again(training: ComparedTraining) -> bool:
    """Return whether all that a run changes can be restored; a hook on a gradient may keep state that nobody finds."""
    return not any(map(has_gradient_hooks, training.tensors.parameters().values()))


def record_start(training: ComparedTraining) -> Callable[[], None]:
    """Return a function that undoes, in a worker, what a run changes: also the cut of parameters into shards.

    Args:
        training: the training, of which this process has run nothing yet.
    """
    # A job gives a parameter other memory, and never frees what it had: views of it are kept, and their values below.
    data = [(parameter, parameter.data) for parameter in training.tensors.parameters().values()]
    restore = training.snapshot(with_factories=True)

    def start_again() -> None:
        for parameter, full_tensor in data:
            replace_data(parameter, full_tensor)
        restore()

    return start_again
