"""Training state of one worker: all that determines how training continues, collected for a checkpoint and restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.state.held_tensors import WorkerState, whole_region
from polylane.runtime.state.model_state import model_tensors, optimized_parts, speaks_for, state_dict_names
from polylane.runtime.state.optimizer_attributes import collect_attributes, restore_attributes
from polylane.runtime.state.optimizer_state import (
    collect_counts,
    collect_optimizer,
    collect_options,
    restore_optimizer,
    restore_options,
)
from polylane.runtime.state.python_state import collect_python_state, restore_python_state
from polylane.runtime.state.random_state import collect_generators, restore_generators
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.sync.gradient_sync import GradientSync
from polylane.runtime.sync.objective_update import ObjectiveUpdate, restore_scales
from polylane.runtime.sync.required_gradients import RequiredGradients
from polylane.runtime.workers.world import World


class WorkerTrainingState:
    """Collects and restores the state of one worker that trains.

    Args:
        local_model: the worker's parameters and buffers.
        updates: optimizers and schedulers, by the name of the objective.
        sync: the worker's gradient synchronization.
        required: which parameters require a gradient.

    Attributes:
        replica: number of this worker's replica.
        replicas: number of replicas of its stage.
    """

    def __init__(
        self,
        local_model: LocalModel,
        updates: Mapping[str, ObjectiveUpdate],
        sync: GradientSync,
        required: RequiredGradients,
    ) -> None:
        self._local_model, self._updates, self._sync, self._required = local_model, updates, sync, required
        plan = local_model.prepared.plan
        self.replica = plan.stage_and_replica(local_model.world.rank)[1]
        self.replicas = plan.degree("data", local_model.stage)
        # Weights, buffers and momenta of local SGD are each replica's own.
        self._variant = f"@{self.replica}" if plan.sync.every > 1 else ""
        # Running statistics of asynchronous replicas are, whose weights are the servers'.
        self._buffer_variant = f"@{self.replica}" if plan.sync.is_replica_local else ""

    def collect(self) -> WorkerState:
        """Return what this worker adds to a checkpoint.

        Raises:
            PolylaneError: a state of an optimizer or scheduler is of a type that no file has.
        """
        state, local_model = WorkerState(), self._local_model
        on_servers = self._sync.server_parameters
        for tensor in model_tensors(local_model):
            name = tensor.name.partition("/")[2]
            if speaks_for(local_model, name) and name not in on_servers:
                state.add(tensor.name + self._variant_of(name), tensor.region, tensor.local)
        for name, update in self._updates.items():
            if not on_servers:
                state.extend(self._collect_optimizer(name, update))
            if local_model.world.rank == 0:
                state.plain |= collect_options(name, update.optimizer, update.scheduler)
                if update.loss_scale is not None:
                    state.plain[f"loss_scale/{name}"] = update.loss_scale.collect()
        state.extend(self._sync.collect_state(self.replica))
        for name, update in self._updates.items():
            state.extend(update.compressor.collect_state(name, local_model, self.replica))
        state.extend(_collect_random(local_model.world))
        state.plain |= collect_python_state(local_model, self.replica)
        if local_model.world.rank == 0:
            state.plain |= {"replicas": self.replicas, "weights": state_dict_names(local_model)}
            state.plain["requires_grad"] = self._required.turned_names()
        return state

    def restore(self, saved: SavedState) -> None:
        """Make the state of this worker that of a checkpoint.

        Raises:
            PolylaneError: it is of another model or optimizer, or damaged.
        """
        local_model = self._local_model
        # Before anything is overwritten: a checkpoint of another model leaves this one as it was.
        saved.refuse_other_weights(state_dict_names(local_model))
        for tensor in model_tensors(local_model):
            name = tensor.name.partition("/")[2]
            saved.fill(tensor.name + self._variant_of(name), tensor.region, tensor.local)
        local_model.buffers.mark_restored(local_model.stages_of_buffers())
        for name, update in self._updates.items():
            restore_options(name, update.optimizer, update.scheduler, saved.plain)
            if not self._sync.server_parameters:
                built, parts = update.optimizer, optimized_parts(local_model, update.local_parameters)
                restore_optimizer(name, built, parts, saved.plain, saved.fill, self._variant)
                names = self._names_of(update)
                restore_attributes(name, built, names, parts, saved.plain, saved.fill, self._variant)
        restore_scales(self._updates, saved.plain)
        self._required.restore(saved.plain.get("requires_grad", {}))
        self._sync.restore_state(saved, self.replica)
        restore_python_state(local_model.prepared, local_model.tensors.model, self.replica, saved.plain)
        for name, update in self._updates.items():
            update.compressor.restore_state(name, local_model, self.replica, saved)
        # Under another plan ranks have other work, and none of the saved generators is this rank's.
        if saved.was_saved_by(local_model.prepared.plan):
            _restore_random(local_model.world, saved)

    def _collect_optimizer(self, name: str, update: ObjectiveUpdate) -> WorkerState:
        """Return what an optimizer that steps here remembers: its state by parameter, and beside it."""
        local_model, built = self._local_model, update.optimizer
        parts, trained = optimized_parts(local_model, update.local_parameters), local_model.prepared.trained_names(name)
        is_whole = parts.keys() >= set(trained) and all(part.region.is_whole for part in parts.values())
        counted_parts = {n: part for n, part in parts.items() if speaks_for(local_model, n)}
        state, names = collect_optimizer(name, built, counted_parts, self._variant), self._names_of(update)
        state.extend(collect_attributes(name, built, names, parts, self._speaks, is_whole, self._variant))
        if local_model.world.rank == 0:
            state.plain |= collect_counts(name, built)
        return state

    def _names_of(self, update: ObjectiveUpdate) -> dict[int, str]:
        """Return the names of all parameters by the ids of the model's own, and of what the optimizer has for them."""
        named = (*self._local_model.tensors.parameters().items(), *update.local_parameters.items())
        return {id(parameter): name for name, parameter in named}

    def _speaks(self, name: str) -> bool:
        """Return whether this worker saves what an optimizer keeps for a parameter; ``""``: for no single parameter."""
        local_model = self._local_model
        if not name:
            return local_model.world.rank == 0 or bool(self._variant)
        return name in local_model.local_names() and speaks_for(local_model, name)

    def _variant_of(self, name: str) -> str:
        is_buffer = name not in self._local_model.owning_stages
        if is_buffer and name not in self._local_model.tensors.buffers():
            return ""
        return self._buffer_variant if is_buffer else self._variant


# ---- random numbers --------------------------------------------------------------------------------------------------


def _collect_random(world: World) -> WorkerState:
    """Return the states of this process's generators, from which the user's own code may draw."""
    state, rank = WorkerState(), world.rank
    for name, value in collect_generators(world.accelerator).items():
        if isinstance(value, torch.Tensor):
            state.add(f"random/{name}/{rank}", whole_region(value.shape), value)
        else:
            state.plain[f"random/{name}/{rank}"] = value
    return state


def _restore_random(world: World, saved: SavedState) -> None:
    states, rank = dict[str, Any](), world.rank
    for name, value in collect_generators(world.accelerator).items():
        path = f"random/{name}/{rank}"
        if not isinstance(value, torch.Tensor):
            states |= {name: saved.plain[path]} if path in saved.plain else {}
        elif saved.has(path):
            saved.fill(path, whole_region(value.shape), value)
            states[name] = value
    restore_generators(states, world.accelerator)
