"""Job: a training split over workers, from the user's side: steps, evaluation, batches and weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.observe.timeline import Span
from polylane.program.program import Program
from polylane.runtime import allocator, clock, data, weights
from polylane.runtime.accounts import Accounts
from polylane.runtime.binding import Binding, Lane
from polylane.runtime.compile_cache import CompileCache
from polylane.runtime.connections import Connect, check_size, connected, replica_of
from polylane.runtime.division import Batch, Share, shares
from polylane.runtime.finite import Anomalies
from polylane.runtime.holding import Holding, holders_of, layout_of
from polylane.runtime.lane import lower_ahead
from polylane.runtime.leaving import close_at_exit
from polylane.runtime.prepare import Prepared
from polylane.runtime.result import STEPS_KEPT, Reports, StepResult, gathered
from polylane.runtime.stale import own_calls, stale_of
from polylane.runtime.sync.choose import rule_of
from polylane.runtime.traffic_of import traffic_of
from polylane.runtime.trainer import trainers_of
from polylane.runtime.worker import StepState
from polylane.runtime.world import World


class Job(Accounts):
    """One worker's handle on a training that is split over all of them; every worker calls the same methods.

    Made by :func:`polylane.parallelize`.

    Attributes:
        plan: how the training is split.
        world: which worker this is.
        model: the user's model, of which this worker's own part is up to date. Where that is not all of it a call of
            the model is refused, until the whole weights of :meth:`state_dict` are loaded into it.
        anomalies: looks at the forward passes of this worker, for where a value stops being finite; None: nobody does.
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
        """Bind a prepared training to this worker; see :func:`polylane.parallelize` for the usual way.

        Args:
            prepared: the same on every worker.
            world: this worker among all.
            example: a batch, for its form.
            clip_norm: bound on the gradients' 2-norm over all parameters that the optimizer takes, or None.
            seed: of the order of samples and of all random numbers.
            same_weights: every worker's model has the same weights already (workers forked from one process do).
            connect: makes the transports; default: what suits where the workers are (shared memory on one host).
        """
        check_size(prepared.plan, world)
        if world.device.type == "cpu":
            allocator.keep_freed()
        everyone, world = world, world.first(prepared.plan.workers)
        self.plan, self.world, self.model = prepared.plan, world, prepared.model
        self._prepared, self._seed, self._step = prepared, seed, 0
        self._compared = self._left = False
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
        self.anomalies: Anomalies | None = None
        self._traffic = traffic_of(self._connections, self._rule, self._holding, self._programs)
        if self.plan.sync.serves:
            close_at_exit(self)

    @property
    def slack(self) -> int:
        """By how many steps workers may be apart: the loss of an earlier one is there without a wait."""
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

    def step(self, batch: Any, objective: str | None = None) -> StepResult:
        """One optimizer step on one batch: forward, backward, reduction, clipping, optimizer, scheduler.

        Args:
            batch: from :meth:`batches`; or a whole batch, the same on every worker, of which each takes its own
            samples.
            objective: which of several losses; default: the first.

        Raises:
            ActionFailed: from what an operator raised, saying where.
            PolylaneError: an unknown objective; or a batch with fewer samples than the model needs in training, be it a
            later one of the same epoch.
        """
        name = self._objective(objective)
        trainer = self._trainers[name]
        own = self._own(batch)
        self._refuse_short(own)
        with own_calls(), self._rule.watch():
            lane = self._cache.compiled_for(name, own, replica_local=self._rule.alone(name))
            self._reports.make_room(self._rule.slack)
            trainer.zero_grad()
            if lane.buffers:
                self._holding.buffers.fetch(lane.buffers)
            lane.worker.anomalies = self.anomalies
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

    def _objective(self, name: str | None) -> str:
        if name is None:
            return next(iter(self._trainers))
        if name not in self._trainers:
            raise PolylaneError(f"there is no objective {name!r}, known are {', '.join(self._trainers)}")
        return name

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Any, objective: str | None = None) -> float:
        """The loss of a batch in evaluation mode, forward only, through the same stages. Changes nothing."""
        total, count = self.evaluate_sums(batch, objective)
        return total / count if count else float("nan")

    def evaluate_sums(self, batch: Any, objective: str | None = None) -> tuple[float, float]:
        """As :meth:`evaluate`, the loss as (total, count): to add up over a data set."""
        name = self._objective(objective)
        own = self._own(batch)
        with own_calls():
            lane = self._cache.compiled_for(name, own, training=False)
        self._holding.buffers.fetch(lane.buffers)
        with torch.no_grad(), own_calls(), self._rule.agreed(), self._binding.kept(lane.partition):
            state = lane.worker.run(own, 0, self._seed, lambda state: None)
        sums: tuple[float, float] = self._rule.told("evaluate", self._summed(state, range(self.world.size)))
        return sums

    def _summed(self, state: StepState, ranks: Sequence[int]) -> tuple[float, float]:
        """The loss over some workers, as (total, count)."""
        sums = torch.tensor(state.sums(), dtype=torch.float64, device=self.world.device)
        total, count = self._transport.all_reduce(sums, ranks).wait().tolist()
        return total, count

    # ---- data and weights --------------------------------------------------------------------------------------------

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: data.Collate | None = None,
        workers: int = 0,
        first_epoch: int = 0,
    ) -> Iterator[Batch]:
        """Batches of a dataset, in an order that depends on the job's seed and the epoch alone.

        Every sample comes once an epoch, the last batch has what is left. Each worker loads only the samples that it
        computes on. What the model cannot be trained on (of a single sample BatchNorm has no variance) :meth:`step`
        refuses with the first batch, where the dataset has a length.

        Args:
            dataset: map-style, iterable, or a list of samples.
            batch_size: samples in a batch, over all workers.
            epochs: how many times through it.
            shuffle: in a new order each epoch (iterable datasets keep their own).
            drop_last: leave out a last batch that is shorter than the others.
            collate: samples -> batch, default torch's.
            workers: processes that load ahead.
            first_epoch: number of the first epoch, for the order.

        Raises:
            PolylaneError: the batch is smaller than the number of microbatches, or the dataset has no samples, or too
            few for a single batch with ``drop_last``.
        """
        if batch_size < self.plan.microbatches:
            raise PolylaneError(f"a batch of {batch_size} cannot be divided into {self.plan.microbatches} microbatches")
        for epoch in range(first_epoch, first_epoch + epochs):
            yield from self._epoch(
                dataset, batch_size, epoch, shuffle=shuffle, drop_last=drop_last, collate=collate, workers=workers
            )

    def _epoch(self, dataset: Any, batch_size: int, epoch: int, *, drop_last: bool, **how: Any) -> Iterator[Batch]:
        """The batches of one epoch, with this worker's samples; ``how`` they are loaded: see :meth:`batches`."""
        return data.batches(
            dataset, batch_size, shares=self._shares, epoch=epoch, seed=self._seed, drop_last=drop_last, **how
        )

    def _shares(self, samples: int) -> tuple[Share, ...]:
        """What this worker computes of a batch of so many samples."""
        program = next(iter(self._programs.values()))[self.world.rank]
        return shares(samples, self._prepared.microbatches_of(samples), len(program.replicas), program.replica)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first objective's optimizer, over the parameters that this worker holds."""
        return next(iter(self._trainers.values())).optimizer

    def optimizer_of(self, objective: str) -> torch.optim.Optimizer:
        """The optimizer of one of several objectives."""
        return self._trainers[self._objective(objective)].optimizer

    def gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Gradients of the last step, of the parameters that this worker holds, after reduction and clipping.

        Where operators are split, or replicas hold parts, a gradient is that of this worker's part; see
        :meth:`whole_gradients`. Where each replica's gradients make an update of their own, they are those of this
        worker's replica.
        """
        name = self._objective(objective)
        self._rule.summed_gradients(name)
        held = self._trainers[name].held
        return {name: parameter.grad for name, parameter in held.items()}

    def whole_gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Gradients of the last step, of all parameters that the objective trains; all workers must call it.

        They are whole, after reduction and clipping, by the model's own names and in its order, on every worker's CPU:
        what ``parameter.grad`` is on one device. None where a parameter got no gradient.
        """
        name = self._objective(objective)
        self._rule.summed_gradients(name)
        found = self._holding.whole_gradients(self._trainers[name].order)
        gradients: dict[str, Tensor | None] = self._rule.told("whole_gradients", found)
        return gradients

    def held(self) -> dict[str, Tensor]:
        """The parameters and buffers that this worker keeps up to date, by the model's own names.

        Where operators are split, or replicas hold parts, what it holds may be a part.
        """
        return self._holding.held()

    def part_of(self, name: str) -> str:
        """Which part of a parameter or buffer this worker holds, in words that are equal for equal parts."""
        return self._holding.label(name)

    def shard_of(self, name: str, tensor: Tensor) -> Tensor | None:
        """The part of a tensor in a parameter's shape that goes with :meth:`gradients`; None where it has none of it.

        Args:
            name: of the parameter.
            tensor: in the shape that this worker's operators have.
        """
        return self._holding.shards.part(name, tensor)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's weights and buffers, with its own names, on every worker's CPU; all must call it.

        Where replicas differ, the weights that they agree on: their mean.
        """
        with self._rule.agreed():
            state: dict[str, Tensor] = self._rule.told("state_dict", self._holding.state_dict())
        return state

    def save(self, path: str | Path) -> None:
        """Write the whole model's weights as safetensors, loadable into the plain model; all workers must call it.

        A file that is there is replaced once the new one is whole.

        Raises:
            NotFinite: on every worker alike, where a weight is NaN or infinite; a file that is there stays.
            PolylaneError: on rank 0, where the file cannot be written.
        """
        try:
            with self._rule.agreed():
                self._holding.save(Path(path))
        finally:
            self._rule.told("save", None)

    def close(self) -> None:
        """Wait for all messages and leave the other workers, if this job joined them. Once is enough."""
        if self._left:
            return
        self._left = True
        self._stale.close()
        self._reports.complete()
        self._rule.close()
        self._connections.close()
        self.world.leave()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
