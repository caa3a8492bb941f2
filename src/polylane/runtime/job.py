"""Job: the user's handle on a distributed training. Its methods are those of the worker's role.

A worker that computes a part of the model has the training role; a worker that a plan dedicates to parameter servers
has the serving role. The same script runs on both (SPMD): it calls the same methods on every worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.sample_shares import Batch
from polylane.errors import PolylaneError, format_plural
from polylane.observe.swimlane.notebook_cell import draw_facts
from polylane.observe.timeline import Timeline
from polylane.plan.plan_file import dump
from polylane.runtime.checkpoint.call_arguments import check_keep, parse_folder
from polylane.runtime.checkpoint.load import LoadedCheckpoint, load_checkpoint
from polylane.runtime.checkpoint.resumed_choices import describe_choices
from polylane.runtime.checkpoint.save import CheckpointSaver, Position
from polylane.runtime.connections.connections import Connect
from polylane.runtime.data import loader as data
from polylane.runtime.data.sample_order import SamplerFactory
from polylane.runtime.data.stream_state import StreamState
from polylane.runtime.evaluation.job_evaluations import JobEvaluations
from polylane.runtime.pipeline.anomalies import AnomalyDetector
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.server_role import ServingRole
from polylane.runtime.start_line import describe_training
from polylane.runtime.step_audit import StepAudit
from polylane.runtime.step_result import StepResult, merge_timelines
from polylane.runtime.training_role import TrainingRole
from polylane.runtime.workers.close_at_exit import CloseAtExit
from polylane.runtime.workers.world import World

# Names that were methods of Job, and are of its worker's role alone.
_OF_WORKER = frozenset(("slack", "part_of", "shard_of", "stepping", "staleness", "counters", "updates", "held"))


class Job(JobEvaluations):
    """One worker's part of a distributed training; collective methods must be called by every worker, in one order.

    Attributes:
        plan: the plan that the training was compiled for.
        world: this worker's rank, device and backend.
        model: your model. Only the part that this worker holds is up to date: if that is not all of it, calling the
            model or reading the rest raises an error outside of :meth:`whole_model`. Writing is allowed if every
            worker writes the same values.
        anomalies: detector of non-finite values in this worker's forward passes, or None.
        audit: repeats some steps with your own code and compares the results, or None.
    """

    training_role: ClassVar[type[TrainingRole]] = TrainingRole

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
        self._at_exit = CloseAtExit(self.close) if self.plan.sync.has_servers else None

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
            batch: a batch of :meth:`batches`, or the same whole batch on every worker, which computes on its samples.
            objective: name of the loss, if there are several. Default: the first.

        Raises:
            ActionFailed: an operator raised an error, which is the cause; the message says where.
            OutOfMemory: the worker ran out of memory.
            PolylaneError: unknown objective; or this batch, or a later one of its epoch, is too small for the model.
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
        and a batch of the epoch is too small for the model, :meth:`step` raises an error at the first one.

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
            start: where to begin, such as :attr:`position` after :meth:`load_checkpoint`: earlier batches are passed
                over; only those of an iterable dataset without ``state_dict``, ``load_state_dict`` are read for that.

        Raises:
            PolylaneError: the batch is smaller than the number of microbatches, or the dataset has no samples, or too
            few for a single batch with ``drop_last``.
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

    # ---- weights and gradients ---------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The optimizer (or list of optimizers) of the first loss, over the parameters that this worker holds."""
        return self._role.optimizer_of(self._resolve_objective(None))

    def optimizer_of(self, objective: str) -> Any:
        """Return the optimizer (or list of optimizers) of one of several losses."""
        return self._role.optimizer_of(self._resolve_objective(objective))

    def gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Return the last step's gradients of the parameters or shards that this worker holds, reduced and clipped."""
        return self._role.gradients(self._resolve_objective(objective))

    @collective("job.whole_gradients")
    def whole_gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Return the last step's full gradients of all parameters of a loss, on every worker's CPU; collective.

        The keys are the model's parameter names, in its order. The values equal ``parameter.grad`` on one device, after
        reduction and clipping; None for parameters without a gradient.
        """
        return self._role.whole_gradients(self._resolve_objective(objective))

    @collective("job.state_dict")
    def state_dict(self, *, losses: bool = False) -> dict[str, Tensor]:
        """Return the state dict of the full model, on every worker's CPU; collective.

        If replicas differ, values are their mean. With ``losses``, includes tensors of losses as "loss.NAME".
        """
        return self._role.state_dict(losses)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the full model, the same on every worker; each keeps its own part."""
        self._role.load_state_dict(state)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """Context manager: :attr:`model` is complete on every worker; what all write alike is kept; collective."""
        with self._role.whole_model(self.state_dict(losses=True)) as model:
            yield model

    @collective("job.save")
    def save(self, path: str | Path) -> None:
        """Write the weights of the full model to a safetensors file that the plain model can load; collective.

        An existing file is replaced once the new one is complete. Tensors of type complex128 are stored as
        ``NAME.real`` and ``NAME.imag``.

        Raises:
            NotFinite: on every worker, if a weight is NaN or infinite; an existing file is kept.
            PolylaneError: on rank 0, if the file cannot be written.
        """
        self.settle_audit()
        self._role.save(Path(path))

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
        """
        if self.audit is not None:
            self.audit.settle()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Number of completed steps, and the position in the data after the batch of the last step."""
        return self._position

    @collective("job.save_checkpoint")
    def save_checkpoint(self, folder: str | Path, *, keep: int | None = None, wait: bool = True) -> None:
        """Save a checkpoint, from which any plan of the same model can resume; collective.

        The checkpoint is a folder such as ``step-00000500`` inside ``folder``; it is complete once its manifest exists.

        Args:
            folder: folder for the checkpoints of this run.
            keep: number of checkpoints to keep; older ones are deleted. Default: all.
            wait: wait until it is complete. Otherwise it is complete before the next one, or after :meth:`close`.

        Raises:
            PolylaneError: on every worker, if it cannot be written; earlier checkpoints are kept.
        """
        saver = self.open_saver(parse_folder("save_checkpoint", folder), keep)
        saver.finish()
        self.begin_checkpoint(saver)
        if wait:
            saver.finish()

    def begin_checkpoint(self, saver: CheckpointSaver, run: Mapping[str, Any] | None = None) -> None:
        """Take the snapshot of a checkpoint, which is then written in the background; collective.

        Args:
            saver: saver of :meth:`open_saver` that is not writing another checkpoint.
            run: facts about the run, which :meth:`load_checkpoint` returns.

        Raises:
            PolylaneError: on every worker, if it cannot be started.
        """
        self.settle_audit()
        facts, role = {"plan": dump(self.plan), "run": {**self._choices, **(run or {})}}, self._role
        saver.begin(self._position, lambda: self._stream.add_to(role.collect_state(), self._rank), facts)

    def open_saver(self, folder: Path, keep: int | None) -> CheckpointSaver:
        """Return the saver of a folder of checkpoints, which keeps ``keep`` of them; the job closes it."""
        saver = self._savers.setdefault(folder, CheckpointSaver(folder, keep, self._rank, self._role.exchange))
        saver.keep = check_keep(keep)
        return saver

    @collective("job.load_checkpoint")
    def load_checkpoint(self, path: str | Path, *, warn: Callable[[str], None] = warnings.warn) -> LoadedCheckpoint:
        """Resume from a checkpoint, whichever plan wrote it; collective, before the first step.

        Args:
            path: a checkpoint folder, or a folder of checkpoints, whose newest complete one is loaded.
            warn: called on rank 0 if other parameters are trained than in the checkpoint, or clipping differs.

        Returns:
            What was loaded. ``job.batches(..., start=job.position)`` resumes the data.

        Raises:
            PolylaneError: on every worker, if there is none, or it is damaged or of another model.
        """
        folder = parse_folder("load_checkpoint", path)
        loaded = load_checkpoint(folder, self._rank, self._role.exchange, self._role.restore_state)
        loaded.tell_changes(self._choices, self._rank, warn)
        self._position = loaded.position
        self._stream = StreamState((loaded.plain.get("stream"), loaded.position.samples))
        return loaded

    # ---- telemetry ---------------------------------------------------------------------------------------------------

    @property
    def apart(self) -> bool:
        """Whether replicas are asynchronous (parameter servers): a worker knows only the losses of its replica."""
        return self.plan.sync.has_servers and self.plan.sync.is_replica_local

    @collective("job.gathered")
    def gathered(self, value: Any) -> list[Any]:
        """Gather a value of every worker, by rank: numbers, strings, tensors or containers of these; collective."""
        return self._role.gather(lambda: value)

    @collective("job.traffic")
    def traffic(self) -> list[dict[str, float]]:
        """Return the bytes that each worker sent per step, averaged over all steps, by rank; collective.

        ``"agreement"`` of replicas (gradients, weights), ``"stages"``, ``"operators"`` (of sharded ones) and
        ``"statistics"`` (of batches, and norms); ``"theory"`` is the expected ``"agreement"``. Without headers.
        """
        return self._role.gather(self._role.sent_bytes)

    @collective("job.timeline")
    def timeline(self, steps: int = 1) -> Timeline:
        """Return the timeline of the last steps of all workers, on one clock; collective.

        Unlike :attr:`StepResult.timeline`, includes asynchronous replicas and dedicated servers.

        Args:
            steps: number of steps, at most :data:`polylane.runtime.step_result.STEPS_KEPT`.
        """
        return merge_timelines(self._role.gather(lambda: self._role.lane(steps)), self.plan.workers)

    @collective("job.close")
    def close(self) -> None:
        """Finish communication and checkpoints, and leave the process group if this job joined it; collective."""
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

    def abandon(self) -> None:
        """Let this process exit without waiting for the other workers, which may never close after an error."""
        if self._at_exit is not None:
            self._at_exit.abandon()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        # After an error the other workers may never come to the collective close: do not wait for them.
        if kind is None:
            self.close()
