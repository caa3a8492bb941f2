"""Optimizer step of one objective on one worker: clipping, the optimizer on local shards, scheduler, all-gather."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import build_scheduler, named_parameters, needs_metric
from polylane.compile.optimizer_sequence import schedulers_in
from polylane.errors import PolylaneError
from polylane.optim.rates import multiply_rates
from polylane.optim.trust import set_sum_over_holders
from polylane.plan.plan import Plan
from polylane.plan.sync import PowerSGDOptions, SyncOptions
from polylane.runtime.connections.byte_counters import NORMS
from polylane.runtime.connections.connections import replica_ranks
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.parameters.optimizer import (
    GradientClipper,
    SumOverMesh,
    build_optimizer,
    set_optimizer_mode,
    step_optimizer,
    step_scheduler,
)
from polylane.runtime.parameters.zero_shards import Shards
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.compression.half_precision import HalfPrecisionCompressor
from polylane.runtime.sync.compression.powersgd import PowerSGDCompressor
from polylane.runtime.sync.compression.top_k import TopKCompressor
from polylane.runtime.sync.loss_scale import START, LossScale, overflow_told, reads_overflow

WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_REAL = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclass
class ObjectiveUpdate:
    """Optimizer, scheduler and gradient clipping of one objective on this worker.

    Attributes:
        optimizer: the user's optimizer on this worker's parameters or shards.
        scheduler: the user's learning-rate scheduler of the optimizer, or None.
        parameter_order: names of the parameters that the optimizer holds, on all workers, in the model's order.
        local_parameters: what the optimizer steps on, by name: this worker's parameters, or its ZeRO shards of them.
        clipper: bounds the norm of the gradients, or None.
        shards: ZeRO shards of this worker; none without ``sync.shard``.
        full_parameters: this worker's parameters in the shapes that its passes compute with, by name.
        counted_names: names of the parameters or shards that this worker counts in sums over all: each distinct one has
            one worker that counts it in a replica.
        sums: sums numbers of parameters over all of their shards.
        copies: number of replicas that count the same.
        note_loss: runs the lines of the user's loss that only note something, with what returns the loss; None without.
        loss_scale: factor of the loss in passes in float16, which decides what updates are left out; None in others.
        step_key: seed of the training and number of the step: what the optimizer's random numbers depend on.
        compressor: sums gradients over replicas; shared by all bound programs of the objective, so that error feedback
            of one of them is sent by the next.
        was_left_out: whether the last update is known to have been left out.
    """

    optimizer: torch.optim.Optimizer
    scheduler: Any
    parameter_order: list[str]
    local_parameters: dict[str, nn.Parameter]
    clipper: GradientClipper | None
    shards: Shards
    full_parameters: dict[str, nn.Parameter]
    compressor: GradientCompressor
    sums: SumOverMesh
    counted_names: Sequence[str] = ()
    copies: int = 1
    note_loss: Callable[[Callable[[], float]], None] | None = None
    loss_scale: LossScale | None = None
    step_key: tuple[int, ...] | None = None
    was_left_out: bool = False
    _is_training: bool | None = None  # whether the optimizer's train() or its eval() was called last

    def set_mode(self, training: bool) -> None:
        """Call the optimizer's own ``train()`` or ``eval()``, if it has both; collective where replicas have shares."""
        if training is self._is_training:
            return
        self._is_training = training
        if set_optimizer_mode(self.optimizer, training) and self.shards.flat_buffers:
            self.shards.gather_updated(self.full_parameters.keys())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All local parameters and shards."""
        return [*self.local_parameters.values(), *self.full_parameters.values()]

    def zero_grad(self) -> None:
        """Set the gradients of all local parameters and shards to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def update_weights(self, samples: bool = True, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Clip, step the optimizer and the scheduler, as one device does after its backward pass.

        Nothing is done where a gradient is not finite in a training with a loss scale.

        Args:
            samples: whether this replica had any samples in the batch; without any only the scheduler steps.
            optimizer: the one that steps, of several that the objective has; default: all of them.
        """
        optimizer, self.was_left_out = optimizer or self.optimizer, False
        context: AbstractContextManager[None] = nullcontext()
        if self.loss_scale is not None:
            overflow = self.loss_scale.find_overflow(p for group in optimizer.param_groups for p in group["params"])
            if self.scheduler is None and reads_overflow(optimizer):
                context = overflow_told(optimizer, overflow)
            elif overflow.item():  # as torch.amp.GradScaler: the one number for which the host waits
                self.was_left_out = True
                return
        if samples:
            if self.clipper is not None:
                self.clipper.clip_gradients()
            with context:
                step_optimizer(optimizer, self.step_key)
            # ZeRO-1 and -2: each replica updated its shard, the full parameters need all of them.
            if self.shards.flat_buffers:
                self.shards.gather_updated(self.full_parameters.keys())
        if not self.needs_loss:
            step_scheduler(self.scheduler)

    @cached_property
    def needs_loss(self) -> bool:
        """Whether the scheduler is stepped with the loss, known behind the update: see :meth:`follow_loss`."""
        return needs_metric(self.scheduler)

    def follow_loss(self, read_loss: Callable[[], float]) -> None:
        """Do what needs the loss of the whole batch: step a scheduler that does, and run lines that only note it.

        Args:
            read_loss: returns the loss, and waits for it.
        """
        if self.needs_loss and not self.was_left_out:
            step_scheduler(self.scheduler, read_loss())
        if self.note_loss is not None:
            self.note_loss(read_loss)

    def scale_rates(self, factor: float) -> None:
        """Multiply the learning rate of every group, and those that schedulers will set.

        Raises:
            PolylaneError: a scheduler is made of others, whose rates are not known.
        """
        multiply_rates(self.optimizer, schedulers_in(self.scheduler), factor)

    def squared_norm(self) -> Tensor:
        """Return this worker's share of the squared 2-norm of all gradients, a float64 scalar on its device.

        The shares of all workers add up to the whole; replicas with gradients of their own make up a mean.
        """
        gradients = [self.local_parameters[name].grad for name in self.counted_names]
        present = [g.coalesce().values() if g.is_sparse else g for g in gradients if g is not None]
        if not present:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(torch._foreach_norm(present, 2.0)).double().square().sum() / self.copies

    def unscale_gradients(self) -> None:
        """Make the gradients those of the loss itself, where passes compute those of a multiple."""
        if self.loss_scale is not None:
            self.scale_gradients(self.loss_scale.inverse)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients of all local parameters and shards by a number, or by a scalar tensor, in place."""
        grads = [p.grad for p in self.local_parameters.values() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)


def build_updates(local_model: LocalModel, clip_norm: float | None) -> dict[str, ObjectiveUpdate]:
    """Build the optimizer step of every objective, by its name, and shard this worker's parameters.

    Args:
        local_model: this worker's model, with full parameters until now: the user's optimizers are built on these.
        clip_norm: upper bound on the gradients' 2-norm, or None.

    Raises:
        PolylaneError: a scheduler has no ``step()`` or needs a metric, or a gradient cannot be compressed as the plan
            says.
    """
    _refuse_whole_norms(local_model.prepared.plan, clip_norm)
    _refuse_half_gradients(local_model)
    # Order matters: optimizers on full parameters, then sharding, then what refers to the shards.
    all_pairs = named_parameters(local_model.prepared.model, local_model.tensors.losses)
    optimizers = {
        name: build_optimizer(
            local_model.prepared.objectives[name], list(_held_parameters(local_model, name)[1].items()), all_pairs
        )
        for name in local_model.prepared.graphs
    }
    local_model.shard_parameters(optimizers.values())
    return {name: _trainer_of(local_model, name, built, clip_norm) for name, built in optimizers.items()}


def _refuse_whole_norms(plan: Plan, clip_norm: float | None) -> None:
    """Refuse a bound on the norm of all gradients where stages never have those of one batch at the same time."""
    if plan.is_asynchronous and clip_norm is not None and plan.pipeline > 1:
        raise PolylaneError(
            f"clip_norm bounds the norm of all stages' gradients of a batch, and under schedule={plan.schedule} stages "
            "update at different times: leave it out, or take a schedule that waits"
        )


def _refuse_half_gradients(local_model: LocalModel) -> None:
    """Refuse a loss scale for gradients in float16, which would lose what it keeps."""
    for graph in local_model.prepared.graphs.values() if local_model.prepared.plan.precision == "float16" else ():
        for name, info in graph.partition.graph.parameters.items():
            if info.trainable and info.dtype == "float16":
                raise PolylaneError(
                    f"precision=float16 is for models in float32, and {name} is in float16 itself, and so is its "
                    "gradient: build the model in float32 (model.float()), or leave precision out"
                )


def _trainer_of(
    local_model: LocalModel, name: str, built: torch.optim.Optimizer, clip_norm: float | None
) -> ObjectiveUpdate:
    order, parameters = _held_parameters(local_model, name)
    updated_parts = local_model.shards.updated_parameters(parameters)
    counted = _counted_names(local_model, updated_parts)
    sums = SumOverMesh(order, counted, updated_parts, local_model.world.device, _make_replica_sum(local_model))
    if local_model.prepared.layouts or local_model.shard_units.units:
        set_sum_over_holders(built, sums)
    clipper = None if clip_norm is None else GradientClipper(clip_norm, sums)
    scheduler = build_scheduler(local_model.prepared.objectives[name].scheduler, built)
    codec = choose_compressor(local_model.prepared.plan.sync, {n: p for n, p in parameters.items() if p.requires_grad})
    note = _bind_log(local_model, name)
    copies = 1 if _sums_all_replicas(local_model) else local_model.prepared.plan.data
    shards, is_scaled = local_model.shards, local_model.prepared.plan.precision == "float16"
    scale = LossScale(local_model.world.device, sums.sum_replica) if is_scaled else None
    return ObjectiveUpdate(
        built, scheduler, order, updated_parts, clipper, shards, parameters, codec, sums, counted, copies, note, scale
    )


def restore_scales(updates: Mapping[str, ObjectiveUpdate], plain: Mapping[str, Any]) -> None:
    """Go on with the loss scales of a checkpoint, by objective; begin where it has none."""
    for name, update in updates.items():
        if update.loss_scale is not None:
            update.loss_scale.load(plain.get(f"loss_scale/{name}", (START, 0)))


def _bind_log(local_model: LocalModel, name: str) -> Callable[[Callable[[], float]], None] | None:
    """Return what runs the lines of an objective's loss that only note something; None where it has none."""
    if (log := local_model.prepared.objectives[name].log) is None:
        return None
    results: Any = local_model.prepared.graphs[name].partition.graph.code.fx.output_node().args[0]
    return partial(log.run, dtype=results[0].meta["val"].dtype, prints=local_model.world.rank == 0)


def _held_parameters(local_model: LocalModel, name: str) -> tuple[list[str], dict[str, nn.Parameter]]:
    """Return names of all parameters that an objective's optimizer holds, in the model's order; and this worker's."""
    parameters, order = local_model.tensors.parameters(), list(local_model.prepared.held[name])
    return order, {n: parameters[n] for n in order if local_model.stage in local_model.owning_stages[n]}


def _counted_names(local_model: LocalModel, names: Iterable[str]) -> list[str]:
    """Return names whose local shard counts in the sums of :func:`_make_replica_sum`: each distinct shard once."""
    plan, shards = local_model.prepared.plan, local_model.shards
    is_first = plan.stage_and_replica(local_model.world.rank)[1] == 0
    if not _sums_all_replicas(local_model):
        is_first = True  # the sum is over one replica; otherwise it is over all, and only replica 0 counts
    local_names = filter(local_model.shard_spec.speaks_for, names)
    return [n for n in local_names if (shards.is_counted if n in shards.buffer_of else is_first)]


def _sums_all_replicas(local_model: LocalModel) -> bool:
    """Return whether sums over all shards are those of all workers: with ZeRO, or other numbers of replicas."""
    return bool(local_model.prepared.plan.has_uneven_replicas or local_model.shard_units.units)


def _make_replica_sum(local_model: LocalModel) -> Callable[[Tensor], Tensor]:
    """Return an all-reduce over this replica; over all workers with ZeRO or different numbers of replicas."""
    plan = local_model.prepared.plan
    # ZeRO shards of one parameter are spread over replicas, and so are stages with different numbers of replicas.
    ranks = range(plan.workers) if local_model.shard_units.units else replica_ranks(plan, local_model.world.rank)
    transport = local_model.transport

    def sum_replica(values: Tensor) -> Tensor:
        start_bytes = transport.counters.sent
        total = transport.all_reduce(values, ranks).wait()
        # Norms say nothing of what replicas must agree on, which theory knows.
        transport.counters.move_sent("all_reduce", NORMS, transport.counters.sent - start_bytes)
        return total

    return sum_replica


def choose_compressor(sync: SyncOptions, parameters: Mapping[str, Tensor]) -> GradientCompressor:
    """Build a new gradient compressor for one objective on one worker.

    Args:
        sync: the plan's options of synchronization and compression.
        parameters: parameters whose gradients are summed, by canonical name.

    Raises:
        PolylaneError: a gradient that the plan compresses is not of a real floating-point dtype.
    """
    if sync.wire == "same" and sync.compress is None:
        return GradientCompressor()
    _require_real("sync.wire" if sync.compress is None else "sync.compress", parameters)
    if sync.compress is None:
        return HalfPrecisionCompressor(WIRES[sync.wire])
    if isinstance(sync.compress, PowerSGDOptions):
        return PowerSGDCompressor(sync.compress.rank, sync.compress.start)
    return TopKCompressor(sync.compress.fraction)


def _require_real(key: str, parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype not in _REAL:
            raise PolylaneError(
                f"{key} takes gradients of real floating-point numbers, and that of {name} is {parameter.dtype}: "
                f"leave {key} out"
            )
