"""Launch: starts the workers of a training, again where one has died, and hands on what rank 0 tells."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from polylane.commands.progress import display
from polylane.commands.running.restarts import train_with_restarts
from polylane.commands.running.run_folder import RunFolder
from polylane.errors import PolylaneError, WorkerFailed, WorkerHung, format_plural
from polylane.output import say_at_once
from polylane.plan.spec import format_degrees
from polylane.runtime.workers.stop_request import StopRequest

if TYPE_CHECKING:
    from polylane.commands.requests import TrainRequest
    from polylane.commands.running.step_log import TrainingOutcome
    from polylane.diagnosis.report import HangReport
    from polylane.plan.plan import Plan
    from polylane.plan.spec import Spec
    from polylane.runtime.progress_page import ProgressMemory


class Reporter:
    """Receiver of rank 0's messages, which writes them into the run's folder and onto the screen."""

    def __init__(self, folder: RunFolder, to_stderr: bool) -> None:
        self._place = folder
        self._display = display(to_stderr)

    def __call__(self, rank: int, message: dict[str, Any]) -> None:
        content = {key: value for key, value in message.items() if key != "kind"}
        if message["kind"] == "begin":
            self._place.begin(message["resumed_at"], message["resumed_loss"], message["resumed_own"])
            self._place.plan(message["plan"])
            self._display.begin(message)
        elif message["kind"] == "testing":
            self._display.testing(message)
        elif message["kind"] == "warning":
            say_at_once(message["text"])
        elif message["kind"] == "audit":
            self._place.metric({"audit": content})
        elif message["kind"] == "step":
            self._place.metric(content)
            self._display.step(message)
        else:
            self._place.metric(content)
            self._display.epoch(message)

    def pause(self) -> None:
        """Take the progress off the screen: workers are forked again, and a bar has a thread."""
        self._display.close()

    def keep_report(self, report: HangReport) -> None:
        """Keep a report of a hang or a failure in the run's folder."""
        with suppress(PolylaneError):  # what is reported matters more
            self._place.why(report)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._display.close()
        if error is None:
            self._place.close()
        else:
            with suppress(PolylaneError):  # the exception that ended the run matters more
                self._place.close()


def start_workers(request: TrainRequest, reporter: Reporter, stop: StopRequest) -> TrainingOutcome:
    """Start workers on this host: forked on the CPU, in new processes where there are accelerators."""
    from polylane.runtime.workers.out_of_memory import OutOfMemory
    from polylane.runtime.workers.world import accelerator_type

    if accelerator_type() is not None:
        spawned = _SpawnedWorkers(request, reporter, stop)
        return train_with_restarts(request, spawned, stop, reporter.pause, say_at_once)
    from polylane.inspection.memory_prediction import with_predicted_memory

    forked = _ForkedWorkers(request, reporter, stop)
    try:
        return train_with_restarts(request, forked, stop, reporter.pause, say_at_once)
    except OutOfMemory as error:
        raise with_predicted_memory(error, forked.prepared, forked.training.problem.samples) from None


@contextmanager
def _watching(
    pages: Mapping[int, ProgressMemory], request: TrainRequest, reporter: Reporter
) -> Iterator[Callable[[], None]]:
    """Context manager: the watch over workers with these pages, to be called while they run; none without pages.

    A failure that it has not found itself is reported to the run's folder, from what the workers have left.
    """
    from polylane.runtime.progress.watch import HangWatch

    if not pages:
        yield lambda: None
        return
    watch = HangWatch(pages, request.trouble.on_hang, request.trouble.hang_after, reporter.keep_report)
    try:
        yield watch.check
    except WorkerFailed as error:
        if not isinstance(error, WorkerHung):
            reporter.keep_report(watch.report_failure(error.rank, str(error).partition("\n")[0]))
        raise
    finally:
        watch.close()


class _ForkedWorkers:
    """Starts workers by forking this process, in which the training is compiled."""

    def __init__(self, request: TrainRequest, reporter: Reporter, stop: StopRequest) -> None:
        from polylane.commands.running.fewer_workers import describe_fewer, plan_fewer
        from polylane.commands.running.recipe_training import load_materials, prepare_once
        from polylane.runtime.workers.fork import limit_to_one_thread

        self._reporter, self._stop = reporter, stop
        limit_to_one_thread()
        # Before the fork, so that workers share the memory of the data, and a wrong recipe is reported once.
        self.training = load_materials(request)
        assert request.plan is not None and not isinstance(request.plan, str)
        self.prepared = prepare_once(self.training, request.plan)
        self._fewer: dict[int, Spec | Plan] = {}
        max_workers = self.prepared.plan.processes
        if request.fewest_workers is not None and request.fewest_workers < max_workers:
            self._fewer = plan_fewer(self.training.problem, self.prepared.plan, request.fewest_workers)
            say_at_once(describe_fewer(self._fewer, request.fewest_workers, max_workers))

    def run(self, request: TrainRequest) -> TrainingOutcome:
        """Fork the workers, watch them, and return their outcome."""
        from polylane.commands.running.worker import run_forked_worker
        from polylane.runtime.progress_page import ProgressMemory
        from polylane.runtime.workers.fork import fork_workers

        processes = self.prepared.plan.processes
        pages = {rank: ProgressMemory.allocate_for_fork() for rank in range(processes)}
        worker = partial(run_forked_worker, replace(self.training, request=request), self.prepared, pages)
        with _watching(pages, request, self._reporter) as watch:
            return fork_workers(worker, processes, self._reporter, self._stop, watch)[0]

    def take_fewer(self) -> str:
        """Compile the training for fewer workers; a plan that the model refuses is passed over."""
        from polylane.commands.running.recipe_training import prepare_once

        while self._fewer:
            plan = self._fewer.pop(max(self._fewer))
            with suppress(PolylaneError):
                self.prepared = prepare_once(self.training, plan)
                return _describe_fewer_workers(self.prepared.plan)
        return ""


class _SpawnedWorkers:
    """Starts workers as new processes, each of which compiles the training."""

    def __init__(self, request: TrainRequest, reporter: Reporter, stop: StopRequest) -> None:
        assert request.plan is not None and not isinstance(request.plan, str)
        self._first, self._plan = request.plan, request.plan
        self._request, self._reporter, self._stop = request, reporter, stop

    def run(self, request: TrainRequest) -> TrainingOutcome:
        """Start the workers, and return their outcome."""
        from polylane.commands.running.worker import run_spawned_worker
        from polylane.runtime.progress_page import ProgressMemory
        from polylane.runtime.workers.spawn import spawn_workers

        processes, is_seen = self._plan.processes, os.path.isdir("/proc/self/fd")
        pages = {rank: ProgressMemory.allocate() for rank in range(processes)} if is_seen else {}
        descriptors = {rank: (page.file, page.stacks) for rank, page in pages.items()}
        worker = partial(run_spawned_worker, replace(request, plan=self._plan), os.getpid(), descriptors)
        with _watching(pages, request, self._reporter) as watch:
            return spawn_workers(worker, processes, self._reporter, self._stop, watch)[0]

    def take_fewer(self) -> str:
        """Take fewer replicas: this process has no model to search other plans for."""
        from polylane.plan.fewer_workers import change_replicas
        from polylane.plan.spec import default_microbatches

        first_plan, fewest = self._first, self._request.fewest_workers or self._plan.processes
        microbatches = first_plan.microbatches or default_microbatches(cast("Spec", first_plan), self._request.batch)
        for workers in range(self._plan.processes - 1, fewest - 1, -1):
            if (plan := change_replicas(first_plan, workers, microbatches)) is not None:
                self._plan = plan
                return _describe_fewer_workers(plan)
        return ""


def _describe_fewer_workers(plan: Spec | Plan) -> str:
    return f"with {format_plural(plan.processes, 'worker')}, {','.join(format_degrees(plan.group_meshes))}"
