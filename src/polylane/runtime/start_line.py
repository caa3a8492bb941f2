"""Start line: what is trained by which plan, on how many workers of which kind; what a job and a script's start say."""

from __future__ import annotations

import logging
import sys

from polylane.errors import format_plural
from polylane.plan.plan import Plan
from polylane.runtime.workers.world import World

LOGGER = logging.getLogger("polylane")


def describe_training(plan: Plan, world: World) -> str:
    """Return a line such as ``2 workers on cuda, data=2,...``."""
    return f"{format_plural(world.size, 'worker')} on {world.device.type}, {plan.spec}"


def announce_training(plan: Plan, world: World) -> None:
    """Say on rank 0 what is trained: to the logger ``polylane`` where the script has set up logging, else on stderr.

    ``logging.getLogger("polylane").setLevel("WARNING")`` keeps it silent.
    """
    if world.rank != 0:
        return
    line = describe_training(plan, world)
    if LOGGER.hasHandlers():
        LOGGER.info(line)
    elif LOGGER.level <= logging.INFO:
        print(f"polylane: {line}", file=sys.stderr, flush=True)
