"""Training role of a job: what a worker that computes a part of the model does in every method of its job.

The parts are made elsewhere: the programs that a step runs (:mod:`polylane.runtime.binding`), the tensors that this
worker holds (:mod:`polylane.runtime.holding`), the optimizers (:mod:`polylane.runtime.trainer`), and how replicas agree
(:mod:`polylane.runtime.sync.rule`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.observe.timeline import Span
from polylane.program.program import Program
from polylane.runtime import allocator, clock, data, weights
from polylane.runtime.binding import Binding, Lane
from polylane.runtime.compile_cache import CompileCache
from polylane.runtime.connections import Connect, connected, replica_of
from polylane.runtime.division import Batch, Share, shares
from polylane.runtime.finite import Anomalies
from polylane.runtime.holding import Holding, holders_of, layout_of
from polylane.runtime.lane import lower_ahead
from polylane.runtime.prepare import Prepared
from polylane.runtime.result import STEPS_KEPT, Reports, StepResult, gathered, on_one_clock
from polylane.runtime.stale import own_calls, stale_of
from polylane.runtime.sync.choose import rule_of
from polylane.runtime.sync.rule import CollectiveCall, Stepping
from polylane.runtime.sync.server_log import Update
from polylane.runtime.traffic_of import traffic_of
from polylane.runtime.trainer import trainers_of
from polylane.runtime.transport.protocol import Counters
from polylane.runtime.worker import StepState
from polylane.runtime.world import World


class TrainingRole:
    """One worker's part in a training. Its methods do on such a worker what those of the job with their names promise.

    Attributes:
        world: this worker among those that train.
    """

    def __init__(
        self,
        prepared: Prepared,
        world: World,
        *,
        example: Any,
        clip_norm: float | None = None,
        seed: int = 0,
        same_weights: bool = True,
        connect: Connect | None = None,
    ) -> None:
        """Bind a prepared training to this worker; all workers, dedicated servers too, make their roles at once.

        Args: as of :class:`polylane.runtime.job.Job`.
        """
        if world.device.type == "cpu":
            allocator.keep_freed()
        everyone, world = world, world.first(prepared.plan.workers)
        self.plan, self.world = prepared.plan, world
        self._prepared, self._seed, self._step = prepared, seed, 0
        self._compared = False
        holders = holders_of(prepared)
        lowered = lower_ahead(prepared, holders)
        layout = layout_of(prepared, lowered)
        self._programs = {name: layout.regrouped(programs) for name, programs in lowered.items()}
        local = lower_ahead(prepared, holders, replica_local=True) if self.plan.sync.alone else {}
        self._connections = connected(prepared, world, [*self._programs.values(), *local.values()], connect)
        self._transport = self._connections.transport
        self._ahead = clock.ahead_of_rank_0(self._transport) if world.size > 1 else 0.0
        self._holding = Holding(
            prepared,
            world,
            holders,
            self._transport,
            seed=seed,
            same_weights=same_weights,
            layout=layout,
            gathers=self._connections.gathers,
        )
        self._trainers = trainers_of(self._holding, self._programs, clip_norm)
        codecs = {name: trainer.codec for name, trainer in self._trainers.items()}
        self._binding = Binding(self._holding, self._connections, self._programs, local, codecs)
        self._cache = CompileCache[Lane](prepared, self._binding, example)
        self._cache.bind_ahead([False, True] if local else [False])
        self._rule = rule_of(self._holding, self._trainers, everyone, clip_norm, self._connections.mesh.waits)
        self._stale = stale_of(self._holding)
        self._reports, self._spans = Reports(), deque[tuple[Span, ...]](maxlen=STEPS_KEPT)
        self._traffic = traffic_of(self._connections, self._rule, self._holding, self._programs)

    @property
    def slack(self) -> int:
        return self._rule.slack

    def lane(self, partition: Partition, programs: Sequence[Program], samples: int) -> Lane:
        """A partition of one of the training's graphs, with every worker's program, bound to this worker's tensors.

        Args:
            partition: of a graph that was compiled ahead.
            programs: of all workers.
            samples: in the batches that it is for.
        """
        return self._binding.fit_to_samples(self._binding.lane(self._prepared.graph_of(partition), programs), samples)

    # ---- training ----------------------------------------------------------------------------------------------------

    def step(self, batch: Any, name: str, anomalies: Anomalies | None) -> StepResult:
        trainer = self._trainers[name]
        own = self._own(batch)
        self._refuse_short(own)
        with own_calls(), self._rule.watch():
            lane = self._cache.compiled_for(name, own, replica_local=self._rule.alone(name))
            self._reports.make_room(self._rule.slack)
            trainer.zero_grad()
            if lane.buffers:
                self._holding.buffers.fetch(lane.buffers)
            lane.worker.anomalies = anomalies
            with self._traffic.counted(name, lane.passes):
                state = lane.worker.run(own, self._step, self._seed, lambda state: self._finish(name, lane, state))
            if lane.buffers:
                self._holding.buffers.written(lane.buffers)
            report = gathered(
                lane.programs, state, self._ahead, self._transport, self.world.device, self._rule.together
            )
        self._stale.stepped(self._rule.differs)
        self._reports.add(report)
        self._spans.append(tuple(state.spans))
        self._step += 1
        return StepResult(self._step - 1, own.samples, report)

    def _own(self, batch: Any) -> Batch:
        """A batch as this worker has it, on its device."""
        own: Batch = batch if isinstance(batch, Batch) else Batch.whole(batch)
        if not isinstance(batch, Batch):
            self._refuse_different(own)
        if own.samples == 0:
            raise PolylaneError("the batch has no samples")
        return own.as_in(self._cache.sampled, self.world.device)

    def _refuse_different(self, batch: Batch) -> None:
        """See once, at the first whole batch, that it is the same on every worker.

        Elsewhere the habit is a batch of its own for each; here they would take their parts out of different wholes.
        """
        if self._compared or self.world.size == 1:
            return
        self._compared = True
        own = [weights.digest(leaf) for leaf in batch.leaves if isinstance(leaf, Tensor)]
        if any(other != own for other in self._transport.all_gather_object(own)):
            raise PolylaneError(
                "workers gave step() different batches: give each of them the same whole batch, of which it takes its "
                "own samples, or let job.batches(dataset, batch_size) load only those"
            )

    def _refuse_short(self, batch: Batch) -> None:
        """See that the model can be trained on a batch and, before any step, on all others of its epoch."""
        fewest = self._prepared.fewest
        if batch.shortest >= fewest.samples:
            return
        what = "this batch" if batch.samples == batch.shortest else "the last batch of an epoch"
        remedy = "leave it out, with drop_last=True of batches(), or take another batch size"
        fewest.check(batch.shortest, what, remedy)

    def _finish(self, name: str, lane: Lane, state: StepState) -> None:
        trainer = self._trainers[name]
        if not lane.partition.graph.mean:
            # Gradients were taken of total / samples; the mean is total / count, and the count is known only now.
            together = replica_of(self.plan, self.world.rank) if lane.worker.alone else range(self.world.size)
            count = self._summed(state, together)[1]
            if count:
                trainer.rescale(state.counted / count)
        self._rule.update(name, trainer, bool(state.shares))
        self._rule.stepped(name, lane.counted)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate_sums(self, batch: Any, name: str) -> tuple[float, float]:
        own = self._own(batch)
        with own_calls():
            lane = self._cache.compiled_for(name, own, training=False)
        self._holding.buffers.fetch(lane.buffers)
        with torch.no_grad(), own_calls(), self._rule.agreed(), self._binding.kept(lane.partition):
            state = lane.worker.run(own, 0, self._seed, lambda state: None)
        sums = self._summed(state, range(self.world.size))
        self._rule.broadcast_result(CollectiveCall.EVALUATE, sums)
        return sums

    def _summed(self, state: StepState, ranks: Sequence[int]) -> tuple[float, float]:
        """The loss over some workers, as (total, count)."""
        sums = torch.tensor(state.sums(), dtype=torch.float64, device=self.world.device)
        total, count = self._transport.all_reduce(sums, ranks).wait().tolist()
        return total, count

    # ---- data and weights --------------------------------------------------------------------------------------------

    def epoch(self, dataset: Any, batch_size: int, epoch: int, *, drop_last: bool, **how: Any) -> Iterator[Batch]:
        """The batches of one epoch, with this worker's samples.

        Args:
            dataset, batch_size, drop_last, how: as for :meth:`polylane.runtime.job.Job.batches`.
            epoch: its number, which decides the order of samples.
        """
        return data.batches(
            dataset, batch_size, shares=self.shares, epoch=epoch, seed=self._seed, drop_last=drop_last, **how
        )

    def shares(self, samples: int) -> tuple[Share, ...]:
        """Which samples of a batch of ``samples`` samples this worker computes."""
        program = next(iter(self._programs.values()))[self.world.rank]
        return shares(samples, self._prepared.microbatches_of(samples), len(program.replicas), program.replica)

    def optimizer_of(self, name: str) -> torch.optim.Optimizer:
        return self._trainers[name].optimizer

    def gradients(self, name: str) -> dict[str, Tensor | None]:
        self._rule.summed_gradients(name)
        held = self._trainers[name].held
        return {name: parameter.grad for name, parameter in held.items()}

    def whole_gradients(self, name: str) -> dict[str, Tensor | None]:
        self._rule.summed_gradients(name)
        gradients = self._holding.whole_gradients(self._trainers[name].order)
        self._rule.broadcast_result(CollectiveCall.WHOLE_GRADIENTS, gradients)
        return gradients

    def held(self) -> dict[str, Tensor]:
        return self._holding.held()

    def part_of(self, name: str) -> str:
        return self._holding.label(name)

    def shard_of(self, name: str, tensor: Tensor) -> Tensor | None:
        return self._holding.shards.part(name, tensor)

    def state_dict(self) -> dict[str, Tensor]:
        with self._rule.agreed():
            state = self._holding.state_dict()
            self._rule.broadcast_result(CollectiveCall.STATE_DICT, state)
        return state

    def save(self, path: Path) -> None:
        try:
            with self._rule.agreed():
                self._holding.save(path)
        finally:
            # Also where the file could not be written: the servers wait for the end of the call, not for the file.
            self._rule.broadcast_result(CollectiveCall.SAVE, None)

    # ---- telemetry ---------------------------------------------------------------------------------------------------

    def gather(self, make: Callable[[], Any]) -> list[Any]:
        """Every worker's plain value by rank, dedicated servers last; ``make`` gives this worker's."""
        return self._rule.gathered(make())

    def sent_bytes(self) -> dict[str, float]:
        """Mean bytes that this worker sent in a step, by purpose; see :meth:`polylane.runtime.job.Job.traffic`."""
        return self._traffic.means()

    def spans(self, steps: int) -> list[Span]:
        """What this worker did in its last ``steps`` steps, in seconds on the clock of rank 0."""
        return on_one_clock([*self._spans][-steps:], self._ahead)

    def stepping(self) -> list[Stepping]:
        trainer = next(iter(self._trainers.values()))
        elsewhere = self._rule.stepping()
        return [Stepping(trainer.optimizer, trainer.held, lambda: self._step)] if elsewhere is None else elsewhere

    @property
    def staleness(self) -> int:
        return self._rule.staleness

    @property
    def counters(self) -> tuple[Counters, ...]:
        own = (self._connections.transport, *self._connections.apart.values())
        return (*(transport.counters for transport in own), *self._rule.counters())

    def updates(self) -> tuple[tuple[Update, ...], ...]:
        return self._rule.updates()

    def close(self) -> None:
        """Wait for all messages of this worker, end its connections, and leave the other workers."""
        self._stale.close()
        self._reports.complete()
        self._rule.close()
        self._connections.close()
        self.world.leave()
