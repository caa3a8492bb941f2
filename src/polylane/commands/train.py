"""``polylane train``: a training from its command line to its results, in five stages.

    1 parse      the options are checked, before anything takes long
    2 plan       the plan is read, or searched
    3 claim      the run's folder is this run's; the checkpoint to resume from is found in it
    4 compile    model and plan -> what every worker runs
    5 start      the workers train; their messages are shown, and written into the folder

How this process was started decides who does the last two: a process that no launcher has started starts workers on
this host (:class:`.HostTraining`), one that torchrun has started is a worker itself (:class:`.JoinedTraining`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from polylane.checkpoint.commit import list_steps
from polylane.commands import user_inputs as inputs
from polylane.commands.progress import display
from polylane.commands.running.finish import finish_run, raise_if_stopped
from polylane.commands.running.launch import HostTraining, JoinedTraining
from polylane.commands.running.reporter import open_reporter
from polylane.commands.running.resume import BEST, prepare_checkpoints
from polylane.commands.running.run_folder import RunFolder
from polylane.commands.running.run_options import complete_options, open_folder
from polylane.errors import PolylaneError
from polylane.output import put_work_first, say_at_once
from polylane.plan.fixed_keys import parse_auto
from polylane.plan.spec import default_microbatches
from polylane.runtime.workers.launch_environment import Launch, become_agent, is_first_of_host
from polylane.runtime.workers.stop_request import Stopped, StopRequest

if TYPE_CHECKING:
    from polylane.commands.requests import TrainRequest
    from polylane.plan.plan import AnyPlan


def run(request: TrainRequest) -> None:
    """Train, and print the outcome.

    Raises:
        PolylaneError: an option, the recipe or the plan is wrong, or the loss is not finite and ``on_nan`` is stop.
        OutOfMemory: a worker asked for memory in vain.
        WorkerFailed: an exception ended one of the workers.
    """
    become_agent(request.saving.restarts, request.trouble.grace)
    launch = Launch.of_process()
    put_work_first(is_first_of_host())  # as the launcher's variables say, which the line before has read

    # 1. Parse.
    request = complete_training(request, launch)
    folder = open_folder(request, request.recipe)
    stop = StopRequest(waits_for_save=request.saves_checkpoints)
    training: JoinedTraining | HostTraining = (
        JoinedTraining(request, folder, stop, launch) if launch.is_worker else HostTraining(request, folder, stop)
    )
    ended_early = False
    # Before anything takes long: a plan that is searched, or a recipe that imports torch.
    with training.handle_signals():
        # 2. Plan. The recipe is loaded here only to report its mistakes at once; workers load it again.
        request = replace(request, plan=accumulate_passes(_choose_plan(request, launch), request))
        inputs.open_recipe(request)

        # 3. Claim.
        with _claim_folder(request, folder, launch) as request, training.explain_end():
            lines = display(request.json, request.watch.log_every)
            with open_reporter(folder, lines, request, launch.is_first) as reporter:
                # 4. Compile.
                training.compile(request, reporter)

                # 5. Start.
                outcome = training.start()
                if outcome.ended_early:
                    reporter.note_signal(stop.number)
            if launch.is_first:
                finish_run(request, folder, outcome, reporter.judge(outcome))
            else:
                raise_if_stopped(folder, outcome)
            ended_early = outcome.ended_early
    # After Ctrl-C the exit code is SIGINT's even if a checkpoint was saved; other signals exit with 0.
    if stop.number == signal.SIGINT:
        raise Stopped(signal.SIGINT, "a checkpoint was saved")
    if ended_early and request.trouble.requeue_code:
        training.leave(request.trouble.requeue_code)


def complete_training(request: TrainRequest, launch: Launch) -> TrainRequest:
    """Check the options; return them, with ``save_every="auto"`` where restarts are asked for.

    Raises:
        PolylaneError: an option is wrong, or does not go with another one or with the launcher.
    """
    if request.epochs is not None and request.steps is not None:
        raise PolylaneError("--epochs and --steps exclude each other: give one of them")
    inputs.check_positive("--clip-norm", request.clip_norm)
    if request.data.fast_dev_run:
        saving = replace(request.saving, save_every=None, max_restarts=0)
        request = replace(request, epochs=None, steps=1, saving=saving)
    request.goals.build()
    request.goals.build_best()
    return complete_options(request, launch)


def _choose_plan(request: TrainRequest, launch: Launch) -> AnyPlan | str:
    """Return the plan; for a launcher's workers plan=auto is deferred until they have met."""
    if parse_auto(request.plan) is None or not launch.is_worker:
        return inputs.choose_plan(request)
    if request.workers not in (None, launch.size) and request.fewest_workers is None:
        raise PolylaneError(
            f"--workers {request.workers}, but {launch.launcher} started {launch.size}: they must be equal"
        )
    return str(request.plan)


def accumulate_passes(plan: AnyPlan | str, request: TrainRequest) -> AnyPlan | str:
    """Return the plan with so many times as many microbatches as batches are to be accumulated.

    A plan that is searched, or yet to be, is one for the samples of a step: it has the microbatches that are fastest.
    """
    parts = request.data.accumulate
    if isinstance(plan, str) or parts == 1 or parse_auto(request.plan) is not None:
        return plan
    return replace(plan, microbatches=parts * default_microbatches(plan, request.batch // parts))


@contextmanager
def _claim_folder(request: TrainRequest, folder: RunFolder, launch: Launch) -> Iterator[TrainRequest]:
    """Context manager: claim the run's folder; yields the request, with the checkpoint to resume from."""
    # Of several workers rank 0 alone writes, and looks: the folder need not be there on other hosts.
    with folder.claimed(launch.is_first):
        request = replace(request, model_path=folder.model)
        if launch.is_first:
            request = prepare_checkpoints(request, folder.path, say_at_once, folder.continues)
            _refuse_earlier_best(request, folder)
        yield request


def _refuse_earlier_best(request: TrainRequest, folder: RunFolder) -> None:
    """Refuse to keep the best checkpoints of a new run among those of an earlier one.

    Raises:
        PolylaneError: the run's folder has some.
    """
    begins = request.goals.keep_best is not None and request.resume_from is None
    if begins and (steps := list_steps(str(folder.path / BEST))):
        raise PolylaneError(
            f"--run {folder.path}: {BEST}/ has checkpoints of an earlier run, up to step {steps[-1][0]}: move them "
            "away, or choose another folder"
        )
