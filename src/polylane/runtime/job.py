"""Job: the user's handle on a distributed training. Its methods are those of the worker's role.

A worker that computes a part of the model has the training role; a worker that a plan dedicates to parameter servers
has the serving role. The same script runs on both (SPMD): it calls the same methods on every worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.sample_shares import Batch
from polylane.errors import PolylaneError, format_plural
from polylane.observe.timeline import Timeline
from polylane.plan.plan_file import dump
from polylane.runtime.checkpoint.call_arguments import check_keep, parse_folder
from polylane.runtime.checkpoint.load import LoadedCheckpoint, load_checkpoint
from polylane.runtime.checkpoint.resumed_choices import describe_choices
from polylane.runtime.checkpoint.save import CheckpointSaver, Position
from polylane.runtime.connections.connections import Connect
from polylane.runtime.data import loader as data
from polylane.runtime.data.stream_state import StreamState
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
_OF_WORKER = frozenset(("slack", "part_of", "shard_of", "stepping", "staleness", "counters", "updates"))


class Job:
    """One worker's handle on a training that :func:`polylane.parallelize` split; all workers call the same methods.

    Attributes:
        plan: the plan that the training was compiled for.
        world: this worker's rank, device and backend.
        model: the user's model, of which this worker's own part is up to date. Where that is not all of it, calls and
            values of the rest are refused outside of :meth:`whole_model`; writes, alike on every worker, are not.
        anomalies: detector of values that are not finite in this worker's forward passes; None: off.
        audit: makes some steps a second time as the user wrote them, and compares; None: off.
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
            self._role = TrainingRole(prepared, world, example, clip_norm, seed, same_weights, connect)
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

    # ---- training ----------------------------------------------------------------------------------------------------

    @collective("job.step")
    def step(self, batch: Any, objective: str | None = None) -> StepResult:
        """Take one optimizer step on one batch: forward, backward, reduction, clipping, optimizer, scheduler.

        A dedicated parameter server returns at once, with a loss of nan.

        Args:
            batch: a batch of :meth:`batches`; or the same whole batch on every worker, of which each takes its samples.
            objective: name of one of several losses; default: the first.

        Raises:
            ActionFailed: an operator raised; it says where, with the original error as cause.
            OutOfMemory: the worker asked for memory in vain.
            PolylaneError: an unknown objective; or this batch, or a later one of its epoch, is too short for the model.
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

    @collective("job.evaluate")
    def evaluate(self, batch: Any, objective: str | None = None) -> float:
        """Return the loss of a batch in evaluation mode, forward only, through the same stages; changes nothing."""
        total, count = self.evaluate_sums(batch, objective)
        return total / count if count else float("nan")

    @collective("job.evaluate_sums")
    def evaluate_sums(self, batch: Any, objective: str | None = None) -> tuple[float, float]:
        """Return the loss of :meth:`evaluate` as (total, count), to be added up over a dataset."""
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
        start: Position | None = None,
    ) -> Iterator[Batch]:
        """Yield batches of a dataset, in an order that depends on the job's seed and the epoch alone.

        Every sample comes once an epoch, the last batch has the rest. Each worker loads only the samples that it
        computes on, or whole batches where a tensor of the example has not one row for each sample. :meth:`step`
        refuses the first batch of an epoch if one of it is too small for the model, where the dataset has a length.

        Args:
            dataset: map-style or iterable dataset, or a list of samples.
            batch_size: samples in a batch, over all workers.
            epochs: number of passes over the dataset.
            shuffle: whether samples come in a new order each epoch (iterable datasets keep their own).
            drop_last: leave out a last batch that is shorter than the others.
            collate: function from samples to a batch; default: torch's own.
            workers: number of processes that load ahead.
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
        extra = dict[str, Any](shuffle=shuffle, drop_last=drop_last, collate=collate, workers=workers, state=stream)
        for epoch in range(begin := max(first_epoch, start.epoch), first_epoch + epochs):
            count, extra["resumed"] = start.samples if epoch == start.epoch else 0, bool(start.step) and epoch == begin
            for batch in self.world.progress.loading(self._role.epoch(dataset, batch_size, epoch, skip=count, **extra)):
                count += batch.loaded_samples
                self._offered = batch, Position(0, epoch, count), stream
                yield batch

    # ---- weights and gradients ---------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The first objective's optimizer, or list of optimizers, over the parameters that this worker holds."""
        return self._role.optimizer_of(self._resolve_objective(None))

    def optimizer_of(self, objective: str) -> Any:
        """Return the optimizer, or list of optimizers, of one of several objectives."""
        return self._role.optimizer_of(self._resolve_objective(objective))

    def gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Return the last step's gradients of what this worker holds (its shards, its replica), reduced and clipped."""
        return self._role.gradients(self._resolve_objective(objective))

    @collective("job.whole_gradients")
    def whole_gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Return the gradients of the last step of all parameters that the objective trains; collective.

        They are whole, after reduction and clipping, by the model's own names and in its order, on every worker's CPU:
        what ``parameter.grad`` is on one device. None where a parameter got no gradient.
        """
        return self._role.whole_gradients(self._resolve_objective(objective))

    def held(self) -> dict[str, Tensor]:
        """Return what this worker keeps up to date (sharded: shards), by the model's own names; servers: parameters."""
        return self._role.held()

    @collective("job.state_dict")
    def state_dict(self, *, losses: bool = False) -> dict[str, Tensor]:
        """Return the whole model's weights and buffers, by its own names, on every worker's CPU; collective.

        With ``losses``, also those that losses have, as "loss.NAME". Of replicas that differ it is the mean.
        """
        return self._role.state_dict(losses)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what :meth:`state_dict` returns, the same on every worker; each keeps its part of it."""
        self._role.load_state_dict(state)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """Context manager: :attr:`model` is whole on every worker; what all write alike is trained on; collective."""
        with self._role.whole_model(self.state_dict(losses=True)) as model:
            yield model

    @collective("job.save")
    def save(self, path: str | Path) -> None:
        """Write the whole model's weights as safetensors, loadable into the plain model; collective.

        An existing file is replaced once the new one is complete. complex128 becomes ``NAME.real`` and ``NAME.imag``.

        Raises:
            NotFinite: on every worker, if a weight is NaN or infinite; an existing file is left as it is.
            PolylaneError: on rank 0, if the file cannot be written.
        """
        self.settle_audit()
        self._role.save(Path(path))

    @property
    def worker(self) -> TrainingRole | ServingRole:
        """The role of this worker, for polylane's own commands: no part of the public interface."""
        return self._role

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_WORKER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"Job.{name} is Job.worker.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(self._role, name)

    def settle_audit(self) -> None:
        """Wait for the verdict on the last audited step, before anything is kept of the training; collective.

        Raises:
            PolylaneError: on all workers, if the step was not what one device computes.
        """
        if self.audit is not None:
            self.audit.settle()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Steps that were made, and where the training is in its data: behind the batch of the last step."""
        return self._position

    @collective("job.save_checkpoint")
    def save_checkpoint(self, folder: str | Path, *, keep: int | None = None, wait: bool = True) -> None:
        """Save all that decides how the training goes on; collective.

        The checkpoint is a folder ``step-00000500`` in ``folder``, complete once its manifest is there, which any plan
        of the same model can go on from.

        Args:
            folder: folder of the run's checkpoints.
            keep: number of newest complete checkpoints that are kept; None: all.
            wait: return when it is complete; else it is at the latest when the next call begins, or :meth:`close`.

        Raises:
            PolylaneError: on every worker, if it cannot be written; earlier checkpoints are as they were.
        """
        saver = self.open_saver(parse_folder("save_checkpoint", folder), keep)
        saver.finish()
        self.begin_checkpoint(saver)
        if wait:
            saver.finish()

    def begin_checkpoint(self, saver: CheckpointSaver, run: Mapping[str, Any] | None = None) -> None:
        """Take the snapshot of a checkpoint, which is then written beside the training; collective.

        Args:
            saver: of :meth:`open_saver`; no checkpoint of its is being written.
            run: facts about the run that a resumed one finds in :meth:`load_checkpoint`.

        Raises:
            PolylaneError: on every worker, if it cannot be begun.
        """
        self.settle_audit()
        facts, role = {"plan": dump(self.plan), "run": {**self._choices, **(run or {})}}, self._role
        saver.begin(self._position, lambda: self._stream.add_to(role.collect_state(), self._rank), facts)

    def open_saver(self, folder: Path, keep: int | None) -> CheckpointSaver:
        """Return the saver of a folder of checkpoints, which the job closes; it keeps ``keep`` of them from now on."""
        saver = self._savers.setdefault(folder, CheckpointSaver(folder, keep, self._rank, self._role.exchange))
        saver.keep = check_keep(keep)
        return saver

    @collective("job.load_checkpoint")
    def load_checkpoint(self, path: str | Path, *, warn: Callable[[str], None] = warnings.warn) -> LoadedCheckpoint:
        """Go on from a checkpoint, whatever plan wrote it; collective, before the first step.

        Args:
            path: of a checkpoint's folder, or of a folder of checkpoints, whose newest complete one is taken.
            warn: called on rank 0 where other parameters are trained than in the checkpoint, or clipped otherwise.

        Returns:
            What was loaded. ``job.batches(..., start=job.position)`` goes on from where the training was.

        Raises:
            PolylaneError: on every worker, if there is none, it is damaged, or of another model.
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
        """Whether replicas are asynchronous (parameter servers): a worker knows the losses of its own replica only."""
        return self.plan.sync.has_servers and self.plan.sync.is_replica_local

    @collective("job.gathered")
    def gathered(self, value: Any) -> list[Any]:
        """Gather every worker's plain value by rank: numbers, text, tensors, None, or made of them; collective."""
        return self._role.gather(lambda: value)

    @collective("job.traffic")
    def traffic(self) -> list[dict[str, float]]:
        """Return the bytes that every worker sent in a step, the mean over all steps; collective.

        By rank: ``"agreement"`` between replicas (gradients, weights), ``"stages"`` values between stages,
        ``"operators"`` in split ones, ``"statistics"`` of batches, and norms; ``"theory"`` for the first. No headers.
        """
        return self._role.gather(self._role.sent_bytes)

    @collective("job.timeline")
    def timeline(self, steps: int = 1) -> Timeline:
        """Return the timeline of every worker's last steps, on one clock; collective.

        Unlike :attr:`StepResult.timeline` it shows asynchronous replicas, too, and updates of dedicated servers.

        Args:
            steps: number of steps, at most :data:`polylane.runtime.step_result.STEPS_KEPT`.
        """
        return merge_timelines(self._role.gather(lambda: self._role.spans(steps)), self.plan.workers)

    @collective("job.close")
    def close(self) -> None:
        """Wait for all messages and leave the other workers, if this job joined them; further calls do nothing."""
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
        """Let this worker's process end without the others: after an error they may never come to the close."""
        if self._at_exit is not None:
            self._at_exit.abandon()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        # After an error the other workers may never come to the collective close: do not wait for them.
        if kind is None:
            self.close()
