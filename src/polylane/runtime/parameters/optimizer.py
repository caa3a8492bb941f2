"""Gradient-norm clipping over sharded parameters, and the user's optimizer and scheduler on one worker's shards."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import Objective, needs_metric
from polylane.compile.optimizer_parts import replace_parameters
from polylane.compile.optimizer_sequence import OptimizerSequence, schedulers_in
from polylane.compile.optimizer_trials import empty_groups_clipped
from polylane.compile.user_objects import OptimizerObject
from polylane.errors import INTERRUPTIONS, PolylaneError, describe_error
from polylane.graph.python_state.own_objects import is_users
from polylane.graph.python_state.random_generators import seeded
from polylane.optim.modes import set_mode
from polylane.runtime.workers.failure import is_peer_loss
from polylane.runtime.workers.out_of_memory import is_out_of_memory


def build_optimizer(
    objective: Objective, held_pairs: Sequence[tuple[str, nn.Parameter]], all_pairs: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return the user's optimizer over this worker's parameters.

    The factory sees all parameters, so that groups chosen by name, position or count come out as on one device; the
    parameters of other workers are then removed from the groups. A group may be empty here.

    Args:
        objective: the user's objective, which has the optimizer's factory.
        held_pairs: (name, parameter) of this worker's parameters that the objective trains.
        all_pairs: (name, parameter) of all parameters of the model, in its order.
    """
    source = objective.given_optimizer
    optimizer = source.take(all_pairs) if isinstance(source, OptimizerObject) else objective.optimizer(list(all_pairs))
    held_ids = {id(parameter) for _, parameter in held_pairs}
    replace_parameters(optimizer, {parameter: None for _, parameter in all_pairs if id(parameter) not in held_ids})
    return optimizer


def set_optimizer_mode(optimizer: Any, training: bool) -> bool:
    """Call an optimizer's own ``train()`` or ``eval()``, if it has both; return whether it has.

    Raises:
        PolylaneError: the user's method raised an exception.
    """
    with _blamed_on("optimizer.train()" if training else "optimizer.eval()"):
        return set_mode(optimizer, training)


def step_optimizer(optimizer: torch.optim.Optimizer, key: tuple[int, ...] | None = None) -> None:
    """Take one step of the user's optimizer.

    Where this worker holds none of its parameters there is nothing to update. It still steps, for what it counts in its
    groups, for its scheduler and for sums with other workers; but code that was written for some parameters, as that of
    torch's foreach functions, may raise on none, which is of no consequence then.

    Args:
        optimizer: the user's optimizer, on this worker's parameters.
        key: what the random numbers depend on that an optimizer of the user's draws (the training's seed and the number
            of the step), so that all replicas draw the same; None: they are as the process has them.

    Raises:
        PolylaneError: it raised, other than for a lost worker or for want of memory.
    """
    if isinstance(optimizer, OptimizerSequence):
        optimizer.step_one = partial(_step_one, key=key)
        optimizer.step()
    else:
        _step_one(optimizer, key)


def _step_one(optimizer: torch.optim.Optimizer, key: tuple[int, ...] | None) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    try:
        draws = seeded(*key) if key is not None and _may_draw(optimizer) else nullcontext()
        with _blamed_on("optimizer.step()"), draws, nullcontext() if all(sizes) else empty_groups_clipped():
            optimizer.step()
    except PolylaneError as error:
        if any(sizes) and not all(sizes):
            raise PolylaneError(
                f"{error}; this worker holds no parameter of param_groups[{sizes.index(0)}]: let step() pass over "
                "groups without parameters, as those of torch do"
            ) from error
        if any(sizes) or getattr(optimizer, "sum_over_holders", None) is not None:
            raise


def _may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether code of the user's runs in a step: torch's own optimizers draw nothing."""
    hooks = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    return any(hooks) or not type(optimizer).__module__.startswith(("torch.optim", "polylane."))


def step_scheduler(scheduler: Any, loss: float | None = None) -> None:
    """Take one step of the user's learning-rate scheduler.

    Args:
        scheduler: the scheduler; None where there is none.
        loss: the step's loss, for a scheduler that needs a metric (:func:`needs_metric`).

    Raises:
        PolylaneError: the user's method raised an exception.
    """
    for member in schedulers_in(scheduler):
        with _blamed_on("scheduler.step()"):
            member.step(loss) if loss is not None and needs_metric(member) else member.step()


@contextmanager
def _blamed_on(call: str) -> Iterator[None]:
    """Context manager: turn an exception of the user's optimizer or scheduler into one sentence with their line."""
    try:
        yield
    except (PolylaneError, SystemExit, *INTERRUPTIONS):  # who leaves is named as such
        raise
    except BaseException as error:
        if is_peer_loss(error) or is_out_of_memory(error):
            raise
        lines = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
        location = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
        raise PolylaneError(f"{call} raised {describe_error(error)}{location}") from error


@dataclass
class SumOverMesh:
    """Sums of per-parameter values over all shards, for optimizers that need them (``SumOverHolders``).

    Every worker contributes one table with a row for each parameter of the model, so that one all-reduce of fixed shape
    serves all workers, whichever parameters they hold.

    Attributes:
        order: canonical names of all parameters that any worker may have a value of, in the model's order.
        counted: names whose shard this worker contributes; each distinct shard has one contributor in a replica.
        held: this worker's parameters or shards, by canonical name.
        device: device on which this worker computes and sums.
        sum_replica: all-reduces a tensor over the workers of this replica.
    """

    order: Sequence[str]
    counted: Sequence[str]
    held: Mapping[str, nn.Parameter]
    device: torch.device
    sum_replica: Callable[[Tensor], Tensor]

    @cached_property
    def _row_of(self) -> dict[int, int]:
        return {id(self.held[name]): row for row, name in enumerate(self.order) if name in self.held}

    @cached_property
    def _counted_ids(self) -> set[int]:
        return {id(self.held[name]) for name in self.counted}

    def __call__(self, parameters: Sequence[Tensor], values: Tensor) -> Tensor:
        """Return for each parameter the sums over all of its shards.

        Args:
            parameters: this worker's parameters or shards, as the optimizer has them.
            values: [len(parameters), 2], this worker's sums over each of its shards.
        """
        table = torch.zeros(len(self.order), 2, dtype=torch.float64, device=self.device)
        counted = [i for i, parameter in enumerate(parameters) if id(parameter) in self._counted_ids]
        table[[self._row_of[id(parameters[i])] for i in counted]] = values[counted].to(self.device)
        return self.sum_replica(table)[[self._row_of[id(parameter)] for parameter in parameters]]


class GradientClipper:
    """Scales gradients so that their norm over the full model stays within a bound, as torch's ``clip_grad_norm_``.

    The squared norms of single parameters are collected in the model's order before they are combined, so the result
    does not depend on how parameters are spread over workers.

    Args:
        max_norm: upper bound on the 2-norm of all gradients.
        sums: sums over all shards of the parameters that get a gradient.
    """

    def __init__(self, max_norm: float, sums: SumOverMesh) -> None:
        self._max_norm, self._sums = max_norm, sums
        self._position = {name: i for i, name in enumerate(sums.order)}
        # Positions of the gradients that were present in the latest step, and the same on the device: a list would be
        # copied there in each step, behind all kernels.
        self._present: tuple[list[int], Tensor] = [], torch.empty(0, dtype=torch.long)

    def clip_gradients(self) -> None:
        """Scale the gradients of this worker's parameters in place; a collective of the replica."""
        sums, parameters = self._sums, list(self._sums.held.values())
        counted = [(self._position[name], sums.held[name].grad) for name in sums.counted]
        present = [(i, grad) for i, grad in counted if grad is not None]
        dtype = torch.promote_types(parameters[0].dtype, torch.float32) if parameters else torch.float64
        squares = torch.zeros(len(self._position), dtype=torch.float64, device=sums.device)
        if present:
            norms = torch._foreach_norm([grad for _, grad in present], 2.0)
            # Squared in float64, and the root taken there, a norm of single precision comes back as it was.
            squares[self._index_present([i for i, _ in present])] = torch.stack(norms).double().square()
        # A norm per parameter first, then the norm of these: the same two steps as clip_grad_norm_ on one device.
        total = torch.linalg.vector_norm(sums.sum_replica(squares).sqrt().to(dtype))
        if any(parameter.grad is not None for parameter in parameters):
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, total)

    def _index_present(self, positions: list[int]) -> Tensor:
        if positions != self._present[0]:
            self._present = positions, torch.tensor(positions, device=self._sums.device)
        return self._present[1]
