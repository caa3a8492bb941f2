"""Stragglers: ranks that are slowed down on purpose, to see the effect on the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from polylane.runtime.pipeline.executor import Executor
from polylane.schedule.action import Action


class Straggler(NamedTuple):
    """Slows one rank down: its passes take ``times`` as long, in one of ``every`` steps.

    Attributes:
        times: factor of the duration of a forward or backward pass, at least 1.
        every: one of so many steps is slow; which one depends on the rank, so that stragglers take turns.
    """

    times: float
    every: int = 1

    def factor_at(self, step: int, rank: int) -> float:
        """Return the factor by which the passes of a step take longer."""
        return self.times if step % self.every == rank % self.every else 1.0


@contextmanager
def slow_down(stragglers: Mapping[int, Straggler]) -> Iterator[None]:
    """Context manager: ranks of workers that are forked inside sleep in their passes; keys of the mapping are ranks."""
    begin = Executor._begin
    factors: dict[int, float] = {}  # of the step that runs, in the process of each worker

    def begin_step(executor: Executor, batch: Any, step: int, seed: int) -> Any:
        rank = executor.program.rank
        factors[rank] = stragglers[rank].factor_at(step, rank) if rank in stragglers else 1.0
        return begin(executor, batch, step, seed)

    def delay(run: Callable[..., None]) -> Callable[..., None]:
        def run_slowly(executor: Executor, action: Action, *arguments: Any) -> None:
            waits, rank = executor.mesh.waits, executor.program.rank
            start = waits.begin_action()
            run(executor, action, *arguments)
            if factors[rank] > 1:
                span = waits.make_span(rank, action, start).resolve()
                time.sleep(max(0.0, span.end - span.start - span.waited) * (factors[rank] - 1))

        return run_slowly

    with (
        mock.patch.object(Executor, "_begin", begin_step),
        mock.patch.object(Executor, "_forward", delay(Executor._forward)),
        mock.patch.object(Executor, "_backward", delay(Executor._backward)),
    ):
        yield
