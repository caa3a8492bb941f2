"""Job: the user's handle on a distributed training. Its methods are those of the worker's role.

A worker that computes a part of the model has the training role; a worker that a plan dedicates to parameter servers
has the serving role. The same script runs on both (SPMD): it calls the same methods on every worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.sample_shares import Batch
from polylane.errors import PolylaneError, format_plural
from polylane.observe.swimlane.notebook_cell import draw_facts
from polylane.runtime.checkpoint.job_checkpoints import JobCheckpoints
from polylane.runtime.checkpoint.resumed_choices import describe_choices
from polylane.runtime.checkpoint.save import CheckpointSaver, Position
from polylane.runtime.connections.connections import Connect
from polylane.runtime.data import loader as data
from polylane.runtime.data.sample_order import SamplerFactory
from polylane.runtime.data.stream_state import StreamState
from polylane.runtime.evaluation.job_evaluations import JobEvaluations
from polylane.runtime.parameters.job_weights import JobWeights
from polylane.runtime.pipeline.anomalies import AnomalyDetector
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.server_role import ServingRole
from polylane.runtime.start_line import describe_training
from polylane.runtime.step_audit import StepAudit
from polylane.runtime.step_result import StepResult
from polylane.runtime.telemetry.job_telemetry import JobTelemetry
from polylane.runtime.training_role import TrainingRole
from polylane.runtime.workers.close_at_exit import CloseAtExit
from polylane.runtime.workers.world import World

# Names that were methods of Job, and are of its worker's role alone.
_OF_WORKER = frozenset(("slack", "part_of", "shard_of", "stepping", "staleness", "counters", "updates", "held"))


class Job(JobWeights, JobEvaluations, JobCheckpoints, JobTelemetry):
    """One worker's part of a distributed training.

    A method that is said to be *collective* must be called by every worker, and by all in the same order; if some call
    another one, all raise ``polylane.errors.CallsDiffer``, which names the lines of the script.

    Attributes:
        plan: the plan that the training was compiled for.
        world: this worker's rank, device and backend.
        model: your model. Only the part that this worker holds is up to date: if that is not all of it, calling the
            model or reading the rest raises an error outside of ``whole_model``. Writing is allowed if every
            worker writes the same values.
        anomalies: detector of non-finite values in this worker's forward passes, or None.
        audit: repeats some steps with your own code and compares the results, or None.

    Examples:
        The examples of the methods go on with this job:

        >>> import torch, polylane
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> def loss(model, batch):
        ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> def metrics(model, batch):
        ...     return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}
        >>> x = torch.randn(64, 8)
        >>> dataset = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
        >>> example = next(iter(torch.utils.data.DataLoader(dataset, batch_size=16)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> job = polylane.parallelize(model, loss, optimizer, example=example, metrics=metrics, audit="off")
        >>> job
        <Job: 1 worker on cpu, data=1,pipeline=1,schedule=1f1b,microbatches=1, rank 0, step 0>
    """

    training_role: ClassVar[type[TrainingRole]] = TrainingRole
    model: nn.Module

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
        """Bind a compiled training to this worker; see :func:`polylane.parallelize` for the usual way.

        Args:
            prepared: the compiled training, the same on every worker.
            world: this worker's rank, device and backend.
            example: an example batch, for its form.
            clip_norm: bound on the gradients' 2-norm over all parameters that the optimizer takes, or None.
            seed: seed for the order of samples and for all random numbers.
            same_weights: every worker's model has the same weights already (workers forked from one process do).
            connect: makes the transports; default: chosen by where the workers are (shared memory on one host).

        Raises:
            PolylaneError: the world has more or fewer workers than the plan takes.
        """
        if world.size != prepared.plan.processes:
            workers = format_plural(prepared.plan.processes, "worker")
            raise PolylaneError(f"the plan takes {workers} ({prepared.plan.spec}), there are {world.size}")
        self.plan, self.model = prepared.plan, prepared.model
        self._objectives, self._is_closed = tuple(prepared.partitions), False
        self.anomalies: AnomalyDetector | None = None
        self.audit: StepAudit | None = None
        self._position, self._choices = Position(), describe_choices(prepared, clip_norm)
        self._savers, self._stream = dict[Path, CheckpointSaver](), StreamState()
        self._offered: tuple[Batch | None, Position, StreamState] = None, self._position, self._stream
        self._role: TrainingRole | ServingRole
        # Dedicated servers have the ranks behind those that train.
        if world.rank < prepared.plan.workers:
            self._role = self.training_role(prepared, world, example, clip_norm, seed, same_weights, connect)
        else:
            self._role = ServingRole(prepared, world, clip_norm)
        self._rank, self.world = world.rank, self._role.world
        has_servers = self.plan.sync.has_servers
        self._at_exit = CloseAtExit(self.close, has_servers) if has_servers or self.world.is_ordered else None

    def _resolve_objective(self, name: str | None) -> str:
        if name is not None and name not in self._objectives:
            raise PolylaneError(f"there is no objective {name!r}, known are {', '.join(self._objectives)}")
        return self._objectives[0] if name is None else name

    def __repr__(self) -> str:
        return f"<Job: {describe_training(self.plan, self.world)}, rank {self._rank}, step {self.position.step}>"

    def _repr_html_(self) -> str:
        """Return this worker's facts for a notebook's cell; no other worker takes part."""
        return draw_facts("Job", {"plan": self.plan.spec, "rank": self._rank, "step": self.position.step})

    # ---- training ----------------------------------------------------------------------------------------------------

    @collective("job.step")
    def step(self, batch: Any, objective: str | None = None) -> StepResult:
        """Make one optimizer step on a batch: forward, backward, reduction, clipping, optimizer, scheduler; collective.

        On a dedicated parameter server, returns at once with a loss of nan.

        Args:
            batch: a batch of ``batches``, or the same whole batch on every worker, which computes on its samples.
            objective: name of the loss, if there are several. Default: the first.

        Returns:
            Loss and spans of the step. Reading the loss waits for the slowest worker, so read it some steps later.

        Raises:
            ActionFailed: an operator raised an error, which is the cause; the message says where.
            OutOfMemory: the worker ran out of memory.
            PolylaneError: unknown objective; or this batch, or a later one of its epoch, is too small for the model.

        Examples:
            >>> batch = next(job.batches(dataset, batch_size=16))
            >>> result = job.step(batch)
            >>> f"{result.loss:.1f}"
            '1.1'
        """
        name = self._resolve_objective(objective)
        position, stream = self._offered[1:] if batch is self._offered[0] else (self._position, self._stream)
        if self.audit is not None:
            of_dataset = batch.loaded_samples if isinstance(batch, Batch) and batch is self._offered[0] else 0
            self.audit.before_step(batch, name, position.epoch, position.samples - of_dataset)
        result = self._role.step(batch, name, self.anomalies)
        if self.audit is not None:
            self.audit.after_step(result)
        self._position, self._stream = Position(self._position.step + 1, position.epoch, position.samples), stream
        return result

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int = 1,
        *,
        shuffle: bool = True,
        sampler: SamplerFactory | None = None,
        drop_last: bool = False,
        collate: data.Collate | None = None,
        workers: int = 0,
        prefetch: int | None = None,
        first_epoch: int = 0,
        start: Position | None = None,
    ) -> Iterator[Batch]:
        """Yield the batches of a dataset, in an order that depends only on the job's seed and the epoch.

        An epoch has every sample once; its last batch may be smaller. A worker loads only the samples that it computes
        on, or whole batches if some tensor of the example does not have one row per sample. If the dataset has a length
        and a batch of the epoch is too small for the model, ``step`` raises an error at the first one.

        Args:
            dataset: map-style or iterable dataset, or a list of samples.
            batch_size: number of samples in a batch, over all workers.
            epochs: number of passes over the dataset.
            shuffle: reshuffle a map-style dataset in each epoch; iterable datasets keep their order.
            sampler: function from the dataset to a sampler (such as torch's WeightedRandomSampler), or any series of
                indices, in place of ``shuffle``. It is called in each epoch, with generators seeded by seed and epoch.
            drop_last: drop the last batch of an epoch if it is incomplete.
            collate: merges a list of samples into a batch. Default: torch's ``default_collate``.
            workers: number of processes that load ahead.
            prefetch: number of batches that each of them loads ahead. Default: torch's.
            first_epoch: number of the first epoch, which determines the order.
            start: where to begin, such as ``position`` after ``load_checkpoint``: earlier batches are passed
                over; only those of an iterable dataset without ``state_dict``, ``load_state_dict`` are read for that.

        Yields:
            This worker's part of each batch, for ``step`` and ``evaluate``.

        Raises:
            PolylaneError: the batch is smaller than the number of microbatches, or the dataset has no samples, or too
                few for a single batch with ``drop_last``.

        Examples:
            >>> for batch in job.batches(dataset, batch_size=16, epochs=10):
            ...     result = job.step(batch)
            >>> result.step
            40
        """
        if batch_size < self.plan.microbatches:
            raise PolylaneError(f"a batch of {batch_size} cannot be divided into {self.plan.microbatches} microbatches")
        start, stream = start or Position(), self._stream.for_other_batches()
        extra = dict[str, Any](shuffle=shuffle, sampler=sampler, drop_last=drop_last, collate=collate, state=stream)
        extra |= {"workers": workers, "prefetch": prefetch}
        for epoch in range(begin := max(first_epoch, start.epoch), first_epoch + epochs):
            count, extra["resumed"] = start.samples if epoch == start.epoch else 0, bool(start.step) and epoch == begin
            for batch in self.world.progress.loading(self._role.epoch(dataset, batch_size, epoch, skip=count, **extra)):
                count += batch.loaded_samples
                self._offered = batch, Position(0, epoch, count), stream
                yield batch

    @property
    def worker(self) -> TrainingRole | ServingRole:
        """The role of this worker, used by polylane's own commands. Not part of the public interface."""
        return self._role

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_WORKER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"Job.{name} is Job.worker.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(self._role, name)

    def settle_audit(self) -> None:
        """Wait for the result of the last audit; collective.

        Raises:
            PolylaneError: on all workers, if the audited step differs from that of one device.

        Examples:
            >>> job.settle_audit()
        """
        if self.audit is not None:
            self.audit.settle()

    @collective("job.close")
    def close(self) -> None:
        """Finish communication and checkpoints, and leave the process group if this job joined it; collective.

        Examples:
            A job is a context manager, too: ``with polylane.parallelize(...) as job:`` closes it at the end.

            Raises:
                PolylaneError: on all workers, if the last checkpoint cannot be written, or an audited step differs.

            Examples:
                >>> job.close()
        """
        if self._is_closed:
            return
        self._is_closed = True
        for saver in self._savers.values():
            saver.finish()
            saver.close()
        try:
            self.settle_audit()
        finally:
            if self.audit is not None:
                self.audit.close()
            self._role.close()
            if self._at_exit is not None:
                self._at_exit.mark_closed()

    def abandon(self) -> None:
        """Let this process exit without waiting for the other workers, which may never close after an error.

        Examples:
            >>> job.abandon()
        """
        if self._at_exit is not None:
            self._at_exit.abandon()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        # After an error the other workers may never come to the collective close: do not wait for them.
        if kind is None:
            self.close()
