"""What is compiled belongs to one cache: a step on a batch of a known form looks it up and runs it.

The measure of the first law: distinct source files of polylane that have a call event (``sys.setprofile``) during one
``Job.step`` of one worker, on a batch of a known form and size. Left out are the files of ``runtime/transport`` (how
bytes travel is no part of what a step decides), and all that is called from inside the generated code of a stage, for
those are the operators of the user's graph. Before there was a cache, this measure was 24 for a worker alone, and 26
for each worker of two stages: the law is half of that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import Tensor, nn

import polylane
from polylane.runtime.job import Job
from training import batch_of, mlp, workers

PACKAGE = str(Path(polylane.__file__).parent)
TRANSPORT = str(Path(PACKAGE, "runtime", "transport"))


def files_called(run: Callable[[], Any]) -> set[str]:
    """The source files that a call goes into, as the head of this file says."""
    found, inside = set[str](), [0]  # how many frames of generated code are on the stack

    def see(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if name.startswith(("<stage", "<samples")) or " samples of <stage" in name:
            inside[0] += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not inside[0] and name.startswith(PACKAGE) and not name.startswith(TRANSPORT):
            found.add(name.removeprefix(PACKAGE + "/"))

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that needs no counts of the whole batch, which a worker would exchange before its first pass."""
    return model(batch[0]).square().mean()


def warm_step(job: Job) -> set[str]:
    """The files of one step on a batch of a form and size that came before."""
    batch = batch_of(8)
    for _ in range(2):
        job.step(batch)
    return files_called(lambda: job.step(batch))


@pytest.mark.parametrize(("plan", "most"), [("microbatches=1", 12), ("pipeline=2,microbatches=2", 13)])
def test_a_step_on_a_known_form_calls_into_few_files(plan: str, most: int) -> None:
    for rank, found in enumerate(workers(warm_step, mlp(6, 8, 8, 4), plan, loss=square)):
        assert len(found) <= most, (rank, sorted(found))
