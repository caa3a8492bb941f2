"""Launch: who compiles and runs a training, by how this process was started; and what rank 0 reports of it.

Without a launcher this process starts workers on this host (:class:`HostTraining`); under torchrun it is one of the
workers (:class:`JoinedTraining`). Only the first can start workers again from the newest checkpoint:

    --max-restarts 3                  a worker dies, or hangs (--on-hang restart)     all are started again
    --workers 2:4 (--max-restarts 2)  a worker is lost                                one fewer is started
                                      a worker raises, or hangs                       all are started again
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from polylane.commands.running.finish import describe_kept, end_without_steps
from polylane.commands.running.reporter import Reporter, watching
from polylane.commands.running.resume import NothingLeft
from polylane.commands.running.run_folder import RunFolder
from polylane.errors import INTERRUPTIONS, PolylaneError, WorkerFailed, WorkerHung, format_plural
from polylane.output import say_at_once
from polylane.plan.spec import format_degrees
from polylane.runtime.workers.launch_environment import Launch
from polylane.runtime.workers.stop_request import LauncherSignals, Stopped, StopRequest
from polylane.runtime.workers.torchrun_worker import TorchrunWorker

if TYPE_CHECKING:
    from polylane.commands.logs.step_log import TrainingOutcome
    from polylane.commands.requests import FolderRequest, TrainRequest
    from polylane.commands.running.recipe_training import RecipeTraining
    from polylane.compile.compiled_training import CompiledTraining
    from polylane.diagnosis.report import HangReport
    from polylane.plan.plan import AnyPlan
    from polylane.runtime.progress.host_watch import HostWatch
    from polylane.runtime.workers.world import World

R = TypeVar("R", bound="FolderRequest")
T = TypeVar("T")

# Exceptions of an accelerator that has failed: the process lives, but the machine has lost a worker.
DEVICE_ERRORS = ("AcceleratorError",)


class HostLaunch:
    """A process that starts workers on this host: its signals, and its end.

    Args:
        request: the options of the command line.
        folder: folder of the run.
        stop: the request that the workers poll.
    """

    def __init__(self, request: FolderRequest, folder: RunFolder, stop: StopRequest) -> None:
        self._options, self._folder, self._stop = request, folder, stop

    def handle_signals(self) -> AbstractContextManager[None]:
        """Return a context manager in which signals are this training's."""
        return LauncherSignals(self._stop, self._options.trouble.grace, say_at_once).handled()

    def leave(self, code: int) -> NoReturn:
        """Leave with an exit code."""
        sys.exit(code)

    @contextmanager
    def explain_end(self) -> Iterator[None]:
        """Context manager: a signal that ends the run is raised with what there is of it.

        Raises:
            Stopped: a signal ended the run at once.
        """
        try:
            yield
        except NothingLeft as nothing_left:  # a good end, without a step
            end_without_steps(self._folder, nothing_left)
        except Stopped as stopped:
            reason = stopped.reason or describe_kept(self._options, self._folder)
            raise Stopped(stopped.number, reason) from None
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT, describe_kept(self._options, self._folder)) from None


class HostTraining(HostLaunch):
    """Starts a training's workers on this host: forked on the CPU, in new processes where there are accelerators.

    Args:
        request: the options of the command line.
        folder: folder of the run.
        stop: the request that the workers poll.
    """

    def __init__(self, request: TrainRequest, folder: RunFolder, stop: StopRequest) -> None:
        super().__init__(request, folder, stop)
        self._request = request
        self._training: RecipeTraining | None = None
        self._compiled: CompiledTraining | None = None
        self._fewer: dict[int, AnyPlan] = {}

    def compile(self, request: TrainRequest, reporter: Reporter) -> None:
        """Compile the training, if its workers will be forked, and plan it for fewer workers, if some may be lost.

        New processes compile for themselves; without a model in this one, plans for fewer workers are not searched.

        Args:
            request: the options of the command line, with the plan that was chosen.
            reporter: receives the messages of rank 0, and reports of what went wrong.

        Raises:
            PolylaneError: the recipe is wrong, or the plan does not fit the model.
        """
        from polylane.runtime.workers.team import choose_start_method

        assert request.plan is not None and not isinstance(request.plan, str)
        self._request, self._options, self._reporter = request, request, reporter
        self._plan: AnyPlan = request.plan
        # Asked here and not before: the question imports torch, and may start the accelerator's driver.
        self._start_method = choose_start_method()
        if self._start_method == "fork":
            from polylane.commands.running.recipe_training import load_materials
            from polylane.inspection.predicted_run import predict_run
            from polylane.runtime.workers.threads import limit_to_one_thread

            limit_to_one_thread()
            # Before the fork, so that workers share the memory of the data, and a wrong recipe is reported once.
            self._training = load_materials(self._request)
            self._take(self._plan)
            assert self._compiled is not None
            reporter.predicted = predict_run(self._training.problem, self._compiled, sys.argv)
        fewest, max_workers = self._request.fewest_workers, self._plan.processes
        if fewest is not None and fewest < max_workers:
            from polylane.commands.running.fewer_workers import describe_fewer, plan_fewer

            problem = None if self._training is None else self._training.problem
            self._fewer = plan_fewer(problem, self._plan, fewest, self._request.batch)
            if problem is not None:
                say_at_once(describe_fewer(self._fewer, fewest, max_workers))

    def start(self) -> TrainingOutcome:
        """Start the workers, as often as is allowed, and return their outcome."""
        from polylane.inspection.memory_prediction import with_predicted_memory
        from polylane.runtime.workers.out_of_memory import OutOfMemory

        try:
            return train_with_restarts(
                self._request, self.run, self.take_fewer, self._stop, self._reporter.pause, say_at_once
            )
        except OutOfMemory as error:
            if self._training is None or self._compiled is None:  # a worker that compiled has predicted it
                raise
            raise with_predicted_memory(error, self._compiled, self._training.problem.samples) from None

    def run(self, request: TrainRequest) -> TrainingOutcome:
        """Start all workers by the current plan, watch them, and return their outcome."""
        from polylane.commands.running.worker import run_started_worker
        from polylane.runtime.progress_page import ProgressMemory
        from polylane.runtime.workers.team import start_workers

        # New pages for every start: those of workers that have died say where these were.
        allocate = ProgressMemory.allocate_for_fork if self._start_method == "fork" else ProgressMemory.allocate
        pages = {rank: allocate() for rank in range(self._plan.processes)}
        # A forked worker finds these in its memory; a new process is sent the request alone, and loads the recipe.
        compiled = None
        if self._training is not None and self._compiled is not None:
            compiled = replace(self._training, request=request), self._compiled
        worker = partial(run_started_worker, replace(request, plan=self._plan), compiled, pages)
        with watching(pages, request, self._reporter) as watch:
            return start_workers(
                worker, len(pages), self._reporter, self._stop, watch, start_method=self._start_method
            )[0]

    def take_fewer(self) -> str:
        """Take the next plan that has fewer workers, passing over those that the model refuses; return its sentence."""
        while self._fewer:
            with suppress(PolylaneError):  # the model refuses this plan: the next one has still fewer workers
                self._take(self._fewer.pop(max(self._fewer)))
                degrees = ",".join(format_degrees(self._plan.group_meshes))
                return f"with {format_plural(self._plan.processes, 'worker')}, {degrees}"
        return ""

    def _take(self, plan: AnyPlan) -> None:
        if self._training is not None:
            from polylane.commands.running.recipe_training import prepare_once

            self._compiled = prepare_once(self._training, plan)
            plan = self._compiled.plan
        self._plan = plan


class JoinedTraining:
    """One of a launcher's workers: it joins the others, compiles and trains with them; rank 0 writes and prints.

    Args:
        request: the options of the command line.
        folder: folder of the run, which rank 0 writes into.
        stop: this worker's stop request.
        launch: which worker this process is.
    """

    def __init__(self, request: FolderRequest, folder: RunFolder, stop: StopRequest, launch: Launch) -> None:
        self._folder, self._stop, self._launch = folder, stop, launch
        self._watch: HostWatch | None = None
        self._words = memoryview(b"").cast("Q")

        def explain_end(number: int) -> str:  # the files may be on another host than a later rank
            return describe_kept(request, folder) if launch.is_first else ""

        self._signals = TorchrunWorker(launch, stop, request.trouble.grace, explain_end)

    def handle_signals(self) -> AbstractContextManager[None]:
        """Return a context manager in which signals are this training's."""
        return self._signals.handled()

    def meet(self, request: FolderRequest, reporter: Reporter, is_script: bool = False) -> World:
        """Meet the other workers, and be watched; a collective.

        Args:
            request: the options of the command line.
            reporter: receives the messages of rank 0, and reports of what went wrong.
            is_script: whether a script of the user's makes the calls.
        """
        import torch

        from polylane.commands.running.worker import ignore
        from polylane.runtime.progress.host_watch import HostWatch
        from polylane.runtime.workers.threads import threads_per_worker
        from polylane.runtime.workers.world import World

        torch.set_num_threads(threads_per_worker(self._launch.local_size))

        def keep(report: HangReport) -> None:
            # Rank 0's host keeps it, unless that one is lost, or not to be reached.
            if self._launch.is_first or not report.culprits or 0 in report.culprits:
                reporter.keep_report(report)

        trouble, local_rank = request.trouble, self._launch.local_rank
        # Before the process group, whose threads a fork would leave behind with their locks.
        self._watch = watch = HostWatch.start(local_rank, trouble.on_hang, trouble.hang_after, keep)
        world = watch.attach(replace(World.join(), stop=self._stop), is_script)
        self._words = world.progress.words
        if world.store is not None:  # from now on a worker that dies is named
            self._signals.meet_peers(world.store, world.size)
        self._tell = partial(reporter, 0) if self._launch.is_first else ignore
        return world

    def compile(self, request: TrainRequest, reporter: Reporter) -> None:
        """Meet the other workers, load the recipe's model and data, and compile the training; a collective.

        Args:
            request: the options of the command line, with what was chosen since.
            reporter: receives the messages of rank 0, and reports of what went wrong.
        """
        world = self.meet(request, reporter)
        from polylane.commands.running.worker import compile_together

        self._worker = compile_together(request, world)
        if self._launch.is_first:
            reporter.predicted = self._worker.predict_run()

    def start(self) -> TrainingOutcome:
        """Train, and return the outcome; a collective."""
        outcome = self._worker.train(self._tell)
        self.end_watch()
        return outcome

    def leave(self, code: int) -> NoReturn:
        """Leave with an exit code, together with the other workers."""
        self._signals.wait_for_first()
        sys.exit(code)

    def end_watch(self) -> None:
        """Tell the watch that this worker ends as it should, or by an error that all workers raise."""
        if self._watch is not None:
            self._watch.end()

    @contextmanager
    def explain_end(self) -> Iterator[None]:
        """Context manager: say why this worker ends, or which other one it has lost; raises what the others do not."""
        from polylane.runtime.workers.failure import Failure
        from polylane.runtime.workers.team import ECHO_GRACE_SECONDS

        try:
            yield
            self._signals.mark_reported()
        except NothingLeft as nothing_left:
            self._signals.mark_reported()
            if self._launch.is_first:
                end_without_steps(self._folder, nothing_left)
        except PolylaneError:
            self._signals.mark_reported()
            self.end_watch()  # all workers know why: that one of them ends first is no news
            raise
        except INTERRUPTIONS:  # said by who receives the signal
            raise
        except BaseException as error:
            failure = Failure.of_exception(self._launch.rank, error)
            # torchrun ends all workers as soon as one ends: an echo waits, so that who has the cause can print it.
            if failure.is_echo:
                message = " ".join(failure.error_message.split())[:200]
                self._signals.name_lost_peer(ECHO_GRACE_SECONDS, message, self._ask_watch)
                time.sleep(ECHO_GRACE_SECONDS)
                sys.exit(1)
            self._signals.mark_reported()
            exception = failure.to_exception()
            if self._launch.is_first:  # whose process alone writes files, and knows more than the watch over it
                self._folder.note_failure(exception)
                self.end_watch()
            if isinstance(exception, PolylaneError):
                raise exception from None
            say_at_once(str(exception))
            sys.exit(1)

    def _ask_watch(self) -> str | None:
        """Return which workers of other hosts have ended, "" where that is not known; None where the watch has told."""
        from polylane.runtime.progress.script_calls import ask_watch

        verdict = ask_watch(self._words)
        return None if "hung" in verdict else str(verdict.get("ended", ""))


def train_with_restarts(
    request: R,
    run: Callable[[R], T],
    take_fewer: Callable[[], str],
    stop: StopRequest,
    pause: Callable[[], None],
    warn: Callable[[str], None],
) -> T:
    """Train, and start the workers again from the newest checkpoint when one has died, as often as was asked for.

    Args:
        request: the options of the command line, with the checkpoint to go on from.
        run: starts all workers by the current plan, and returns their outcome.
        take_fewer: takes the next plan that has fewer workers, and returns a sentence on it; empty where there is none.
        stop: a run that was asked to end is not started again.
        pause: called before workers are started again.
        warn: called with a sentence about each restart.

    Raises:
        WorkerFailed: a worker died once more than workers are started again.
    """
    from polylane.checkpoint.store import CheckpointStore
    from polylane.commands.running.resume import find_whole

    for restart in itertools.count(1):
        try:
            return run(request)
        except WorkerFailed as error:
            may = not isinstance(error, WorkerHung) or request.trouble.on_hang == "restart"
            if restart > request.saving.restarts or stop.is_set() or not may:
                raise
            assert request.checkpoints is not None
            pause()
            store = CheckpointStore(request.checkpoints)
            store.remove_leftovers()  # of the one that was being written
            newest = find_whole(store, warn)
            request = replace(request, resume_from=newest or request.resume_from)
            origin = "from the beginning" if request.resume_from is None else f"from {request.resume_from}"
            fewer = take_fewer() if is_lost(error) else ""
            words = f"restart {restart} of {request.saving.restarts}, {origin}{fewer and f', {fewer}'}"
            warn(f"{str(error).splitlines()[0]}; {words}")
    raise AssertionError("the restarts do not end")


def is_lost(error: WorkerFailed) -> bool:
    """Return whether a worker is lost, as with its machine: it was killed, or its accelerator failed.

    One that raised, or that hung and was ended for it, can be started again.
    """
    return not isinstance(error, WorkerHung) and (not error.traceback or error.error_type in DEVICE_ERRORS)
