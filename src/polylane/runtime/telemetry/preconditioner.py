"""Preconditioned gradients: divided as Adam divides its steps, by the root of its second moments.

Adam does not follow the gradient but the gradient over √v + ε, element by element; its noise scale is that of these
quotients (Qiao et al., OSDI 2021, section 3.1, as in AdaptDL's AdamGradientNoiseScale). An optimizer is known by its
state, not by its class: ``exp_avg_sq`` and ``step`` of a parameter, ``betas`` and ``eps`` of its group.

A step adds (1 - β₂) g² to v before it divides. An element that had hardly any gradient so far (a rare word's) would be
divided by ε otherwise, and count for more than all others: here each v has (1 - β₂) of its tensor's mean v more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polylane.runtime.connections.byte_counters import NORMS
from polylane.runtime.parameters.zero_shards import FlatBuffer
from polylane.runtime.sync.objective_update import ObjectiveUpdate
from polylane.runtime.transport.protocol import Transport

# Second moments of fewer steps say little: before that nothing is preconditioned.
FEWEST_STEPS = 5


def divides_gradients(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether all groups of one or more optimizers are those of Adam, of its variants, or built like it."""
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    groups = [group for member in optimizers for group in member.param_groups]
    return bool(groups) and all("betas" in group and "eps" in group for group in groups)


class AdamPreconditioner:
    """Returns by what an optimizer divides the gradients of a parameter.

    Args:
        update: of the objective whose gradients are divided, with a state for each parameter once it has made a step.
            Under ZeRO-1 and -2 its parts of parameters have one, and the divisors of whole ones are gathered.
        transport: connects all training workers; the shard groups are among its groups.
    """

    def __init__(self, update: ObjectiveUpdate, transport: Transport) -> None:
        self._update, self._transport = update, transport
        self._groups = {id(p): group for group in update.optimizer.param_groups for p in group["params"]}
        self._means = dict[str, Tensor]()
        self._divisors, self._gathered = dict[str, Tensor | None](), dict[str, Tensor]()

    def begin_step(self) -> None:
        """Learn what other workers have of whole parameters' second moments; collective over all that have some."""
        state, parameters = self._update.optimizer.state, self._update.local_parameters
        states = {name: state.get(parameter, {}) for name, parameter in parameters.items()}
        squares = {name: values["exp_avg_sq"] for name, values in states.items() if "exp_avg_sq" in values}
        device = next((square.device for square in squares.values()), torch.device("cpu"))
        rows = torch.zeros(len(squares), 2, dtype=torch.float64, device=device)
        for row, square in zip(rows, squares.values(), strict=True):
            row[0], row[1] = square.sum(dtype=torch.float64), square.numel()
        totals = self._update.sums([parameters[name] for name in squares], rows)
        self._means = {name: total / count for name, (total, count) in zip(squares, totals, strict=True)}
        # ZeRO-3 has whole parameters one unit at a time: their divisors would be as large as all of them.
        if not self._update.shards.keeps_only_shards:
            for flat in self._update.shards.flat_buffers:
                if any(name in self._update.full_parameters for name in flat.unit.parameters):
                    self._gather(flat)

    def _gather(self, flat: FlatBuffer) -> None:
        """Gather the divisors of a unit's whole parameters; NaN where one is not known."""
        dtype, parts = torch.promote_types(flat.shard.dtype, torch.float32), list[Tensor]()
        for name, part in flat.optimizer_parts.items():
            if part is not None:
                divisor = self.divide_local(name)
                unknown = flat.shard.new_full((part.end - part.begin,), torch.nan, dtype=dtype)
                parts.append(unknown if divisor is None else divisor.to(dtype).reshape(-1))
        shard = torch.cat(parts) if parts else flat.shard.new_empty(0, dtype=dtype)
        counters, start_bytes = self._transport.counters, self._transport.counters.sent
        vector = self._transport.all_gather(shard, flat.ranks, flat.sizes).wait()
        # Norms say nothing of what replicas must agree on, which theory knows.
        counters.move_sent("all_gather", NORMS, counters.sent - start_bytes)
        for name, parameter, (begin, end) in zip(flat.unit.parameters, flat.parameters, flat.spans, strict=True):
            self._gathered[name] = vector[begin:end].view(parameter.shape)

    def __call__(self, name: str) -> Tensor | None:
        """Return the divisor of a whole parameter's gradient, of its shape; None where there is none, or not yet.

        Args:
            name: canonical name of the parameter.
        """
        if name in self._update.shards.buffer_of:
            return self._gathered.get(name)
        return self.divide_local(name)

    def divide_local(self, name: str) -> Tensor | None:
        """Return the divisor of what this worker's optimizer has of a parameter; None where there is none, or not yet.

        Args:
            name: canonical name of the parameter.
        """
        if name not in self._divisors:
            parameter = self._update.local_parameters.get(name)
            self._divisors[name] = None if parameter is None else self._divide(name, parameter)
        return self._divisors[name]

    def _divide(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        state: Mapping[str, Any] = self._update.optimizer.state.get(parameter, {})
        group = self._groups.get(id(parameter))
        squares = state.get("exp_avg_sq")
        if group is None or squares is None or squares.shape != parameter.shape:
            return None
        steps = float(state.get("step", 0))
        if steps < FEWEST_STEPS:
            return None
        beta = float(group["betas"][1])
        added = (1 - beta) * self._means[name].to(squares.dtype)
        root = ((squares + added) / (1 - beta**steps)).sqrt_()
        divisor: Tensor = root.add_(group["eps"])
        return divisor
