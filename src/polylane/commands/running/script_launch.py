"""Script launch: the workers of ``polylane run``, started on this host or by torchrun, and how their script ends."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from polylane.commands.running.launch import HostLaunch, JoinedTraining, train_with_restarts
from polylane.commands.running.reporter import Reporter, watching
from polylane.commands.running.resume import share_checkpoints
from polylane.errors import WorkerFailed
from polylane.output import say_at_once

if TYPE_CHECKING:
    from polylane.commands.requests import RunRequest
    from polylane.commands.running.script_worker import ScriptEnd

SHOWN_LINES = 20  # most lines of a worker's stderr that are shown where it ended without a traceback


class HostScript(HostLaunch):
    """Starts a script's workers on this host: forked on the CPU, in new processes where there are accelerators."""

    def start(self, request: RunRequest, workers: int, reporter: Reporter) -> ScriptEnd:
        """Start the workers, as often as is allowed, and return what the script has come to on rank 0.

        Args:
            request: the script, and how it is run.
            workers: number of workers that are started.
            reporter: receives the messages of rank 0, and reports of what went wrong.
        """
        from polylane.commands.running.script_worker import run_started_script
        from polylane.runtime.progress_page import ProgressMemory
        from polylane.runtime.workers.team import choose_start_method, start_workers
        from polylane.runtime.workers.threads import limit_to_one_thread

        method = choose_start_method()
        if method == "fork":
            limit_to_one_thread()
        allocate = ProgressMemory.allocate_for_fork if method == "fork" else ProgressMemory.allocate

        def run(request: RunRequest) -> ScriptEnd:
            pages = {rank: allocate() for rank in range(workers)}
            with tempfile.TemporaryDirectory(prefix="polylane-") as errors, watching(pages, request, reporter) as watch:
                worker = partial(run_started_script, request, pages, Path(errors))
                try:
                    return start_workers(worker, workers, reporter, self._stop, watch, start_method=method)[0]
                except WorkerFailed as error:
                    if not error.traceback:
                        _show_errors(Path(errors) / str(error.rank), error.rank)
                    raise

        return train_with_restarts(request, run, lambda: "", self._stop, reporter.pause, say_at_once)


class JoinedScript(JoinedTraining):
    """One of a launcher's workers, which runs the script with the others; rank 0 writes and prints."""

    def start(self, request: RunRequest, workers: int, reporter: Reporter) -> ScriptEnd:  # type: ignore[override]
        """Run the script, and return what it has come to; a collective.

        Args:
            request: the script, and how it is run.
            workers: number of workers that are started.
            reporter: receives the messages of rank 0, and reports of what went wrong.
        """
        world = self.meet(request, reporter, is_script=True)
        from polylane.commands.running.script_worker import run_in_session, silence

        silence(world.rank, None)
        end = run_in_session(share_checkpoints(request, world), world, self._tell)
        self.end_watch()
        return end


def _show_errors(file: Path, rank: int) -> None:
    """Show the end of what a worker has written to its stderr."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # rank 0 has written to this process's own
        return
    for line in lines[-SHOWN_LINES:]:
        say_at_once(f"worker {rank}: {line}")
