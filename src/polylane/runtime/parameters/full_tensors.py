"""Full tensors: weights, gradients and buffers all-gathered from the shards that workers hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.runtime.parameters import broadcast as weights
from polylane.runtime.parameters.materialize import whole_shapes_only
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.sync.zero.flat_shards import Shards
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.world import World


class FullTensors:
    """Gathers full tensors; its methods are collectives of all workers, :meth:`gather_full` of a stage's mesh.

    Args:
        prepared: the compiled training, equal on every worker.
        world: this worker among all training workers.
        tensors: parameters and buffers of this worker's model copy; only its local ones are up to date.
        pieces: tensor-parallel shards that this worker holds.
        transport: connects all training workers; each stage's mesh is one of its groups.
        held: names of the parameters and buffers that this worker keeps up to date.

    Attributes:
        shards: ZeRO shards of this worker; none until ``LocalModel.shard_parameters``.
    """

    def __init__(
        self,
        prepared: CompiledTraining,
        world: World,
        tensors: ModelTensors,
        pieces: ShardSpec,
        transport: Transport,
        held: Collection[str],
    ) -> None:
        self._prepared, self._world, self._tensors = prepared, world, tensors
        self._shard_spec, self._transport, self._local_names = pieces, transport, frozenset(held)
        self._stage, self._replica = prepared.plan.stage_and_replica(world.rank)
        self._mesh = prepared.plan.group(world.rank, prepared.plan.axes)
        self.shards = Shards()

    def gather_full(self, kind: str, name: str, part: Tensor) -> Tensor:
        """Return the full value of a parameter or buffer of this stage, from the shards of the stage's mesh."""
        if not self._shard_spec.is_sharded(kind, name):
            return part
        return self._transport.all_reduce(self._shard_spec.pad_to_full(kind, name, part), self._mesh).wait()

    def state_dict(self, holders: Mapping[str, Collection[int]], owner: Callable[[str], int]) -> dict[str, Tensor]:
        """Return the full model's weights and buffers, with its own names, on every worker's CPU.

        Args:
            holders: the stages that use each parameter, by canonical name.
            owner: maps a buffer's name to a stage that has its current value.
        """
        # One stage of one replica contributes each tensor: the sum over all workers then counts it once.
        stages = {name: min(own) for name, own in holders.items()}
        tied: dict[str, str] = {}
        for partition in self._prepared.partitions.values():
            tied |= partition.graph.tied
            for stage in range(partition.stages):
                stages |= {name: owner(name) for name in partition.buffers(stage)}
        return weights.gather_full_state(
            self._tensors.model,
            {name: self._replica == 0 and stage == self._stage for name, stage in stages.items()},
            tied,
            self._shard_spec.full_summand,
            self._transport,
            self._world.device,
        )

    def full_gradients(self, names: Iterable[str], holders: Mapping[str, Collection[int]]) -> dict[str, Tensor | None]:
        """Return full gradients of parameters on every worker's CPU; None for a parameter without a gradient.

        Args:
            names: canonical names of parameters, the same on every worker.
            holders: the stages that use each parameter, by canonical name.
        """
        names, parameters, own = list(names), self._tensors.parameters(), dict[str, Tensor]()
        for name in names:
            # Of the workers that hold the same shard of a gradient, exactly one contributes it to the sum.
            counts = self.shards.is_counted if name in self.shards.buffer_of else self._replica == 0
            gradient = self.shards.local_gradient(name, parameters[name]) if counts else None
            if gradient is not None and self._stage == min(holders[name]):
                own[name] = gradient.detach()
        # Only the union of names is summed: a gradient that is missing everywhere is None, not zeros.
        found = set().union(*self._transport.all_gather_object(list(own)))
        present = [name for name in names if name in found]
        if self._transport.size == 1:
            full = {name: own[name].to("cpu", copy=True) for name in present}
        else:
            sums = weights.sum_over_ranks(
                (self._gradient_summand(name, own.get(name)) for name in present),
                self._transport,
                range(self._transport.size),
            )
            full = {name: value.cpu() for name, value in zip(present, sums, strict=True)}
        return {name: full.get(name) for name in names}

    def _gradient_summand(self, name: str, part: Tensor | None) -> Tensor:
        like = torch.empty(0, dtype=self._tensors.parameters()[name].dtype, device=self._world.device)
        return self._shard_spec.full_summand(name, part, like)

    @contextmanager
    def installed_in_model(self, shapes: bool) -> Iterator[None]:
        """Context manager: the model has full parameters and buffers, as the user's own code expects.

        Args:
            shapes: install meta tensors of the full shapes only, where the full values do not fit a worker.
        """
        if shapes:
            with whole_shapes_only(self._tensors.model, self._shard_spec.shapes):
                yield
            return
        with self.shards.full_parameters(), self._full_values():
            yield

    @contextmanager
    def _full_values(self) -> Iterator[None]:
        parameters = self._tensors.parameters()
        every = {**parameters, **self._tensors.buffers()}
        own, wholes = dict[str, Tensor](), dict[str, Tensor]()
        for name in (n for n in every if n in self._local_names):
            kind = self._shard_spec.kind_of(name)
            if self._shard_spec.is_sharded(kind, name):
                own[name] = every[name].data if kind == "parameter" else every[name]
                wholes[name] = self.gather_full(kind, name, own[name])
        # A shard's gradient does not fit the full shape: set it aside while the full value is installed.
        gradients = {name: parameters[name].grad for name in own if name in parameters}
        for name in gradients:
            parameters[name].grad = None
        self._tensors.replace_values(wholes)
        try:
            yield
        finally:
            self._tensors.replace_values(own)
            for name, gradient in gradients.items():
                parameters[name].grad = gradient
