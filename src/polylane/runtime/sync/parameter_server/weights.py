"""Weights of a parameter server: full parameters, with the user's own optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective, build_scheduler, named_parameters
from polylane.errors import PolylaneError
from polylane.runtime.parameters import optimizer as optimizer
from polylane.runtime.parameters.optimizer import GradientClipper, SumOverMesh
from polylane.runtime.plain_data.serialization import decode, encode
from polylane.runtime.state.held_tensors import WorkerState, whole_region
from polylane.runtime.state.model_state import PREFIX as MODEL_PREFIX
from polylane.runtime.state.optimizer_attributes import collect_attributes, restore_attributes
from polylane.runtime.state.optimizer_state import (
    OptimizedPart,
    collect_counts,
    collect_optimizer,
    restore_optimizer,
    restore_options,
)
from polylane.runtime.state.saved_state import SavedState

_PLAIN = (bool, int, float, str, type(None))


@dataclass
class ObjectiveState:
    """Optimizer state of one objective on a server.

    Attributes:
        parameters: the server's parameters that the objective trains, by canonical name.
        optimizer: the user's optimizer on ``parameters``.
        scheduler: the user's learning-rate scheduler of the optimizer, or None.
        trained: names of the parameters that the objective trains, of all servers.
        clipper: bounds the norm of summed gradients over all servers, or None.
        updates: number of updates of the objective so far.
        latest_version: the server's version after the latest update of the objective.
    """

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    scheduler: Any
    trained: list[str]
    clipper: GradientClipper | None = None
    updates: int = 0
    latest_version: int = 0

    @property
    def names(self) -> dict[int, str]:
        """Names of the server's parameters, by id."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def apply_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Clip, step the optimizer and the scheduler, as one device does after its backward pass."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        if self.clipper is not None:
            self.clipper.clip_gradients()
        optimizer.step_optimizer(self.optimizer, (self.updates,))
        optimizer.step_scheduler(self.scheduler)
        self.updates += 1


@dataclass
class ServerWeights:
    """A server's part of the model: full parameters, in memory of its own.

    Attributes:
        parameters: full parameters of this server, by canonical name.
        objectives: optimizer state of each objective, by its name.
    """

    parameters: dict[str, nn.Parameter]
    objectives: dict[str, ObjectiveState] = field(default_factory=dict)

    def collect_state(self) -> WorkerState:
        """Return parameters and optimizer states, for a checkpoint."""
        state = WorkerState()
        for name, parameter in self.parameters.items():
            state.add(MODEL_PREFIX + name, whole_region(parameter.shape), parameter)
        for name, objective_state in self.objectives.items():
            parts = _whole_parts(objective_state)
            state.extend(collect_optimizer(name, objective_state.optimizer, parts))
            is_whole, is_first = (
                parts.keys() >= set(objective_state.trained),
                parts.keys() >= set(objective_state.trained[:1]),
            )
            speaks_for = ({*parts, ""} if is_first else set(parts)).__contains__  # "" is what belongs to none
            state.extend(
                collect_attributes(name, objective_state.optimizer, objective_state.names, parts, speaks_for, is_whole)
            )
            if is_first:
                state.plain |= collect_counts(name, objective_state.optimizer)
        return state

    def restore_state(self, saved: SavedState) -> None:
        """Make parameters, optimizer states, options and schedulers those of a checkpoint."""
        for name, parameter in self.parameters.items():
            saved.fill(MODEL_PREFIX + name, whole_region(parameter.shape), parameter.data)
        for name, objective_state in self.objectives.items():
            parts = _whole_parts(objective_state)
            restore_optimizer(name, objective_state.optimizer, parts, saved.plain, saved.fill)
            restore_options(name, objective_state.optimizer, objective_state.scheduler, saved.plain)
            restore_attributes(name, objective_state.optimizer, objective_state.names, parts, saved.plain, saved.fill)


def _whole_parts(objective_state: ObjectiveState) -> dict[str, OptimizedPart]:
    return {name: OptimizedPart(p, whole_region(p.shape)) for name, p in objective_state.parameters.items()}


def build_weights(
    prepared: CompiledTraining,
    clip_norm: float | None,
    device: torch.device,
    sum_over_servers: Callable[[Tensor], Tensor],
    values: Mapping[str, Tensor],
) -> ServerWeights:
    """Build a server's weights, and the optimizers of all objectives, from its part of the initial weights.

    Args:
        prepared: the compiled training, equal on every worker.
        clip_norm: upper bound on the 2-norm of summed gradients, or None.
        device: device on which the server computes.
        sum_over_servers: sums a vector over all servers, for the norm of gradients.
        values: initial full values of the server's parameters, by canonical name.

    Raises:
        PolylaneError: an optimizer takes other parameters than those passed to its factory.
    """
    model = dict(named_parameters(prepared.model, prepared.losses))
    # The model of this process may have been sharded already: full shapes are those of the graphs.
    shapes: dict[str, Sequence[int]] = {}
    for partition in prepared.partitions.values():
        shapes |= {name: info.shape for name, info in partition.graph.parameters.items()}
    parameters = {name: nn.Parameter(values[name].to(device)) for name in model if name in values}
    # The user's factory sees all parameters, so that groups come out as on one device; those of other servers have
    # their shape but no memory.
    all_parameters = [
        (n, parameters[n] if n in parameters else _parameter_of_shape(p, shapes.get(n, p.shape), device))
        for n, p in model.items()
    ]
    weights = ServerWeights(parameters)
    for name, objective in prepared.objectives.items():
        trained = prepared.trained_names(name)
        trained_parameters = {n: p for n, p in parameters.items() if n in trained}
        built = _build_optimizer(objective, list(trained_parameters.items()), all_parameters)
        objective_state = ObjectiveState(
            trained_parameters, built, build_scheduler(objective.scheduler, built), trained
        )
        if clip_norm is not None:
            # The order of the model, not of this server: all servers sum one vector of norms.
            order = [n for n in model if n in trained]
            objective_state.clipper = GradientClipper(
                clip_norm, SumOverMesh(order, list(trained_parameters), trained_parameters, device, sum_over_servers)
            )
        weights.objectives[name] = objective_state
    return weights


def _parameter_of_shape(parameter: nn.Parameter, shape: Sequence[int], device: torch.device) -> nn.Parameter:
    empty = torch.zeros((), dtype=parameter.dtype, device=device).expand(tuple(shape))
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _build_optimizer(
    objective: Objective,
    parameters: Sequence[tuple[str, nn.Parameter]],
    all_parameters: Sequence[tuple[str, nn.Parameter]],
) -> torch.optim.Optimizer:
    built: torch.optim.Optimizer = optimizer.build_optimizer(objective, parameters, all_parameters)
    optimized_ids = {id(parameter) for group in built.param_groups for parameter in group["params"]}
    if not {id(parameter) for _, parameter in parameters} <= optimized_ids:
        raise PolylaneError(
            "optimizer(parameters) must optimize the parameters that it is given: a parameter server has weights of "
            "its own, not those of the model that the function may remember"
        )
    return built


def encode_options(built: torch.optim.Optimizer) -> bytes:
    """Encode the plain options of an optimizer's groups (rates, momenta), which a user may change during training."""
    return encode([{key: v for key, v in group.items() if _is_plain(v)} for group in built.param_groups])


def load_options(built: torch.optim.Optimizer, options: bytes) -> None:
    """Set an optimizer's options to those that :func:`encode_options` read from another one of the same factory."""
    for group, values in zip(built.param_groups, decode(options), strict=True):
        group.update(values)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN) or (isinstance(value, Tensor) and value.numel() == 1)
