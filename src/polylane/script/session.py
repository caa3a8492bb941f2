"""Script session: what the command that runs a script asks of it, for ``prepare`` to read."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from polylane.diagnosis.stacks import Frame
from polylane.errors import ActionFailed, PolylaneError
from polylane.graph.rounding_noise import nudge_values
from polylane.plan.plan import AnyPlan
from polylane.runtime.progress.script_watch import watch_script
from polylane.runtime.workers.world import World
from polylane.script.resuming.progress import ScriptProgress
from polylane.verify.audit import AuditMode

if TYPE_CHECKING:
    from polylane.script.loop import TrainingLoop
    from polylane.script.model_state.updates import StepRecorder

PLAN_VARIABLE = "POLYLANE_PLAN"
RANK_VARIABLE = "POLYLANE_RANK"  # which worker this is, for what a script does on one of them


@dataclass(frozen=True)
class ScriptSession:
    """What is asked of a script by the command that runs it.

    Attributes:
        plan: the plan; a line, "auto", or a plan that was read from a file. None: the script runs as it is.
        world: this worker among all workers; None: that of the launcher which started this process.
        checkpoints: folder of the run's checkpoints; None: none are saved.
        resume_from: folder of the checkpoint to go on from; None: the script begins.
        save_every: when checkpoints are saved, as the text of --save-every; None: never.
        keep: number of newest checkpoints that are kept.
        continues_on_disk_error: whether a checkpoint that could not be saved is a warning, and the training goes on.
        recorder: records the steps of what is prepared first; None: nobody does.
        audit: whether some steps are computed a second time on one device, and what follows from a difference.
        noise: whether the gradient noise is measured: "on" in every step, "auto" in some, where the plan allows it.
        is_plain: whether the script runs as it is, whatever plan it names itself.
        is_alone: whether one worker computes what the plan gives to several, for a comparison with them.
        nudge: seed by which the weights that it trains are moved by one unit in the last place before they are, to see
            what rounding alone changes; None: they stay.
        tell: called on every worker with each message about the run, a dict of plain values with its "kind".
        loops: the training loops that the script has prepared, under a command, which closes them.
        models: the models that the script has prepared, or was given back as they are, under a command.
    """

    plan: str | AnyPlan | None = None
    world: World | None = None
    checkpoints: Path | None = None
    resume_from: Path | None = None
    save_every: str | None = None
    keep: int = 3
    continues_on_disk_error: bool = True
    recorder: StepRecorder | None = None
    audit: AuditMode = "auto"
    noise: str = "off"
    is_plain: bool = False
    is_alone: bool = False
    nudge: int | None = None
    tell: Callable[[dict[str, Any]], None] = lambda message: None
    loops: list[TrainingLoop] = field(default_factory=list, compare=False)
    models: list[nn.Module] = field(default_factory=list, compare=False)

    @cached_property
    def progress(self) -> ScriptProgress:
        """Where the script is in its loops, and its checkpoints."""
        return ScriptProgress(
            self.checkpoints, self.resume_from, self.save_every, self.keep, self.continues_on_disk_error
        )

    def choose_plan(self, plan: str | AnyPlan | None) -> str | AnyPlan | None:
        """Return the plan of a script that names one itself, or none; None where it runs as it is."""
        return None if self.is_plain else plan or self.plan

    def nudge_weights(self, models: Iterable[nn.Module]) -> None:
        """Move the weights of models that the script is about to train, where the session says so."""
        if self.nudge is not None:
            nudge_values((parameter for model in models for parameter in model.parameters()), self.nudge)

    def hold(self, loops: Iterable[TrainingLoop] = (), models: Iterable[nn.Module] = ()) -> None:
        """Keep what a command closes and compares at the end; other scripts' live as long as the script holds them."""
        if self.world is not None:
            self.loops.extend(loops)
            self.models.extend(models)

    def join_world(self) -> World:
        """Return this worker among all workers, which are watched."""
        return watch_script(World.join(), "stop", None) if self.world is None else self.world

    def close(self) -> None:
        """End the script's trainings; collective."""
        for loop in self.loops:
            loop.close()


_sessions: list[ScriptSession] = []


def current_session() -> ScriptSession:
    """Return the session of the command that runs this script; without one, that of this process."""
    return _sessions[-1] if _sessions else _session_of_process(os.environ.get(PLAN_VARIABLE))


@cache
def _session_of_process(plan: str | None) -> ScriptSession:
    """Return the session of a script that torchrun or Python runs, with the plan of the environment's variable."""
    return ScriptSession(plan)


@contextmanager
def running_session(session: ScriptSession) -> Iterator[None]:
    """Context manager: the script that runs in it is asked for what the session says."""
    _sessions.append(session)
    try:
        with _abandoning(session):
            yield
    except (PolylaneError, ActionFailed) as error:
        cause = error.cause if isinstance(error, ActionFailed) else error
        if isinstance(cause, PolylaneError):
            _name_line(cause, error)
        raise
    # What torch raises for a process group that is there, or is not.
    except (RuntimeError, ValueError, AssertionError) as error:
        if (refusal := _explain_process_group(error)) is not None:
            raise refusal from None
        raise
    finally:
        _sessions.remove(session)


@contextmanager
def _abandoning(session: ScriptSession) -> Iterator[None]:
    """Context manager: after an error this process ends without waiting for the others, which may wait for it."""
    try:
        yield
    except Exception:
        for loop in session.loops:
            if loop.runner.job is not None:
                loop.runner.job.abandon()
        raise


def _explain_process_group(error: Exception) -> PolylaneError | None:
    """Return what to do where the script's own torch.distributed has no group, or a second one; None of others."""
    stack = [Frame(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
    positions = [position for position, frame in enumerate(stack) if frame.is_users]
    if not positions or not re.search("environment variable|[Pp]rocess group|initializ", str(error)):
        return None
    at = positions[-1]
    if not any(re.search(r"/torch/(distributed|nn/parallel|utils/data)/", frame.file) for frame in stack[at + 1 :]):
        return None
    reason = " ".join(str(error).split()).rstrip(".!")
    return PolylaneError(
        f"{stack[at].file}:{stack[at].line}: {reason}; the workers of a prepared script are started and connected for "
        "it: take out init_process_group, and what needs it (DistributedDataParallel, DistributedSampler, ranks, "
        "all_reduce), so that the script is that of one device"
    )


def _name_line(error: PolylaneError, raised: Exception) -> None:
    """Begin an error's sentence with the line of the script that has raised it, unless it names one of that file."""
    frames = (Frame(f.f_code.co_filename, line, "") for f, line in traceback.walk_tb(raised.__traceback__))
    script_frames = [frame for frame in frames if frame.is_users]
    if script_frames and not re.search(rf"{re.escape(Path(script_frames[-1].file).name)}(:| line )\d", str(error)):
        error.args = f"{script_frames[-1].file}:{script_frames[-1].line}: {error}", *error.args[1:]
