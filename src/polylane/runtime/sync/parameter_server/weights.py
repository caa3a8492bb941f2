"""Weights of a parameter server, with the user's own optimizers and schedulers on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.runtime.parameters import clipping as optimizer
from polylane.runtime.parameters.clipping import GradientClipper
from polylane.runtime.transport.serialization import decode, encode

_PLAIN = (bool, int, float, str, type(None))


@dataclass
class ObjectiveState:
    """One objective on a server.

    Attributes:
        parameters: the parameters that it trains, of those that the server holds.
        optimizer, scheduler: the user's own; the one of ``held``, the other of its rates, or None.
        clipper: bounds the norm of sums of gradients over all servers, or None.
        updates: number of updates so far.
        latest_version: the server's version after the last of them.
    """

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    scheduler: Any
    clipper: GradientClipper | None = None
    updates: int = 0
    latest_version: int = 0

    def apply_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """What one device does after its backward pass."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        if self.clipper is not None:
            self.clipper.clip_gradients()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.updates += 1


@dataclass
class ServerWeights:
    """A server's part of the model: whole parameters, in memory of its own.

    Attributes:
        parameters: whole ones, by canonical name.
        objectives: by the name of an objective.
    """

    parameters: dict[str, nn.Parameter]
    objectives: dict[str, ObjectiveState] = field(default_factory=dict)

    @classmethod
    def from_values(
        cls,
        values: Mapping[str, Tensor],
        model: Mapping[str, nn.Parameter],
        shapes: Mapping[str, Sequence[int]],
        objectives: Mapping[str, Objective],
        trained: Mapping[str, Collection[str]],
        device: torch.device,
    ) -> ServerWeights:
        """The weights that a training begins with, and its optimizers.

        Args:
            values: of the server's parameters.
            model: all of the model's, for their names, types and whether they are trained at all.
            shapes: of whole parameters, by name; those of the model may be parts.
            objectives: the user's losses and optimizer factories, by name.
            trained: by objective, the parameters that get gradients.
            device: where the server computes.

        Raises:
            PolylaneError: an optimizer takes other parameters than those that it is given.
        """
        held = {name: nn.Parameter(values[name].to(device)) for name in model if name in values}
        # The user's factory sees all parameters; those of other servers have their shape, and no memory.
        every = [
            (n, held[n] if n in held else _parameter_of_shape(p, shapes.get(n, p.shape), device))
            for n, p in model.items()
        ]
        weights = cls(held)
        for name, objective in objectives.items():
            built = _build_optimizer(objective, [(n, p) for n, p in held.items() if n in trained[name]], every)
            own = {n: p for n, p in held.items() if n in trained[name]}
            weights.objectives[name] = ObjectiveState(own, built, objective.scheduler and objective.scheduler(built))
        return weights


def _parameter_of_shape(parameter: nn.Parameter, shape: Sequence[int], device: torch.device) -> nn.Parameter:
    empty = torch.zeros((), dtype=parameter.dtype, device=device).expand(tuple(shape))
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _build_optimizer(
    objective: Objective, held: Sequence[tuple[str, nn.Parameter]], every: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    built: torch.optim.Optimizer = optimizer.build_optimizer(objective, held, every)
    taken = {id(parameter) for group in built.param_groups for parameter in group["params"]}
    if not {id(parameter) for _, parameter in held} <= taken:
        raise PolylaneError(
            "optimizer(parameters) must optimize the parameters that it is given: a parameter server has weights of "
            "its own, not those of the model that the function may remember"
        )
    return built


def encode_options(built: torch.optim.Optimizer) -> bytes:
    """The plain options of an optimizer's groups (rates, momenta), which a user may change in the midst of training."""
    return encode([{key: v for key, v in group.items() if _is_plain(v)} for group in built.param_groups])


def load_options(built: torch.optim.Optimizer, options: bytes) -> None:
    """Give an optimizer what :func:`encode_options` read from another one, made by the same function."""
    for group, values in zip(built.param_groups, decode(options), strict=True):
        group.update(values)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _PLAIN) or (isinstance(value, Tensor) and value.numel() == 1)
