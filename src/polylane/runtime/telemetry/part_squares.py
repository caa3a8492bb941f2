"""Squared norms of the gradients of parts, on one worker: hooks see each parameter's gradient before it is added up.

A hook on a parameter is called in every backward pass with all of its gradient in that pass, whatever then happens to
it: it may be added to that of earlier microbatches, reduce-scattered and freed (ZeRO), or computed in a second half of
the pass. Where it is a summand (replicated parameters of split operators, weights tied between stages), it is kept
until the ranks with the others have summed it. A parameter counts on one worker; the squares of all workers add up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from polylane.graph.python_state.gradient_hooks import OwnHook
from polylane.graph.sparse_gradients import densify
from polylane.runtime.connections.byte_counters import NORMS
from polylane.runtime.sync.flat_packing import flatten_tensors, split_views
from polylane.runtime.telemetry.part_layout import PartialSum, PartLayout
from polylane.runtime.telemetry.preconditioner import AdamPreconditioner
from polylane.runtime.transport.protocol import Transport
from polylane.schedule.action import WEIGHT_PASSES, Action


class PartSquares:
    """Measures the parts that one worker computes in one step.

    Args:
        layout: the parts of the batch.
        replica: index of this worker's replica.
        parameters: this worker's trained parameters by canonical name, in the shapes that its passes compute with.
        counted: names of the parameters that count on this worker: each part of the model has one worker for that.
        sums: what is summed over ranks before it is squared.
        transport: connects all training workers, with a group for each sum.
        device: of this worker's tensors.
        precondition: of a second measure of the same gradients, as an optimizer divides them; None without.

    Attributes:
        layout: the parts of the batch.
        precondition: returns the divisors of gradients; None where there is no second measure.
        seconds: time that measuring has taken so far.
    """

    def __init__(
        self,
        layout: PartLayout,
        replica: int,
        parameters: Mapping[str, nn.Parameter],
        counted: frozenset[str],
        sums: Sequence[PartialSum],
        transport: Transport,
        device: torch.device,
        precondition: AdamPreconditioner | None = None,
    ) -> None:
        self.layout, self._replica, self._parameters, self._counted = layout, replica, parameters, counted
        self._sums, self._transport, self.precondition = sums, transport, precondition
        self._summed_names = frozenset(name for sum_ in sums for name in sum_.names)
        self._device, self.seconds = device, 0.0
        # Norms of parameters by part: plain ones, and those of preconditioned gradients.
        self._norms: tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]] = {}, {}
        self._microbatch: int | None = None
        self._summands: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Context manager of a step: its hooks are on the parameters."""
        handles = [
            parameter.register_hook(OwnHook(partial(self._note, name)))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and (name in self._counted or name in self._summed_names)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def measuring_pass(self, action: Action) -> Iterator[None]:
        """Context manager of a backward pass, or of a half of one.

        Behind the one that completes a stage's gradients of a part, what other ranks have summands of is summed.

        Args:
            action: the pass that runs inside.
        """
        assert action.microbatch is not None
        self._microbatch = action.microbatch
        yield
        self._microbatch, began = None, time.perf_counter()
        if action.kind in WEIGHT_PASSES:
            for partial_sum in self._sums:
                if partial_sum.stage == action.stage:
                    self._square_sum(partial_sum, action.microbatch)
        self.seconds += time.perf_counter() - began

    def end_step(self, microbatches: Sequence[int]) -> None:
        """Sum what could not be summed behind its pass; the ranks of each sum call it with the same microbatches.

        Args:
            microbatches: those that this worker computes on; where parts are joint, all of the batch.
        """
        for partial_sum in self._sums:
            if partial_sum.stage is None:
                for microbatch in microbatches:
                    self._square_sum(partial_sum, microbatch)

    def _note(self, name: str, gradient: Tensor) -> None:
        if (microbatch := self._microbatch) is None:
            return
        began = time.perf_counter()
        if name in self._summed_names:
            # Copied: autograd may make the parameter's gradient of this tensor, and add to it in place.
            earlier, summand = self._summands.pop((name, microbatch), None), gradient.detach().clone()
            self._summands[name, microbatch] = summand if earlier is None else densify(earlier) + densify(summand)
        else:
            self._add_square(name, microbatch, gradient.detach())
        self.seconds += time.perf_counter() - began

    def _square_sum(self, partial_sum: PartialSum, microbatch: int) -> None:
        parameters = [self._parameters[name] for name in partial_sum.names]
        summands = [self._summands.pop((name, microbatch), None) for name in partial_sum.names]
        if len(partial_sum.ranks) == 1:
            totals = [None if summand is None else densify(summand) for summand in summands]
        else:
            # As for the sum of the step: a rank without a gradient, or whose gradient another one has, adds zeros.
            vector = flatten_tensors(
                [
                    torch.zeros_like(parameter) if summand is None or partial_sum.is_silent else densify(summand)
                    for summand, parameter in zip(summands, parameters, strict=True)
                ]
            )
            del summands
            counters, start_bytes = self._transport.counters, self._transport.counters.sent
            vector = self._transport.all_reduce(vector, partial_sum.ranks).wait()
            # Norms say nothing of what replicas must agree on, which theory knows.
            counters.move_sent("all_reduce", NORMS, counters.sent - start_bytes)
            totals = list(split_views(vector, [parameter.shape for parameter in parameters]))
        for name, total in zip(partial_sum.names, totals, strict=True):
            if name in self._counted and total is not None:
                self._add_square(name, microbatch, total)

    def _add_square(self, name: str, microbatch: int, gradient: Tensor) -> None:
        part = self.layout.part_of(self._replica, microbatch)
        self._norms[0].setdefault(part, []).append(norm(gradient))
        if self.precondition is not None:
            self._norms[1].setdefault(part, []).append(norm(divide(gradient, self.precondition(name))))

    def squares(self) -> Tensor:
        """Return this worker's share of every part's squared norm: [2, parts], plain and preconditioned, float64."""
        result = torch.zeros(2, self.layout.parts, dtype=torch.float64, device=self._device)
        for row, norms_of_parts in enumerate(self._norms):
            for part, norms in norms_of_parts.items():
                result[row, part] = torch.stack(norms).double().square().sum()
        return result


def divide(gradient: Tensor, divisor: Tensor | None) -> Tensor:
    """Return a gradient over a tensor of its shape; NaN where that is not known.

    Args:
        gradient: dense, or sparse with rows that may repeat.
        divisor: by what its elements are divided; None: it is not known.
    """
    return gradient.new_full((), torch.nan) if divisor is None else densify(gradient) / divisor


def norm(gradient: Tensor) -> Tensor:
    """Return the 2-norm of a gradient, a scalar on its device, in single precision at least.

    The spread is a difference of squares: of norms in bfloat16, as torch returns them, nothing would be left.

    Args:
        gradient: dense, or sparse with rows that may repeat.
    """
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    result: Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return result
