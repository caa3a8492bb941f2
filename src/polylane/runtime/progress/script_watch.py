"""Script watch: the watch over workers whose own script calls polylane, under torchrun or another launcher.

It is that of :mod:`.host_watch`, but for its start and its end. A script may have threads, connections and accelerators
by then, which a fork would share: so the first worker of each host starts ``python -m`` of this module, which imports
no torch. Only the script can handle an error: a worker that loses one that was ended for a hang raises
WorkerHung.
"""

from __future__ import annotations

import atexit
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from polylane.diagnosis.page_layout import Phase
from polylane.errors import PolylaneError, format_value
from polylane.output import guard_streams, put_work_first
from polylane.runtime.progress.host_watch import HostWatch, identify_host, watch_host
from polylane.runtime.progress_page import Progress
from polylane.runtime.workers.python_process import start_module

if TYPE_CHECKING:
    from polylane.runtime.workers.world import World

ScriptOnHang = Literal["stop", "wait"]

END_SECONDS = 2.0  # wait for the watching process to end, at the end of this one

# By rank and size of a world, where this process writes that it is there: jobs of one script share a page.
_pages: dict[tuple[int, int], Progress] = {}


def watch_script(world: World, on_hang: ScriptOnHang | None, hang_after: float | None) -> World:
    """Return the world in which the workers of a script are watched; a collective of all workers.

    Workers that a process of polylane's has started are left to that, and a single one waits for nobody.

    Args:
        world: this worker among all workers.
        on_hang: "stop": end a worker that hangs; "wait": only say so; None: nobody watches.
        hang_after: seconds without progress after which a worker hangs; None: from the run's own step times.

    Raises:
        PolylaneError: an option is wrong, or not the same on every worker.
    """
    _check_options(on_hang, hang_after)
    if world.size == 1 or world.board is not None:
        return world
    host, page = identify_host()[0], _pages.get((world.rank, world.size))
    cards = world.all_gather_object([host, page is not None, on_hang, hang_after])
    if any(card[2:] != cards[0][2:] for card in cards):
        raise PolylaneError("on_hang and hang_after must be the same on every worker")
    if on_hang is None:
        return world
    if page is not None and all(card[1] for card in cards):
        page.enter(Phase.STARTING)
        return replace(world, progress=page)
    is_first = next(rank for rank, card in enumerate(cards) if card[0] == host) == world.rank
    watch = _start_process(on_hang, hang_after) if is_first and os.path.isdir("/proc/self/fd") else HostWatch()
    world = watch.attach(world, is_script=True)
    _pages[world.rank, world.size] = world.progress
    if world.progress.calls is not None:
        atexit.register(world.progress.calls.leave)
    return world


def _check_options(on_hang: object, hang_after: object) -> None:
    if on_hang is not None and on_hang not in get_args(ScriptOnHang):
        raise PolylaneError(f"on_hang: expected 'stop', 'wait' or None, not {format_value(on_hang)}")
    is_number = isinstance(hang_after, int | float) and not isinstance(hang_after, bool)
    if hang_after is not None and not (is_number and math.isfinite(hang_after) and hang_after > 0):  # type: ignore[arg-type,operator]
        raise PolylaneError(f"hang_after: expected a number of seconds above 0, not {format_value(hang_after)}")


def _start_process(on_hang: ScriptOnHang, hang_after: float | None) -> HostWatch:
    reader, writer = os.pipe()
    process = start_module(__name__, on_hang, str(hang_after or ""), stdin=reader)
    os.close(reader)
    watch = HostWatch(writer)

    def end() -> None:
        watch.end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)

    atexit.register(end)
    return watch


if __name__ == "__main__":
    guard_streams()
    put_work_first()
    given = sys.argv[2]
    watch_host(0, sys.argv[1], float(given) if given else None, lambda report: None)  # type: ignore[arg-type]
