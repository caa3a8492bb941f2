"""Search progress: how many plans were compared so far, on a terminal, where a search takes longer than a moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# Progress callback of a search: what is done at the moment, and how many plans it is done for so far.
Told = Callable[[str, int], None]

# Seconds until anything is shown, and from one picture to the next.
PATIENCE, EVERY = 1.5, 0.1


def tell_nobody(activity: str, plans: int) -> None:
    """Do nothing: nobody waits for this search."""


@contextmanager
def show_progress(console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Told]:
    """Context manager: show what the search tells, on stderr; nothing where that is no terminal.

    There is no thread, so that processes may be forked afterwards.

    Args:
        console: where it is shown; None: stderr.
        clock: seconds that only ever grow, from any start.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield tell_nobody
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, get_time=clock)
    task, start = bar.add_task("searching", total=None), clock()
    shown = start

    def told(activity: str, plans: int) -> None:
        nonlocal shown
        now = clock()
        if now - start < PATIENCE or now - shown < EVERY:
            return
        shown = now
        bar.start()
        bar.update(task, description=f"searching: {plans:,} plans {activity}", refresh=True)

    try:
        yield told
    finally:
        bar.stop()
