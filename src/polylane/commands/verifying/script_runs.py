"""Script runs: a script run for its output and its weights, plainly or under a plan, in processes of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polylane.commands.running.script_worker import redirect, run_as_main
from polylane.errors import WorkerFailed
from polylane.plan.plan import AnyPlan
from polylane.runtime.progress.watch import HangWatch
from polylane.runtime.progress_page import ProgressMemory, ProgressWriter
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.script.session import ScriptSession, running_session
from polylane.verify.keyed_draws import list_draws


@dataclass(frozen=True)
class ScriptRun:
    """What a script has computed.

    Attributes:
        lines: what it has printed, on rank 0.
        state: weights and buffers of its models when it ended, by number of the model and name.
        code: exit code that it has ended with.
        plan: the plan that it was trained by; "" for none.
        draws: whether what it trains draws random numbers, as dropout does.
    """

    lines: tuple[str, ...]
    state: Mapping[str, Tensor]
    code: int
    plan: str
    draws: bool


@dataclass(frozen=True)
class RecordedScript:
    """A script that is run for its output.

    Attributes:
        script: path of the file.
        arguments: the words behind its name in sys.argv.
        dtype: torch's default type while it runs.
    """

    script: str
    arguments: tuple[str, ...]
    dtype: torch.dtype

    def run(self, workers: int, plan: str | AnyPlan | None, nudge: int | None = None) -> ScriptRun:
        """Run the script.

        Args:
            workers: how many processes run it.
            plan: the plan that ``prepare`` takes; None: it returns what it is given.
            nudge: seed by which the first weights are moved by one unit in the last place; None: they stay.

        Raises:
            WorkerFailed: the script has raised an exception.
            PolylaneError: the plan does not fit what the script trains.
        """
        pages = {rank: ProgressMemory.allocate_for_fork() for rank in range(workers)}
        watch = HangWatch(pages, "stop", None, lambda report: None)
        with tempfile.TemporaryDirectory(prefix="polylane-") as folder:
            try:
                worker = partial(self._record, plan, nudge, pages, Path(folder))
                return fork_workers(worker, workers, watch=watch.check)[0]
            finally:
                watch.close()

    def _record(
        self,
        plan: str | AnyPlan | None,
        nudge: int | None,
        pages: Mapping[int, ProgressMemory],
        folder: Path,
        context: WorkerContext,
    ) -> ScriptRun:
        printed = folder / f"stdout-{context.rank}"
        for descriptor, path in ((1, printed), (2, folder / f"stderr-{context.rank}")):
            redirect(descriptor, path)
        torch.set_default_dtype(self.dtype)
        world = replace(context.world, progress=ProgressWriter(pages[context.rank], context.rank, is_script=True))
        session = ScriptSession(plan, world, is_plain=plan is None, is_alone=world.size == 1, nudge=nudge)
        with running_session(session):
            code = run_as_main(self.script, self.arguments, context.rank)
            state = {
                f"{number}.{name}": value.detach().cpu().clone()
                for number, model in enumerate(session.models)
                for name, value in model.state_dict().items()
                if isinstance(value, Tensor)
            }
            jobs = [loop.runner.job for loop in session.loops if loop.runner.job is not None]
            spec = ", ".join(job.plan.spec for job in jobs)
            draws = any(_draws(job) for job in jobs)
            session.close()
        return ScriptRun(tuple(printed.read_text(errors="replace").splitlines()), state, code, spec, draws)


def _draws(job: Any) -> bool:
    return any(list_draws(partition.graph.code) != [] for partition in job.worker.partitions.values())


def run_plainly(script: str, arguments: tuple[str, ...]) -> tuple[RecordedScript, ScriptRun, str]:
    """Run a script on one worker as it is: in float64, or where it fails for that, in types of its own.

    Args:
        script: path of the file.
        arguments: the words behind its name in sys.argv.

    Returns:
        The script with the type that it ran in, what it has computed, and why it was not float64.

    Raises:
        WorkerFailed: the script itself raises an exception.
    """
    recorded = RecordedScript(script, arguments, torch.float64)
    try:
        return recorded, recorded.run(1, None), ""
    except WorkerFailed as error:
        failure = f"{error.error_type}: {error.error_message}"
    # Outside of the handler: what the script raises a second time is not told as raised while handling the first.
    recorded = replace(recorded, dtype=torch.get_default_dtype())
    return recorded, recorded.run(1, None), failure
