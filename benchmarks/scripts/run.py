"""Runs one script, plain or prepared, on forked workers, and keeps what it prints and saves."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.scripts.entry import Entry, write_prepared, write_small
from polylane.errors import PolylaneError
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.session import ScriptSession, running_session

PLAIN, NUDGED = "plain", "plain, with weights moved by one unit in the last place"
_SAVED = (".pt", ".pth", ".tar", ".png", ".model")  # files that torch.save writes, images among them


@dataclass
class Outcome:
    """What came of a script on one worker.

    Attributes:
        printed: to standard output, and by its loggers.
        saved: the files that the workers saved, by name; the first worker's outcome has them.
        refusal: the sentence with which polylane has refused it.
        error: anything else that ended it.
    """

    printed: str = ""
    saved: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    error: str = ""


def count_workers(plan: str) -> int:
    """Return how many workers a plan of this benchmark has."""
    return int(np.prod([int(degree) for degree in re.findall(r"(?:data|pipeline|tensor)=(\d)", plan)], dtype=int))


def run_script(entry: Entry, checkout: Path, plan: str, patience: float) -> list[Outcome]:
    """Run a script on forked workers; return the outcome of each that came to an end.

    Args:
        entry: the script.
        checkout: folder of the checkout.
        plan: the plan, or PLAIN for the script as it is.
        patience: seconds before it counts as a hang.
    """
    folder = Path(tempfile.mkdtemp(prefix="script-"))
    results, place = folder / "results", folder / "place"
    results.mkdir()
    place.mkdir()
    if entry.data is not None:
        entry.data(place)
    names = set(place.rglob("*"))
    script = lay_out(entry, checkout, folder / "code", plan != PLAIN)

    def run(context: WorkerContext) -> None:
        outcome = run_here(entry, script, place, plan)
        if context.rank == 0:
            saved = sorted(path for path in set(place.rglob("*")) - names if path.suffix in _SAVED)
            outcome.saved = {str(path.relative_to(place)): read_saved(path) for path in saved}
        torch.save(outcome, results / str(context.rank))
        if outcome.refusal or outcome.error:
            raise PolylaneError(outcome.refusal or outcome.error)

    said = ""
    try:
        with time_limit(patience):
            fork_workers(run, count_workers(plan))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    outcomes = [torch.load(path, weights_only=False) for path in sorted(results.iterdir())]
    shutil.rmtree(folder, ignore_errors=True)
    if said and not any(outcome.refusal or outcome.error for outcome in outcomes):
        outcomes.append(Outcome(error=said))
    return outcomes


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context manager: raises TimeoutError after some seconds."""

    def stop(*arguments: Any) -> None:
        raise TimeoutError(f"no end after {seconds:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def lay_out(entry: Entry, checkout: Path, folder: Path, is_prepared: bool) -> Path:
    """Copy the Python files of a script's folder, made small; return the script."""
    source = (checkout / entry.path).parent
    for path in source.rglob("*.py"):
        content = write_small(path.read_text(), entry)
        if is_prepared and path == checkout / entry.path:
            content = write_prepared(content, entry)
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(content)
    return folder / Path(entry.path).name


def run_here(entry: Entry, script: Path, place: Path, plan: str) -> Outcome:
    """Run the script in this process, with ``place`` as the current folder."""
    os.chdir(place)
    if plan not in (PLAIN, NUDGED):
        os.environ["POLYLANE_PLAN"] = plan
    session = running_session(ScriptSession(is_plain=True, nudge=0)) if plan == NUDGED else contextlib.nullcontext()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    printed = io.StringIO()
    sys.argv = [str(script), *entry.arguments.split()]
    sys.path.insert(0, str(script.parent))
    logging.basicConfig(stream=printed, level=logging.INFO, format="%(message)s", force=True)
    logging.getLogger().handlers[0].addFilter(lambda record: record.name in ("root", "__main__"))
    outcome = Outcome()
    try:
        with (
            contextlib.redirect_stdout(printed),
            open(os.devnull, "w") as nothing,
            contextlib.redirect_stderr(nothing),
            session,
        ):
            runpy.run_path(str(script), run_name="__main__")
    except PolylaneError as error:
        outcome.refusal = str(error).replace(f"{script.parent}/", "")
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = next((frame for frame in reversed(frames) if str(script.parent) in frame.filename), frames[-1])
        outcome.error = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
        if os.environ.get("TRACE"):
            outcome.error += traceback.format_exc()
    outcome.printed = printed.getvalue().replace(str(place), "")
    return outcome


def read_saved(path: Path) -> Any:
    """Return what torch.save has written; a module's state."""
    value = torch.load(path, weights_only=False)
    return dict(value.state_dict()) if isinstance(value, torch.nn.Module) else value
