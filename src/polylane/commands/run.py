"""``polylane run``: a script in every worker, whose ``polylane.prepare`` takes the plan of the command line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylane.commands import user_inputs as inputs
from polylane.commands.progress import NoLines
from polylane.commands.running.finish import write_timelines
from polylane.commands.running.reporter import open_reporter
from polylane.commands.running.resume import prepare_checkpoints
from polylane.commands.running.run_options import complete_options, open_folder
from polylane.commands.running.script_launch import HostScript, JoinedScript
from polylane.errors import PolylaneError, format_plural
from polylane.output import put_work_first, say_at_once
from polylane.plan.fixed_keys import parse_auto
from polylane.runtime.workers.launch_environment import Launch, become_agent, is_first_of_host
from polylane.runtime.workers.stop_request import Stopped, StopRequest

if TYPE_CHECKING:
    from polylane.commands.logs.step_log import TrainingOutcome
    from polylane.commands.requests import RunRequest
    from polylane.commands.running.run_folder import RunFolder


def run(request: RunRequest) -> None:
    """Run the script on all workers, and leave with its exit code.

    Raises:
        PolylaneError: an option, the script's file or the plan is wrong, or the script prepares nothing.
        WorkerFailed: an exception of the script's ended one of the workers.
    """
    become_agent(request.saving.restarts, request.trouble.grace)
    launch = Launch.of_process()
    put_work_first(is_first_of_host())
    request = complete_options(request, launch)
    check_script(request.script)
    request, workers = _choose_workers(request, launch)
    folder, stop = open_folder(request, request.script), StopRequest(waits_for_save=request.saves_checkpoints)
    script: HostScript | JoinedScript = (
        JoinedScript(request, folder, stop, launch) if launch.is_worker else HostScript(request, folder, stop)
    )
    with script.handle_signals(), folder.claimed(launch.is_first):
        if launch.is_first:
            request = prepare_checkpoints(request, folder.path, say_at_once, folder.continues)
            if request.resume_from is not None:
                say_at_once(
                    f"resumes from {request.resume_from}; what the script counts itself begins anew, but for what "
                    "polylane.resumed keeps"
                )
        with script.explain_end(), open_reporter(folder, NoLines(), request, launch.is_first) as reporter:
            end = script.start(request, workers, reporter)
            # What ends the script where it has saved.
            is_ended = stop.is_set() and request.saves_checkpoints and end.code == 128 + stop.number
            if is_ended or stop.number == signal.SIGINT:
                reporter.note_signal(stop.number)
        if launch.is_first and end.outcome is not None:
            _finish_files(folder, end.outcome, reporter.judge(end.outcome), request.script)
    if stop.number == signal.SIGINT:
        raise Stopped(signal.SIGINT, "a checkpoint was saved")
    if not end.code and not end.is_prepared and request.plan is not None:
        copies = f"each of the {workers} workers ran all of it" if workers > 1 else "it ran as it is"
        raise PolylaneError(
            f"{request.script} ended without a call of polylane.prepare, and {copies}: write model, optimizer = "
            "polylane.prepare(model, optimizer) before its loop, or run it with python"
        )
    if is_ended:
        if launch.is_first:
            steps = format_plural(0 if end.outcome is None else end.outcome.steps, "step")
            name = signal.Signals(stop.number).name
            say_at_once(f"{name}: ended after {steps}, with a checkpoint: resume with --resume auto")
        script.leave(request.trouble.requeue_code)
    if end.code:
        sys.exit(end.code)


def _finish_files(folder: RunFolder, outcome: TrainingOutcome, goodput: Mapping[str, Any], script: str) -> None:
    """Put the run's files in their place, and say on stderr what they are: stdout is the script's."""
    write_timelines(folder, outcome, script)
    folder.finish()
    files = ", ".join(Path(file).name for file in folder.files().values())
    attempt, steps = goodput["attempts"][-1], format_plural(outcome.steps, "step")
    if attempt["resumed_at"]:
        steps += f" ({attempt['steps']} since the checkpoint of step {attempt['resumed_at']})"
    parts = [steps, outcome.audit, goodput["verdict"], f"{folder.path}/: {files}"]
    for sentence in ("; ".join(str(part) for part in parts if part), *goodput["advice"]):
        say_at_once(sentence)


def check_script(path: str) -> None:
    """Refuse a file that Python cannot run, before any worker is started.

    Args:
        path: path of the file.

    Raises:
        PolylaneError: there is none, it cannot be read, or its syntax is wrong.
    """
    try:
        compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except OSError as error:
        raise PolylaneError(f"script {path}: {error.strerror or error}") from None
    except SyntaxError as error:
        raise PolylaneError(f"{path}, line {error.lineno}: {type(error).__name__}: {error.msg}") from None
    except ValueError as error:
        raise PolylaneError(f"script {path}: {error}") from None


def _choose_workers(request: RunRequest, launch: Launch) -> tuple[RunRequest, int]:
    """Return the request with its plan, and the number of workers; a single one without a plan runs the script as is.

    Raises:
        PolylaneError: the plan cannot be parsed, or takes another number of workers.
    """
    started = launch.size if launch.is_worker else None
    if started is not None and request.workers not in (None, started):
        raise PolylaneError(f"--workers {request.workers}, but {launch.launcher} started {started}: they must be equal")
    request = replace(request, workers=started or request.workers)
    if request.plan is not None and parse_auto(request.plan) is not None:
        if request.workers is None:
            raise PolylaneError(
                f"--plan {request.plan} needs --workers N: the script's model is known only once its workers run"
            )
        return request, request.workers
    if request.plan is None and request.workers in (None, 1):
        return request, 1
    plan = inputs.fit_plan(request)
    return replace(request, plan=plan), plan.processes
