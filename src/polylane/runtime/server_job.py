"""A job on a worker that only serves parameters: the same methods, so that one script runs on every worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PeerLost, PolylaneError
from polylane.graph.batch import flatten, sample_count
from polylane.observe.timeline import Timeline
from polylane.runtime import data
from polylane.runtime.connections import Connect, check_size
from polylane.runtime.division import Batch, Share
from polylane.runtime.holding import holders_of
from polylane.runtime.job import Job
from polylane.runtime.leaving import close_at_exit
from polylane.runtime.prepare import Prepared
from polylane.runtime.result import Report, StepResult, joined, on_one_clock
from polylane.runtime.stale import stale_of_server
from polylane.runtime.sync.rule import Stepping
from polylane.runtime.sync.server import Server
from polylane.runtime.sync.server_host import opened
from polylane.runtime.sync.server_log import Update
from polylane.runtime.sync.server_news import heard
from polylane.runtime.traffic import AGREEMENT, OPERATORS, STAGES, STATISTICS
from polylane.runtime.transport.protocol import Counters
from polylane.runtime.world import World


def job_of(
    prepared: Prepared,
    world: World,
    *,
    example: Any,
    clip_norm: float | None = None,
    seed: int = 0,
    same_weights: bool = True,
    connect: Connect | None = None,
) -> Job:
    """A worker's handle on a training: :class:`Job`, or where it only serves parameters :class:`ServerJob`.

    Args: as of :class:`Job`.
    """
    if world.rank >= prepared.plan.workers:
        check_size(prepared.plan, world)
        return ServerJob(prepared, world, clip_norm)
    return Job(
        prepared,
        world,
        example=example,
        clip_norm=clip_norm,
        seed=seed,
        same_weights=same_weights,
        connect=connect,
    )


class ServerJob(Job):
    """The handle of a worker that only serves: its threads do, whatever the script does meanwhile.

    Batches have no samples in them and are not loaded, steps do nothing and their loss is nan. What all workers find
    out together (evaluations, weights) it is told. Once the others have closed the job, nothing more comes.
    """

    def __init__(self, prepared: Prepared, world: World, clip_norm: float | None) -> None:
        self.plan, self.world, self.model = prepared.plan, world, prepared.model
        world.first(prepared.plan.workers)
        self._host = opened(world, prepared, holders_of(prepared), clip_norm)
        self._prepared, self._step, self._closed = prepared, 0, False
        self._stale = stale_of_server(prepared, world.rank)
        _ = self.server.weights  # that there are any: what is wrong with an optimizer is said here
        self._left, self.anomalies = False, None
        close_at_exit(self)

    @property
    def server(self) -> Server:
        """What it serves with."""
        return self._host.servers[0]

    # ---- what it takes part in ---------------------------------------------------------------------------------------

    def _told(self, what: str, otherwise: Any = None) -> Any:
        """What the others found out together; ``otherwise`` where they have closed the job instead."""
        if self._closed:
            return otherwise
        try:
            called, value = heard(self._host)
            if called == "close":
                self._closed = True
                self._host.close()
        except PeerLost as lost:
            raise self._host.blame(lost) from None
        if called not in (what, "close"):
            raise PolylaneError(
                f"the workers that train call {called}, and rank {self.world.rank}, which serves parameters, calls "
                f"{what}: every worker must call the same methods"
            )
        return otherwise if called == "close" else value

    def evaluate_sums(self, batch: Any, objective: str | None = None) -> tuple[float, float]:
        """See :meth:`Job.evaluate_sums`."""
        sums: tuple[float, float] = self._told("evaluate", (math.nan, math.nan))
        return sums

    def whole_gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """See :meth:`Job.whole_gradients`."""
        found: dict[str, Tensor | None] = self._told("whole_gradients", {})
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """See :meth:`Job.state_dict`."""
        state: dict[str, Tensor] = self._told("state_dict", {})
        return state

    def save(self, path: str | Path) -> None:
        """See :meth:`Job.save`: when it returns, the file is there."""
        self._told("save")

    def updates(self) -> tuple[tuple[Update, ...], ...]:
        """See :meth:`Job.updates`."""
        self._told("updates")
        return () if self._closed else self._host.updates()

    def gathered(self, value: Any) -> list[Any]:
        """See :meth:`Job.gathered`."""
        return self._once_all_ask(lambda: value)

    def _once_all_ask(self, find: Callable[[], Any]) -> list[Any]:
        """Every worker's value; this one's is found when the others are there: until then it serves."""
        self._told("gathered")
        return [] if self._closed else self._host.transport.all_gather_object(find())

    @property
    def counters(self) -> tuple[Counters, ...]:
        """See :meth:`Job.counters`."""
        return self._host.counters

    def traffic(self) -> list[dict[str, float]]:
        """See :meth:`Job.traffic`: a server sends its weights to each replica in every step, and once at the start."""

        def own() -> dict[str, float]:
            weights = sum(tensor.nbytes for tensor in self.held().values())
            sent = sum(counters.sent for counters in self.counters) / max(self._step, 1)
            none = dict.fromkeys((STAGES, OPERATORS, STATISTICS), 0.0)
            return {AGREEMENT: sent, **none, "theory": float(weights * self.plan.data)}

        return self._once_all_ask(own)

    def timeline(self, steps: int = 1) -> Timeline:
        """See :meth:`Job.timeline`: a server's lane has the updates that it made meanwhile."""
        lanes = self._once_all_ask(lambda: on_one_clock([self.server.spans], self._host.ahead))
        return joined(lanes, self.plan.workers)

    def stepping(self) -> list[Stepping]:
        """See :meth:`Job.stepping`."""
        return self._host.stepping()

    def close(self) -> None:
        """Serve until the others have ended, then leave with them."""
        if self._left:
            return
        self._left = True
        self._told("close")
        self.world.leave()

    # ---- what it does not --------------------------------------------------------------------------------------------

    def step(self, batch: Any, objective: str | None = None) -> StepResult:
        """Return at once."""
        samples = batch.samples if isinstance(batch, Batch) else sample_count(flatten(batch)[0])
        self._step += 1
        self._stale.stepped()
        nothing = torch.full((2,), math.nan, dtype=torch.float64)
        return StepResult(self._step - 1, samples, Report(None, nothing, (), ()))

    def _epoch(self, dataset: Any, batch_size: int, epoch: int, *, drop_last: bool, **how: Any) -> Iterator[Batch]:
        """As many as the others have, of the same sizes, with no samples in them."""
        return (Batch(samples, []) for samples in data.sizes_of(dataset, batch_size, drop_last))

    def _shares(self, samples: int) -> tuple[Share, ...]:
        return ()

    @property
    def slack(self) -> int:
        """See :attr:`Job.slack`."""
        return 1

    @property
    def staleness(self) -> int:
        """See :attr:`Job.staleness`."""
        return 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first objective's optimizer, over the parameters that this server holds."""
        return self.optimizer_of(next(iter(self._prepared.objectives)))

    def optimizer_of(self, objective: str) -> torch.optim.Optimizer:
        """See :meth:`Job.optimizer_of`."""
        return self.server.weights.courses[objective].optimizer

    def gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Those of the last update, of the parameters that this server holds."""
        course = self.server.weights.courses[objective or next(iter(self._prepared.objectives))]
        return {name: parameter.grad for name, parameter in course.held.items()}

    def held(self) -> dict[str, Tensor]:
        """The parameters that this server holds, whole."""
        return dict(self.server.weights.parameters)

    def shard_of(self, name: str, whole: Tensor) -> Tensor | None:
        """See :meth:`Job.shard_of`: all of it."""
        return whole

    def part_of(self, name: str) -> str:
        """See :meth:`Job.part_of`: all of it."""
        return ""
