"""Empty shards: ranks without a part skip the operator, but return gradients so that backward collectives match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.placement.placement import Placement, Shard
from polylane.placement.strategy import RankCall, Strategy


def nothing(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *tensors: Tensor) -> Any:
    """Return the result of an operator on a rank that has no part of its work.

    Every tensor gets a gradient of zeros, so that this rank takes part in the collectives of the backward pass.

    Args:
        shapes: local shape of every output; filled with zeros where it has elements (a partial sum).
        dtypes: dtype of every output.
        tensors: all tensors that the operator reads.
    """
    outs = _Nothing.apply(shapes, dtypes, *tensors)  # type: ignore[no-untyped-call]
    return outs[0] if len(outs) == 1 else outs


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.like = [(t.shape, t.dtype, t.device) for t in tensors]
        outs = tuple(
            torch.zeros(shape, dtype=dtype, device=tensors[0].device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        ctx.mark_non_differentiable(*(out for out in outs if not (out.is_floating_point() or out.is_complex())))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        return None, None, *(zeros if n else None for zeros, n in zip(gradients, ctx.needs_input_grad[2:], strict=True))


def covers_all_ranks(strategy: Strategy) -> bool:
    """Return whether every rank has a non-empty part of each sharded input."""
    return not any(map(has_empty_rank, strategy.inputs))


def has_empty_rank(placement: Placement) -> bool:
    """Return whether some rank has an empty part of a value with this placement."""
    return isinstance(placement, Shard) and not all(placement.ranges_by_rank)


def return_empty(edit: RankCall) -> None:
    """Make this rank's call return empty outputs, or zeros."""
    shapes = [edit.output_shape(out.index) for out in edit.call.outputs]
    # All tensor arguments are passed on: each must get a gradient, or a peer would wait for this rank's collective.
    tensors = [value for value in edit.arguments.values() if isinstance(value, fx.Node)]
    edit.replace(nothing, shapes, [out.dtype for out in edit.call.outputs], *tensors)


def skip_empty_ranks(strategy: Strategy) -> Strategy:
    """Return the strategy, changed to skip the operator on ranks with an empty part of any tensor.

    Its own ``local`` runs first.
    """
    placements, original = (*strategy.inputs, *strategy.outputs), strategy.local
    if not any(map(has_empty_rank, placements)):
        return strategy

    def local(edit: RankCall) -> None:
        if original is not None:
            original(edit)
        if any(isinstance(p, Shard) and not p.ranges(edit.index) for p in placements):
            return_empty(edit)

    return replace(strategy, local=local)
