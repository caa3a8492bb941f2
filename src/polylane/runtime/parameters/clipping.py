"""The user's optimizer on what this worker holds of the parameters, and norms over all workers that hold parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import Objective, SchedulerFactory
from polylane.errors import PolylaneError


def build_optimizer(
    objective: Objective, held: Sequence[tuple[str, nn.Parameter]], every: Sequence[tuple[str, nn.Parameter]]
) -> Any:
    """The optimizer over the held parameters among those that the user's factory takes.

    The factory sees all parameters, so that whatever it decides by name, position or count comes out as on one device;
    what other workers hold is then left out of the groups. A group may be empty here.
    """
    optimizer = objective.optimizer(list(every))
    mine = {id(parameter) for _, parameter in held}
    for group in optimizer.param_groups:
        keep = [i for i, parameter in enumerate(group["params"]) if id(parameter) in mine]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][i] for i in keep]
        group["params"] = [group["params"][i] for i in keep]
    for parameter in [p for p in optimizer.state if id(p) not in mine]:
        del optimizer.state[parameter]  # some optimizers make their state at once
    return optimizer


def build_scheduler(factory: SchedulerFactory | None, optimizer: torch.optim.Optimizer) -> Any:
    """What the user's factory makes of an optimizer; None where it makes none, or without a factory.

    Raises:
        PolylaneError: it is no scheduler, or one that wants to know a metric.
    """
    if factory is None:
        return None
    scheduler = factory(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise PolylaneError(
            "scheduler(optimizer): ReduceLROnPlateau steps on a metric, not on steps: leave it out here, make it "
            "of job.optimizer, and step it after each evaluation"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise PolylaneError(
            f"scheduler(optimizer) must return a learning-rate scheduler, with a step(), not a "
            f"{type(scheduler).__name__}: torch.optim.lr_scheduler.LambdaLR makes one of a function of the step"
        )
    return scheduler


class SumOverMesh:
    """What :class:`polylane.optim.SumOverHolders` asks for, where operators are split: sums over a replica's workers.

    All workers sum one table, with a row for every parameter in the model's order, whichever of them they hold.

    Args:
        order: canonical names of all parameters that the optimizers of all workers may name, in the model's order.
        counted: names of which this worker's part counts; every part counts at one worker of a replica.
        held: this worker's parameters.
        device: where this worker computes.
        sum_replica: sums a tensor over all workers of this replica.
    """

    def __init__(
        self,
        order: Sequence[str],
        counted: Sequence[str],
        held: Mapping[str, nn.Parameter],
        device: torch.device,
        sum_replica: Callable[[Tensor], Tensor],
    ) -> None:
        self._row_of = {id(held[name]): row for row, name in enumerate(order) if name in held}
        self._is_counted = {id(held[name]) for name in counted}
        self._row_count = len(order)
        self._device = device
        self._sum_replica = sum_replica

    def __call__(self, parameters: Sequence[Tensor], values: Tensor) -> Tensor:
        """Sums over the whole parameters of what ``values`` has of their parts."""
        table = torch.zeros(self._row_count, 2, dtype=torch.float64, device=self._device)
        counted = [i for i, parameter in enumerate(parameters) if id(parameter) in self._is_counted]
        table[[self._row_of[id(parameters[i])] for i in counted]] = values[counted].to(self._device)
        return self._sum_replica(table)[[self._row_of[id(parameter)] for parameter in parameters]]


class GradientClipper:
    """Scales gradients so that their norm over the whole model stays within a bound, as torch's clip_grad_norm_ does.

    The norms of single parameters are collected in the model's order before they are combined, so the result does not
    depend on how the parameters are spread.

    Args:
        max_norm: the bound on the 2-norm.
        order: canonical names of all parameters that get a gradient, in the model's order.
        counted: names whose norm this worker contributes, or that of its part; every part is contributed by one worker
            of a replica.
        held: this worker's parameters.
        device: where this worker computes.
        sum_replica: sums a vector over all workers of this replica.
    """

    def __init__(
        self,
        max_norm: float,
        order: Sequence[str],
        counted: Sequence[str],
        held: Mapping[str, nn.Parameter],
        device: torch.device,
        sum_replica: Callable[[Tensor], Tensor],
    ) -> None:
        self._max_norm = max_norm
        self._position = {name: i for i, name in enumerate(order)}
        self._counted_names = counted
        self._local_parameters = held
        self._device = device
        self._sum_replica = sum_replica

    def clip_gradients(self) -> None:
        """Scale the gradients of the held parameters."""
        grads = [p.grad for p in self._local_parameters.values() if p.grad is not None]
        counted = [(self._position[name], self._local_parameters[name].grad) for name in self._counted_names]
        present = [(i, grad) for i, grad in counted if grad is not None]
        like = next(iter(self._local_parameters.values()), None)
        dtype = torch.float64 if like is None else torch.promote_types(like.dtype, torch.float32)
        squares = torch.zeros(len(self._position), dtype=torch.float64, device=self._device)
        if present:
            own = torch._foreach_norm([grad for _, grad in present], 2.0)
            # Squared in float64, and the root taken there, a norm of single precision comes back as it was.
            squares[[i for i, _ in present]] = torch.stack(own).double().square()
        total = torch.linalg.vector_norm(self._sum_replica(squares).sqrt().to(dtype))
        if grads:
            torch.nn.utils.clip_grads_with_norm_(list(self._local_parameters.values()), self._max_norm, total)
