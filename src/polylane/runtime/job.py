"""Job: the user's handle on a training that is split over workers. Its work is done by the role of its worker.

A worker that computes a part of the model has the training role; a worker that a plan dedicates to parameter servers
has the serving role. One script runs on both: it calls the same methods on every worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polylane.compile.batch_split import Batch
from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.observe.timeline import Timeline
from polylane.runtime.data import loader as data
from polylane.runtime.pipeline.anomalies import AnomalyDetector
from polylane.runtime.pipeline.connections import Connect, check_world_size
from polylane.runtime.pipeline.step_result import StepResult, merge_timelines
from polylane.runtime.server_role import ServingRole
from polylane.runtime.sync.gradient_sync import LocalOptimizer
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate
from polylane.runtime.training_role import TrainingRole
from polylane.runtime.transport.protocol import TransportCounters
from polylane.runtime.workers.close_at_exit import close_at_exit
from polylane.runtime.workers.world import World


class Job:
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
        prepared: CompiledTraining,
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
        check_world_size(prepared.plan, world)
        self.plan, self.model = prepared.plan, prepared.model
        self._objectives, self._is_closed = tuple(prepared.partitions), False
        self.anomalies: AnomalyDetector | None = None
        self._role: TrainingRole | ServingRole
        if world.rank < prepared.plan.workers:
            self._role = TrainingRole(
                prepared,
                world,
                example=example,
                clip_norm=clip_norm,
                seed=seed,
                same_weights=same_weights,
                connect=connect,
            )
        else:
            self._role = ServingRole(prepared, world, clip_norm)
        self.world = self._role.world
        if self.plan.sync.has_servers:
            close_at_exit(self)

    def _resolve_objective(self, name: str | None) -> str:
        if name is None:
            return self._objectives[0]
        if name not in self._objectives:
            raise PolylaneError(f"there is no objective {name!r}, known are {', '.join(self._objectives)}")
        return name

    # ---- training ----------------------------------------------------------------------------------------------------

    @property
    def slack(self) -> int:
        """Most steps that this worker may have under way: the loss of an earlier step is there without a wait."""
        return self._role.slack

    def step(self, batch: Any, objective: str | None = None) -> StepResult:
        """One optimizer step on one batch: forward, backward, reduction, clipping, optimizer, scheduler.

        A dedicated parameter server returns at once, with a loss of nan.

        Args:
            batch: from :meth:`batches`; or a whole batch, the same on every worker, of which each takes its own
            samples.
            objective: which of several losses; default: the first.

        Raises:
            ActionFailed: from what an operator raised, saying where.
            PolylaneError: an unknown objective; or a batch with fewer samples than the model needs in training, be it a
            later one of the same epoch.
        """
        return self._role.step(batch, self._resolve_objective(objective), self.anomalies)

    def evaluate(self, batch: Any, objective: str | None = None) -> float:
        """The loss of a batch in evaluation mode, forward only, through the same stages. Changes nothing."""
        total, count = self.evaluate_sums(batch, objective)
        return total / count if count else float("nan")

    def evaluate_sums(self, batch: Any, objective: str | None = None) -> tuple[float, float]:
        """As :meth:`evaluate`, the loss as (total, count): to add up over a data set."""
        return self._role.evaluate_sums(batch, self._resolve_objective(objective))

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
            yield from self._role.epoch(
                dataset, batch_size, epoch, shuffle=shuffle, drop_last=drop_last, collate=collate, workers=workers
            )

    # ---- weights and gradients ---------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first objective's optimizer, over the parameters that this worker holds."""
        return self._role.optimizer_of(self._resolve_objective(None))

    def optimizer_of(self, objective: str) -> torch.optim.Optimizer:
        """The optimizer of one of several objectives."""
        return self._role.optimizer_of(self._resolve_objective(objective))

    def gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Gradients of the last step, of the parameters that this worker holds, after reduction and clipping.

        Where operators are split, or replicas hold parts, a gradient is that of this worker's part; see
        :meth:`whole_gradients`. Where each replica's gradients make an update of their own, they are those of this
        worker's replica.
        """
        return self._role.gradients(self._resolve_objective(objective))

    def whole_gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Gradients of the last step, of all parameters that the objective trains; all workers must call it.

        They are whole, after reduction and clipping, by the model's own names and in its order, on every worker's CPU:
        what ``parameter.grad`` is on one device. None where a parameter got no gradient.
        """
        return self._role.whole_gradients(self._resolve_objective(objective))

    def held(self) -> dict[str, Tensor]:
        """The parameters and buffers that this worker keeps up to date, by the model's own names.

        Where operators are split, or replicas hold parts, what it holds may be a part. A dedicated parameter server
        holds whole parameters.
        """
        return self._role.held()

    def part_of(self, name: str) -> str:
        """Which part of a parameter or buffer this worker holds, in words that are equal for equal parts."""
        return self._role.part_of(name)

    def shard_of(self, name: str, tensor: Tensor) -> Tensor | None:
        """The part of a tensor in a parameter's shape that goes with :meth:`gradients`; None where it has none of it.

        Args:
            name: canonical name of the parameter.
            tensor: in the shape that this worker's operators have.
        """
        return self._role.shard_of(name, tensor)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's weights and buffers, with its own names, on every worker's CPU; all must call it.

        Where replicas differ, the weights that they agree on: their mean.
        """
        return self._role.state_dict()

    def save(self, path: str | Path) -> None:
        """Write the whole model's weights as safetensors, loadable into the plain model; all workers must call it.

        A file that is there is replaced once the new one is whole.

        Raises:
            NotFinite: on every worker alike, where a weight is NaN or infinite; a file that is there stays.
            PolylaneError: on rank 0, where the file cannot be written.
        """
        self._role.save(Path(path))

    # ---- telemetry ---------------------------------------------------------------------------------------------------

    def stepping(self) -> list[LocalOptimizer]:
        """The first objective's optimizers that step in this process: this worker's, or those of parameter servers."""
        return self._role.stepping()

    @property
    def staleness(self) -> int:
        """Of this worker's last step, updates by others between reading the weights and its own (parameter servers)."""
        return self._role.staleness

    @property
    def apart(self) -> bool:
        """Whether replicas go at their own pace: each worker knows the losses of its own replica only."""
        return self.plan.sync.has_servers and self.plan.sync.is_replica_local

    @property
    def counters(self) -> tuple[TransportCounters, ...]:
        """Of every transport of this process: what was handed over, and what left, since the job was made."""
        return self._role.counters

    def updates(self) -> tuple[tuple[ServerUpdate, ...], ...]:
        """What every parameter server did, update by update, in its order; all workers must call it."""
        return self._role.updates()

    def gathered(self, value: Any) -> list[Any]:
        """Every worker's value, by rank; all must call it.

        Args:
            value: plain: numbers, text, tensors, None, and lists, tuples, sets, dicts of these.
        """
        return self._role.gather(lambda: value)

    def traffic(self) -> list[dict[str, float]]:
        """Bytes that every worker sent in a step, the mean over all steps; all workers must call it.

        Of each worker, by rank: for ``"agreement"`` between replicas (gradients, weights), values between
        ``"stages"``, inside split ``"operators"``, ``"statistics"`` of batches; and as ``"theory"`` what the closed
        forms of :mod:`polylane.cost.network.sync_volume` give for agreement. Counted where tensors leave, without
        headers.
        """
        return self._role.gather(self._role.sent_bytes)

    def timeline(self, steps: int = 1) -> Timeline:
        """What every worker did in its last steps, on one clock; all must call it.

        Unlike :attr:`StepResult.timeline` it shows replicas beside each other that go at their own pace, and the
        updates that dedicated parameter servers made meanwhile.

        Args:
            steps: how many; the last :data:`polylane.runtime.pipeline.step_result.STEPS_KEPT` are there.
        """
        return merge_timelines(self._role.gather(lambda: self._role.spans(steps)), self.plan.workers)

    def close(self) -> None:
        """Wait for all messages and leave the other workers, if this job joined them. Once is enough."""
        if self._is_closed:
            return
        self._is_closed = True
        self._role.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
