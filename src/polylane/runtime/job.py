"""Job: a training split over workers, from the user's side: steps, evaluation, batches and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import Rebuild, few, flatten, sampled_leaves, signature
from polylane.graph.partition import Partition
from polylane.program.program import Program
from polylane.runtime import clock, data, optimizer, weights
from polylane.runtime.buffers import Buffers
from polylane.runtime.connections import Connect, column_of, connected, replica_of
from polylane.runtime.division import Batch
from polylane.runtime.lane import Tensors, bind, programs_of
from polylane.runtime.materialize import materialize, on_meta
from polylane.runtime.optimizer import Clipper
from polylane.runtime.pieces import Pieces
from polylane.runtime.prepare import (
    Parameters,
    Prepared,
    named_parameters,
    recaptured,
)
from polylane.runtime.result import Report, StepResult, gathered
from polylane.runtime.transport import c10d
from polylane.runtime.wholes import Wholes
from polylane.runtime.worker import StepState, Worker
from polylane.runtime.world import World


@dataclass
class _Lane:
    """One graph, bound."""

    partition: Partition
    programs: tuple[Program, ...]
    worker: Worker


@dataclass
class _Trainer:
    """What belongs to one objective on this worker."""

    optimizer: torch.optim.Optimizer
    scheduler: Any
    held: dict[str, nn.Parameter]
    clipper: Clipper | None
    lanes: dict[Any, _Lane] = field(default_factory=dict)


class Job:
    """One worker's handle on a training that is split over all of them; every worker calls the same methods.

    Made by :func:`polylane.parallelize`.

    Attributes:
        plan: how the training is split.
        world: which worker this is.
        model: the user's model; after training, this worker's own part of it is up to date. For the whole see
            :meth:`state_dict`.
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
        connect: Connect = c10d.Transport,
    ) -> None:
        """Bind a prepared training to this worker; see :func:`polylane.parallelize` for the usual way.

        Args:
            prepared: the same on every worker.
            world: this worker among all.
            example: a batch, for its form.
            clip_norm: bound on the gradients' 2-norm over all parameters that the optimizer takes, or None.
            seed: of the order of samples and of all random numbers.
            same_weights: every worker's model has the same weights already (workers forked from one process do).
            connect: makes the transport.
        """
        self.plan, self.world, self.model = prepared.plan, world, prepared.model
        if world.size != self.plan.workers:
            raise PolylaneError(
                f"the plan takes {self.plan.workers} workers ({self.plan.spec}), there are {world.size}"
            )
        self._prepared, self._seed, self._step = prepared, seed, 0
        self._rebuild: Rebuild
        leaves, self._rebuild = flatten(example)
        self._sampled = sampled_leaves(leaves)
        self._signature = signature(leaves, self._sampled)
        self._compared = False
        self._tensors = Tensors(prepared.model, [o.loss for o in prepared.objectives.values()], world.device)
        self._stage, self._replica = self.plan.place(world.rank)
        self._holders = _holders(prepared)
        self._programs = {
            name: programs_of(partition, self.plan, self._holders, True, prepared.layouts_of(partition))
            for name, partition in prepared.partitions.items()
        }
        self._connections = connected(
            world,
            self.plan,
            self._programs.values(),
            _has_statistics(prepared),
            connect,
            [prepared.axes(stage) for stage in range(self.plan.pipeline)],
            any(layouts.together for layouts in prepared.layouts.values()),
        )
        self._transport = self._connections.transport
        self._ahead = clock.ahead_of_rank_0(self._transport) if world.size > 1 else 0.0
        self._pieces = Pieces(prepared, self._stage, self.plan.coordinates(world.rank))
        self._buffers = Buffers(
            self._stage,
            self.plan.pipeline,
            column_of(self.plan, world.rank),
            self.plan.uniform or self._replica == 0,
            self._tensors.buffers,
            world.device,
            self._transport,
            None if self.plan.uniform else self._pieces,
        )
        self._wholes = Wholes(prepared, world, self._tensors, self._pieces, self._transport, self._held_names())
        self._materialized = self._materialize()
        self._hold(same_weights or self._materialized)
        optimizers = {name: self._optimizer(name) for name in prepared.objectives}  # which see whole parameters
        self._tensors.keep(self._pieces.of(self.held()))
        for built in optimizers.values():
            self._pieces.cut_state(built, self._tensors.parameters())
        self._evaluations: dict[Any, _Lane] = {}
        self._trainers = {name: self._trainer(name, optimizers[name], clip_norm) for name in prepared.objectives}
        self._report: Report | None = None

    def _held_names(self) -> set[str]:
        names = {name for name, stages in self._holders.items() if self._stage in stages}
        for partition in self._prepared.partitions.values():
            names |= set(partition.buffers(self._stage))
        return names

    def _materialize(self) -> bool:
        """Give a model on the meta device its values, of which this worker keeps its part. Whether it was there."""
        if not on_meta(self.model):
            return False
        held = self._held_names()
        changed = {*self._holders, *(n for p in self._prepared.partitions.values() for n in p.graph.buffers)}

        def keep(name: str, whole: Tensor) -> Tensor | None:
            if name in changed and name not in held:
                return None  # another stage's
            return self._pieces.of({name: whole}).get(name, whole)

        materialize(self.model, self._prepared.init, self._seed, self.world.device, keep)
        return True

    def _hold(self, same_weights: bool) -> None:
        self._tensors.hold(self._held_names())
        if not same_weights and self.world.size > 1:
            every = {**self._tensors.parameters(), **self._tensors.buffers()}  # those of other stages too
            weights.same_everywhere(every, self._transport, self.world.device)

    def _optimized(self, name: str) -> tuple[list[str], dict[str, nn.Parameter]]:
        """All parameters that may get a gradient of an objective, in the model's order; and those held here."""
        graph = self._prepared.partitions[name].graph
        parameters, info = self._tensors.parameters(), graph.parameters
        used = {p for node in graph.nodes for p in node.parameters}
        order = [n for n in info if info[n].trainable and n in used]
        return order, {n: parameters[n] for n in order if self._stage in self._holders[n]}

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        held = list(self._optimized(name)[1].items())
        return optimizer.build(self._prepared.objectives[name], held, self._every_parameter())  # type: ignore[no-any-return]

    def _trainer(self, name: str, built: torch.optim.Optimizer, clip_norm: float | None) -> _Trainer:
        objective, partition = self._prepared.objectives[name], self._prepared.partitions[name]
        order, held = self._optimized(name)
        clipper = None
        if clip_norm is not None:
            reduced = {p for program in self._programs[name] for bucket in program.buckets for p in bucket.parameters}
            counts = self.plan.uniform or self._replica == 0  # else all replicas are summed over
            counted = [n for n in held if counts and n in reduced and self._stage == min(self._holders[n])]
            together = replica_of(self.plan, self.world.rank)
            clipper = Clipper(
                clip_norm,
                [n for n in order if n in reduced],
                [n for n in counted if self._pieces.counts("parameter", n)],
                held,
                self.world.device,
                lambda v: self._transport.all_reduce(v, together).wait(),
            )
        scheduler = objective.scheduler(built) if objective.scheduler is not None else None
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise PolylaneError(
                "scheduler(optimizer): ReduceLROnPlateau steps on a metric, not on steps: leave it out here, make it "
                "of job.optimizer, and step it after each evaluation"
            )
        trainer = _Trainer(built, scheduler, held, clipper)
        trainer.lanes[self._signature] = self.lane(partition, self._programs[name])
        return trainer

    def _every_parameter(self) -> Parameters:
        return named_parameters(self.model, self._tensors.losses)

    def lane(self, partition: Partition, programs: tuple[Program, ...]) -> _Lane:
        """A partition of one of the model's graphs, with every worker's program, bound to this worker's tensors."""
        self._tensors.hold({*partition.parameters(self._stage), *partition.buffers(self._stage)})
        layouts = self._prepared.layouts_of(partition)
        if layouts.distinct and len(set(self._transport.all_gather_object(layouts.digest))) > 1:
            raise PolylaneError(
                "workers chose different splits of the operators: are their models, batches and library versions the "
                "same? A plan file may fix placements"
            )
        worker = bind(
            programs[self.world.rank],
            self.plan,
            self._tensors,
            self._transport,
            self._connections.statistics,
            self._connections.mesh,
            layouts,
            self._prepared.orders_of(partition),
        )
        return _Lane(partition, programs, worker)

    # ---- training ----------------------------------------------------------------------------------------------------

    def step(self, batch: Any, objective: str | None = None) -> StepResult:
        """One optimizer step on one batch: forward, backward, reduction, clipping, optimizer, scheduler.

        Args:
            batch: from :meth:`batches`; or a whole batch, the same on every worker, of which each takes its own
            samples.
            objective: which of several losses; default: the first.

        Raises:
            ActionFailed: from what an operator raised, saying where.
            PolylaneError: an unknown objective.
        """
        name = self._objective(objective)
        trainer = self._trainers[name]
        own = self._own(batch)
        lane = self._lane_for(trainer.lanes, name, own, training=True)
        if self._report is not None:
            self._report.complete()  # at most one step's report is under way
        self._zero_grad(trainer)
        self._buffers.fetch(lane.partition)
        state = lane.worker.run(own, self._step, self._seed, lambda state: self._finish(trainer, lane, own, state))
        self._buffers.written(lane.partition)
        self._report = gathered(lane.programs, state, self._ahead, self._transport, self.world.device)
        self._step += 1
        return StepResult(self._step - 1, own.samples, self._report)

    def _own(self, batch: Any) -> Batch:
        """A batch as this worker has it, on its device."""
        own: Batch = batch if isinstance(batch, Batch) else Batch.whole(batch)
        if not isinstance(batch, Batch):
            self._refuse_different(own)
        if own.samples == 0:
            raise PolylaneError("the batch has no samples")
        return own.as_in(self._sampled, self.world.device)

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

    def _zero_grad(self, trainer: _Trainer) -> None:
        for parameter in trainer.held.values():
            parameter.grad = None

    def _finish(self, trainer: _Trainer, lane: _Lane, batch: Batch, state: StepState) -> None:
        if not lane.partition.graph.mean:
            self._rescale(trainer, batch, state)
        if trainer.clipper is not None:
            trainer.clipper.clip()
        trainer.optimizer.step()
        if trainer.scheduler is not None:
            trainer.scheduler.step()

    def _rescale(self, trainer: _Trainer, batch: Batch, state: StepState) -> None:
        """Gradients were taken of total / samples; the mean is total / count, and the count is known only now."""
        count = self._summed(state)[1]
        grads = [p.grad for p in trainer.held.values() if p.grad is not None]
        if grads and count:
            torch._foreach_mul_(grads, batch.samples / count)

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
        lane = self._lane_for(self._evaluations, name, own, training=False)
        self._buffers.fetch(lane.partition)
        with torch.no_grad():
            state = lane.worker.run(own, 0, self._seed, lambda state: None)
        return self._summed(state)

    def _summed(self, state: StepState) -> tuple[float, float]:
        """The loss over all workers, as (total, count)."""
        sums = torch.tensor(state.sums(), dtype=torch.float64, device=self.world.device)
        total, count = self._transport.all_reduce(sums, range(self.world.size)).wait().tolist()
        return total, count

    def _lane_for(self, lanes: dict[Any, _Lane], name: str, batch: Batch, training: bool) -> _Lane:
        """The lane for batches of this form, captured when the first such batch comes."""
        form = signature(batch.leaves, batch.sampled)
        key = form if training else (name, form)
        if key not in lanes:
            ahead = self._prepared.evaluations.get(name) if not training and form == self._signature else None
            partition = ahead or self._captured(name, batch, training)
            self._refuse_moved(partition)
            layouts = self._prepared.layouts_of(partition)
            lanes[key] = self.lane(partition, programs_of(partition, self.plan, self._holders, training, layouts))
        return lanes[key]

    def _captured(self, name: str, batch: Batch, training: bool) -> Partition:
        prepared, example = self._prepared, self._rebuild(few(batch.leaves, 4, batch.sampled))
        main = prepared.partitions[name]
        with self._wholes.in_model(self._materialized):
            partition = recaptured(self.model, prepared.objectives[name], main, example, training, prepared.in_float64)
            prepared.look_at(partition, name, example)
        return partition

    def _refuse_moved(self, partition: Partition) -> None:
        for stage in range(self.plan.pipeline):
            for name in partition.parameters(stage):
                if name in self._holders and stage not in self._holders[name]:
                    raise PolylaneError(
                        f"for batches of this form stage {stage} needs {name}, which stage {min(self._holders[name])} "
                        "holds: give an example batch of the form that training has"
                    )

    # ---- data and weights --------------------------------------------------------------------------------------------

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int = 1,
        *,
        shuffle: bool = True,
        collate: data.Collate | None = None,
        workers: int = 0,
        first_epoch: int = 0,
    ) -> Iterator[Batch]:
        """Batches of a dataset, in an order that depends on the job's seed and the epoch alone.

        Every sample comes once an epoch, the last batch has what is left. Each worker loads only the samples that it
        computes on.

        Args:
            dataset: map-style, iterable, or a list of samples.
            batch_size: samples in a batch, over all workers.
            epochs: how many times through it.
            shuffle: in a new order each epoch (iterable datasets keep their own).
            collate: samples -> batch, default torch's.
            workers: processes that load ahead.
            first_epoch: number of the first epoch, for the order.

        Raises:
            PolylaneError: the batch is smaller than the number of microbatches.
        """
        if batch_size < self.plan.microbatches:
            raise PolylaneError(f"a batch of {batch_size} cannot be divided into {self.plan.microbatches} microbatches")
        worker = next(iter(next(iter(self._trainers.values())).lanes.values())).worker
        for epoch in range(first_epoch, first_epoch + epochs):
            yield from data.batches(
                dataset,
                batch_size,
                shares=worker.shares,
                epoch=epoch,
                seed=self._seed,
                shuffle=shuffle,
                collate=collate,
                workers=workers,
            )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first objective's optimizer, over the parameters that this worker holds."""
        return next(iter(self._trainers.values())).optimizer

    def optimizer_of(self, objective: str) -> torch.optim.Optimizer:
        """The optimizer of one of several objectives."""
        return self._trainers[self._objective(objective)].optimizer

    def gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Gradients of the last step, of the parameters that this worker holds, after reduction and clipping.

        Where operators are split, a gradient is that of this worker's part; see :meth:`whole_gradients`.
        """
        held = self._trainers[self._objective(objective)].held
        return {name: parameter.grad for name, parameter in held.items()}

    def whole_gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """As :meth:`gradients`, put together from all parts; all workers must call it."""
        own = self.gradients(objective)
        return {
            name: None if grad is None else self._wholes.whole("parameter", name, grad) for name, grad in own.items()
        }

    def held(self) -> dict[str, Tensor]:
        """The parameters and buffers that this worker keeps up to date, by the model's own names.

        Where operators are split, what it holds may be a part.
        """
        names = self._held_names()
        every = {**self._tensors.parameters(), **self._tensors.buffers()}
        return {name: tensor for name, tensor in every.items() if name in names}

    def part_of(self, name: str) -> str:
        """Which part of a parameter or buffer this worker holds, in words that are equal for equal parts."""
        return self._pieces.label(name)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's weights and buffers, with its own names, on every worker's CPU; all must call it."""
        return self._wholes.state_dict(self._holders, self._buffers.owner)

    def save(self, path: str | Path) -> None:
        """Write the whole model's weights as safetensors, loadable into the plain model; all workers must call it."""
        state = self.state_dict()
        if self.world.rank == 0:
            weights.save(state, Path(path))
        self._transport.barrier()

    def close(self) -> None:
        """Wait for all messages and leave the other workers, if this job joined them."""
        if self._report is not None:
            self._report.complete()
        self._connections.close()
        self.world.leave()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()


def _has_statistics(prepared: Prepared) -> bool:
    return any(partition.graph.code.batch_statistics for partition in prepared.partitions.values())


def _holders(prepared: Prepared) -> dict[str, tuple[int, ...]]:
    """Stages that use a parameter in any objective: all of them keep it up to date."""
    result: dict[str, set[int]] = {}
    for partition in prepared.partitions.values():
        for stage in range(partition.stages):
            for name in partition.parameters(stage):
                result.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in result.items()}
