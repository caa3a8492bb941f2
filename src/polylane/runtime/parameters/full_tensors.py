"""Full tensors: weights, gradients and buffers all-gathered from the shards that workers hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.sparse_gradients import densify
from polylane.runtime.parameters import broadcast as weights
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.parameters.materialize import whole_shapes_only


class FullTensors:
    """Gathers full tensors; its methods are collectives of all workers.

    Args:
        local_model: parameters and buffers of this worker's model copy; only its local ones are up to date.
    """

    def __init__(self, local_model: LocalModel) -> None:
        self._local_model, self._tensors, self._shard_spec = local_model, local_model.tensors, local_model.shard_spec
        plan, rank = local_model.prepared.plan, local_model.world.rank
        self._replica, self._mesh = plan.stage_and_replica(rank)[1], plan.group(rank, plan.axes)

    def state_dict(self, losses: bool = False) -> dict[str, Tensor]:
        """Return the full model's weights and buffers, with its own names, on every worker's CPU.

        What training never changes is taken from this worker.

        Args:
            losses: whether what losses have is returned as well, by names that begin with "loss.".
        """
        local_model = self._local_model
        # One stage of one replica contributes each tensor: the sum over all workers then counts it once.
        stages = {name: min(owners) for name, owners in local_model.owning_stages.items()}
        tied = self._tied()
        users = local_model.stages_of_buffers()
        stages |= {name: local_model.buffers.owning_stage(name, among) for name, among in users.items()}
        with local_model.shards.full_parameters():
            state = {name: value.detach() for name, value in self._tensors.list_state(losses).items()}
            # Tied weights are gathered once: each name of theirs gets a copy of the same value.
            local: dict[str, Tensor] = {}
            for name, value in state.items():
                local.setdefault(tied.get(name, name), value)
            parts = (
                (name, value if self._replica == 0 and stages[name] == local_model.stage else None)
                for name, value in local.items()
                if name in stages and local_model.transport.size > 1
            )
            full = {**local, **self._sum_parts(parts)}
            return {name: full[tied.get(name, name)].cpu().clone() for name in state}

    def _tied(self) -> dict[str, str]:
        """Return second and later names of tensors, each with the first one."""
        partitions = self._local_model.prepared.partitions.values()
        return {name: first_name for partition in partitions for name, first_name in partition.graph.tied.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Write full weights and buffers, by the model's own names, into what this worker holds of them; no collective.

        Raises:
            PolylaneError: names or shapes are not those of the model; or replicas or servers have other weights.
        """
        local_model, tied, sync = self._local_model, self._tied(), self._local_model.prepared.plan.sync
        if sync.has_servers or sync.is_replica_local:
            raise PolylaneError(
                f"{','.join(sync.to_words())}: weights cannot be loaded in mid-training, for servers or replicas have "
                "others: load them into the model before it is prepared, or use load_checkpoint"
            )
        names = [tied.get(name, name) for name in self._tensors.list_state(False)]
        tensors = {**self._tensors.parameters(), **self._tensors.buffers()}
        of_losses = self._tensors.list_state(True).keys() - self._tensors.list_state(False).keys()
        optional = of_losses & tensors.keys()
        shapes = {
            name: tuple(local_model.shard_spec.shapes.get(name, tensors[name].shape)) for name in (*names, *optional)
        }
        # A further name of a loss's tensor says what its first name says.
        values = {tied.get(name, name): v for name, v in state.items() if name not in of_losses - tensors.keys()}
        for name in dict.fromkeys((*values, *names)):
            if name not in values or name not in shapes:
                lacks = "the model has no" if name not in shapes else "the state lacks"
                raise PolylaneError(f"load_state_dict: {lacks} {name}: give all that job.state_dict() returns")
            if tuple(values[name].shape) != shapes[name]:
                sizes = f"{list(shapes[name])}, and the state has {list(values[name].shape)}"
                raise PolylaneError(f"load_state_dict: {name} has shape {sizes}")
        local = local_model.local_tensors()
        with torch.no_grad():
            for name, value in values.items():
                part = local_model.local_part(name, value)
                # Of other stages' weights too: what this process has of them is whole until the next step.
                tensor = local.get(name, None if local_model.is_part(name) else tensors[name])
                if part is not None and tensor is not None:
                    tensor.copy_((part if name in local else value).view(tensor.shape))

    def put_whole(self, state: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> None:
        """Give the model whole tensors and gradients, by name; what this worker holds of them is held no more."""
        parameters, device = self._tensors.parameters(), self._local_model.world.device
        for parameter in parameters.values():
            parameter.grad = None  # that of a part does not fit the full shape
        self._tensors.replace_values({name: value.to(device, copy=True) for name, value in state.items()})
        for name, gradient in gradients.items():
            parameters[name].grad = None if gradient is None else gradient.to(device)

    @contextmanager
    def whole_in_model(self, state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Context manager: the model has the tensors of :meth:`state_dict`.

        Yields:
            A dict that has all of them in the end if one of them was written inside; else nothing.
        """
        parameters, written = self._tensors.parameters(), dict[str, Tensor]()
        tensors = {**parameters, **self._tensors.buffers()}
        parts = {name: tensors[name].data if name in parameters else tensors[name] for name in state if name in tensors}
        gradients = {name: parameters[name].grad for name in parts if name in parameters}
        for name in gradients:
            parameters[name].grad = None  # that of a part does not fit the full shape
        device = self._local_model.world.device
        self._tensors.replace_values({name: state[name].to(device, copy=True) for name in parts})
        try:
            yield written
            new_tensors = {**self._tensors.parameters(), **self._tensors.buffers()}
            if any(not torch.equal(new_tensors[name], state[name].to(device)) for name in parts):
                written.update({name: new_tensors[name].detach().clone() for name in parts})
        finally:
            self._tensors.replace_values(parts)
            for name, gradient in gradients.items():
                parameters[name].grad = gradient

    def save(self, path: Path) -> None:
        """Write the full model's weights as safetensors; a collective of all workers, rank 0 writes.

        Raises:
            NotFinite: a weight is NaN or infinite, raised on every worker; an earlier file is unchanged.
        """
        state = self.state_dict()
        # Checked on every worker before anybody writes: all raise, and nobody is left waiting at the barrier.
        weights.require_finite(state, self._tensors.parameters(), path)
        try:
            if self._local_model.world.rank == 0:
                weights.save_safetensors(state, path)
        finally:
            self._local_model.transport.barrier()  # also where the file could not be written: nobody waits in vain

    def values(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return full parameters or buffers on every worker's CPU, of those that workers keep up to date.

        Args:
            names: canonical names of trained parameters or written buffers, the same on every worker.
        """
        local_model, users = self._local_model, self._local_model.stages_of_buffers()
        stages = {n: min(owners) for n, owners in local_model.owning_stages.items() if n in names}
        stages |= {n: local_model.buffers.owning_stage(n, among) for n, among in users.items() if n in names}
        tensors = {**self._tensors.parameters(), **self._tensors.buffers()}
        with local_model.shards.full_parameters():
            parts = (
                (n, tensors[n].detach() if self._replica == 0 and stages[n] == local_model.stage else None)
                for n in names
            )
            return self._sum_parts(parts)

    def gradients(self, names: Iterable[str], *, present: bool = False) -> dict[str, Tensor | None]:
        """Return full gradients of parameters on every worker's CPU; None for a parameter without a gradient.

        Args:
            names: canonical names of parameters, the same on every worker.
            present: whether all of them are known to have a gradient somewhere.
        """
        local_model, shards = self._local_model, self._local_model.shards
        names, parameters, parts = list(names), self._tensors.parameters(), dict[str, Tensor]()
        for name in names:
            # Of the workers that hold the same shard of a gradient, exactly one contributes it to the sum.
            counts = shards.is_counted if name in shards.buffer_of else self._replica == 0
            gradient = shards.local_gradient(name, parameters[name]) if counts else None
            if gradient is not None and local_model.stage == min(local_model.owning_stages[name]):
                parts[name] = densify(gradient.detach())
        if local_model.transport.size == 1:
            return {name: parts[name].to("cpu", copy=True) if name in parts else None for name in names}
        # Only the union of names is summed: a gradient that is missing everywhere is None, not zeros.
        present_names = names if present else set().union(*local_model.transport.all_gather_object(list(parts)))
        full = self._sum_parts((name, parts.get(name)) for name in names if name in present_names)
        return {name: full.get(name) for name in names}

    def _sum_parts(self, parts: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
        """Return full tensors by name, on the CPU: sums of all workers' parts; None for a part adds nothing."""
        transport, device = self._local_model.transport, self._local_model.world.device
        tensors, pairs = {**self._tensors.parameters(), **self._tensors.buffers()}, list(parts)

        def summands() -> Iterator[Tensor]:
            for name, part in pairs:
                like = torch.empty(0, dtype=tensors[name].dtype, device=device)
                yield self._shard_spec.full_summand(name, None if part is None else part.to(device), like)

        sums = weights.sum_over_ranks(summands(), transport, range(transport.size))
        return {name: value.cpu() for (name, _), value in zip(pairs, sums, strict=True)}

    @contextmanager
    def installed_in_model(self) -> Iterator[None]:
        """Context manager: the model has full parameters and buffers, as the user's own code expects.

        A model that was built on the meta device has meta tensors of the full shapes: its full values do not fit a
        worker.
        """
        if self._local_model.was_on_meta:
            with whole_shapes_only(self._tensors.model, self._shard_spec.shapes):
                yield
            return
        with self._local_model.shards.full_parameters(), self._full_values():
            yield

    @contextmanager
    def _full_values(self) -> Iterator[None]:
        parameters, local_names = self._tensors.parameters(), self._local_model.local_names()
        shards, wholes = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in {**parameters, **self._tensors.buffers()}.items():
            if name in local_names and self._shard_spec.is_sharded(name):
                shards[name] = tensor.data if name in parameters else tensor
                padded = self._shard_spec.pad_to_full(name, shards[name])
                wholes[name] = self._local_model.transport.all_reduce(padded, self._mesh).wait()
        # A shard's gradient does not fit the full shape: set it aside while the full value is installed.
        gradients = {name: parameters[name].grad for name in shards if name in parameters}
        for name in gradients:
            parameters[name].grad = None
        self._tensors.replace_values(wholes)
        try:
            yield
        finally:
            self._tensors.replace_values(shards)
            for name, gradient in gradients.items():
                parameters[name].grad = gradient
