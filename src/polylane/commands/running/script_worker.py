"""Script worker: the script of ``polylane run`` in one of its workers, run as ``python script.py`` runs it.

Of all workers rank 0 prints: what the others write to stdout is dropped, and their stderr goes to a file, whose end is
shown where one of them ends without a traceback.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polylane.commands.logs.script_log import ScriptLog
from polylane.commands.logs.step_log import Tell, TrainingOutcome
from polylane.commands.requests import RunRequest
from polylane.commands.running.worker import ignore
from polylane.runtime.progress_page import ProgressMemory, ProgressWriter
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.world import World
from polylane.script.session import RANK_VARIABLE, ScriptSession, running_session


@dataclass(frozen=True)
class ScriptEnd:
    """What a script has come to on one worker.

    Attributes:
        code: its exit code, 0 where it came to its end.
        is_prepared: whether it has called ``polylane.prepare``.
        outcome: what the training has come to, on rank 0; None where no step was made under a plan.
    """

    code: int
    is_prepared: bool
    outcome: TrainingOutcome | None = None


def run_started_script(
    request: RunRequest, pages: Mapping[int, ProgressMemory], errors: Path, context: WorkerContext
) -> ScriptEnd:
    """Run the script in a worker that the launcher of this host has started, and watches.

    Args:
        request: the script, and how it is run.
        pages: by rank, the page in which a worker writes where it is.
        errors: folder for what workers write to stderr, but for rank 0.
        context: rank and channels of this worker.
    """
    rank = context.rank
    silence(rank, errors / str(rank))
    world = replace(context.world, progress=ProgressWriter(pages[rank], rank, is_script=True))
    return run_in_session(request, world, context.send_message)


def silence(rank: int, errors: Path | None) -> None:
    """Let rank 0 print, and no other worker.

    Args:
        rank: rank of this worker.
        errors: the file that its stderr goes to, unless it is rank 0; None: it stays where it is.
    """
    if rank == 0:
        return
    redirect(1, Path(os.devnull))
    if errors is not None:
        redirect(2, errors)


def redirect(descriptor: int, path: Path) -> None:
    """Let what this process writes to stdout or stderr go to a file, whoever writes it.

    Args:
        descriptor: 1 for stdout, 2 for stderr.
        path: the file, which is appended to.
    """
    (sys.stdout if descriptor == 1 else sys.stderr).flush()
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(opened, descriptor)
    os.close(opened)


def run_in_session(request: RunRequest, world: World, tell: Tell) -> ScriptEnd:
    """Run the script as one of all workers, and end its trainings; a collective of all workers.

    Args:
        request: the script, and how it is run.
        world: this worker among all workers.
        tell: called on rank 0 with messages about the training.
    """
    saving, is_resumed = request.saving, request.resume_from is not None
    log = ScriptLog(tell, is_resumed) if world.rank == 0 else None
    session = ScriptSession(
        plan=request.plan,
        world=world,
        checkpoints=request.checkpoints,
        resume_from=request.resume_from,
        save_every=saving.save_every,
        keep=saving.keep,
        continues_on_disk_error=request.trouble.on_disk_error == "warn",
        tell=tell if world.rank == 0 else ignore,
        recorder=log,
        audit=request.audit,
        noise=request.noise,
    )
    calls = world.progress.calls
    with running_session(session):
        code = run_as_main(request.script, request.arguments, world.rank)
        outcome = None if log is None else log.outcome()
        audit = session.loops[0].runner.audit if session.loops else None
        if outcome is not None and audit is not None:
            outcome = replace(outcome, audit=audit.report())
        session.close()
    if calls is not None:
        calls.leave()
    return ScriptEnd(code, bool(session.loops), outcome)


def run_as_main(script: str, arguments: tuple[str, ...], rank: int) -> int:
    """Run a Python file as ``python FILE ARGUMENTS`` does; return its exit code.

    Args:
        script: path of the file.
        arguments: the words behind its name in sys.argv.
        rank: rank of this worker; rank 0 says what ``sys.exit`` was called with.
    """
    sys.argv[:] = script, *arguments
    os.environ[RANK_VARIABLE] = str(rank)
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        if rank == 0:
            print(leaving.code, file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
