"""ZeRO flat buffers: the concatenated parameters of a unit, of which each replica owns a shard.

Rajbhandari et al., SC 2020. Over n replicas, for P bytes of parameters and K of optimizer states, a worker holds beside
its activations

    shard         ZeRO    parameters    gradients    states    temporarily
    optimizer     1       P             P            K / n
    gradients     2       P             P / n        K / n     a unit's full gradients
    parameters    3       P / n         P / n        K / n     two full units

A unit of the parameters a and b over two ranks; both cuts of the buffer, by parameter and by rank, are independent:

    full_buffer           a a a a a a b b b b
    spans                 [a: 0 to 6 ][b: 6 to 10]
    bounds                [rank 0: 0 to 5][rank 1: 5 to 10]
    optimizer_parts       rank 0: elements 0 to 5 of a;    rank 1: elements 5 to 6 of a, all of b
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from polylane.compile.optimizer_parts import OptimizerPart, replace_parameters
from polylane.runtime.parameters.zero_units import ShardUnit
from polylane.runtime.transport.protocol import PendingTransfer, Transport

AHEAD = 2  # units whose all-gather after an update is pending at once: bounds the memory of full buffers


@dataclass
class FlatBuffer:
    """One unit's parameters concatenated in one vector, full or only this worker's shard.

    Attributes:
        unit: names of the parameters in the buffer, and how it is cut.
        ranks: ranks of the shard group, by the index of their shard.
        shard_index: index of this worker's shard, and of its rank in ``ranks``.
        parameters: the model's parameters, views of ``full_buffer`` while that exists, else of ``placeholder``.
        spans: (begin, end) of each parameter in the buffer, in elements.
        bounds: (begin, end) of each rank's shard in the buffer, in elements.
        shard: this worker's shard, 1-D; a view of ``full_buffer`` in ZeRO-1 and -2.
        optimizer_parts: what this worker updates of each parameter, by name; None for nothing of it.
        full_buffer: all shards, 1-D; None while only the shard is held (ZeRO-3). In a pass it may be in the dtype to
            which the pass casts the parameters; these are released then.
        placeholder: scalar NaN that stands for released parameters, expanded to their shapes.
        views: (tensor, offset, shape) of every alias of the flat buffer: the parameter itself, and its detached
            constant if the code of a stage uses one.
    """

    unit: ShardUnit
    ranks: tuple[int, ...]
    shard_index: int
    parameters: tuple[nn.Parameter, ...]
    spans: tuple[tuple[int, int], ...]
    bounds: tuple[tuple[int, int], ...]
    shard: Tensor
    optimizer_parts: dict[str, OptimizerPart | None] = field(default_factory=dict)
    full_buffer: Tensor | None = None
    views: list[tuple[Tensor, int, torch.Size]] = field(default_factory=list)
    placeholder: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.placeholder = empty_storage(self.shard, ())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each rank's shard."""
        return tuple(end - begin for begin, end in self.bounds)

    def start_all_gather(self, transport: Transport, dtype: torch.dtype | None = None) -> PendingTransfer:
        """Start the all-gather of the shards, cast to a dtype or as they are; a collective of ``ranks``."""
        return transport.all_gather(self.shard.to(dtype or self.shard.dtype), self.ranks, self.sizes)

    def attach_full(self, full_buffer: Tensor) -> None:
        """Make all parameters and their aliases views of a full buffer, 1-D, if it has their dtype."""
        self.full_buffer = full_buffer
        if full_buffer.dtype != self.shard.dtype:
            return
        for face, begin, shape in self.views:
            face.data = full_buffer[begin : begin + shape.numel()].view(shape)

    def full_view(self, name: str) -> Tensor:
        """Return a parameter's full value, as a view of the full buffer and in its dtype."""
        assert self.full_buffer is not None
        index = self.unit.parameters.index(name)
        return self.full_buffer[slice(*self.spans[index])].view(self.parameters[index].shape)

    def store_shard(self, shard: Tensor) -> None:
        """Make the optimizer's parameters views of a shard, which has their values."""
        self.shard, shard_begin = shard, self.bounds[self.shard_index][0]
        for (begin, _), piece in zip(self.spans, self.optimizer_parts.values(), strict=True):
            if piece is not None:
                at = begin + piece.begin - shard_begin
                piece.parameter.data = shard[at : at + piece.end - piece.begin].view(piece.parameter.shape)

    def release_full(self) -> None:
        """Release the full buffer: parameters keep their shapes, and read as NaN."""
        self.full_buffer = None
        for face, _, shape in self.views:
            face.data = self.placeholder.expand(shape)


def empty_storage(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of NaN of any shape, with the memory of one element."""
    return like.new_full((), math.nan).expand(shape)


def flat_buffer_of(
    unit: ShardUnit,
    ranks: tuple[int, ...],
    rank: int,
    parameters: Mapping[str, nn.Parameter],
    hidden: bool,
    local_parts: Mapping[str, Tensor] | None = None,
) -> FlatBuffer:
    """Build the flat buffer of a unit from this worker's parameters.

    Args:
        unit: names of the parameters, and how they are cut.
        ranks: ranks of the shard group, by the index of their shard.
        rank: rank of this worker, one of ``ranks``.
        parameters: this worker's parameters, by canonical name.
        hidden: whether only this worker's shard is kept (ZeRO-3).
        local_parts: this worker's elements of each parameter, if the full values do not exist any more; else None.
    """
    # The cut by parameter (spans) and the cut by rank (bounds) are independent; both are in elements of the buffer.
    index, unit_parameters = ranks.index(rank), tuple(parameters[name] for name in unit.parameters)
    elements = [parameter.numel() for parameter in unit_parameters]
    bounds, spans = unit.part_bounds(elements, len(ranks)), tuple(pairwise((0, *accumulate(elements))))
    if local_parts is None:
        full_buffer = torch.cat([parameter.detach().reshape(-1) for parameter in unit_parameters])
        shard = full_buffer[slice(*bounds[index])]
    else:
        shard = torch.cat([local_parts[name] for name in unit.parameters])
    flat = FlatBuffer(unit, ranks, index, unit_parameters, spans, bounds, shard)
    for name, parameter, (begin, _) in zip(unit.parameters, unit_parameters, spans, strict=True):
        flat.views.append((parameter, begin, parameter.shape))
        flat.optimizer_parts[name] = None
        # The parameter's elements in this rank's shard; an owner has all of them, even of an empty parameter.
        low, high = unit.part_range(name, elements, len(ranks), index)
        if high > low or (unit.owners and unit.owners[unit.parameters.index(name)] == index):
            at = begin + low - bounds[index][0]
            part = shard[at : at + high - low].view(parameter.shape if unit.owners else (high - low,))
            flat.optimizer_parts[name] = OptimizerPart(nn.Parameter(part, parameter.requires_grad), low, high)
    if hidden:
        # A slice would keep the memory of the full buffer alive.
        flat.store_shard(shard if local_parts is not None else shard.clone())
        flat.release_full()
    else:
        flat.attach_full(full_buffer)
    return flat


class Shards:
    """All ZeRO shards of one worker; empty without ``sync.shard``.

    Args:
        flats: flat buffers of this worker's units, in the order of reduction.
        hidden: whether only shards of parameters are kept between uses (ZeRO-3).
        counts: whether this worker's shards count in sums over all workers: one group of replicas does.
        transport: transport of the all-gather after an update, once a step (ZeRO-1 and -2).
        gathers: transport of the all-gathers during passes (ZeRO-3); None where parameters stay full.

    Attributes:
        flat_buffers: flat buffers of this worker's units, in the order of reduction.
        keeps_only_shards: whether only shards of parameters are kept between uses (ZeRO-3).
        is_counted: whether this worker's shards count in sums over all workers.
        buffer_of: flat buffer of each sharded parameter, by its canonical name.
    """

    def __init__(
        self,
        flats: Sequence[FlatBuffer] = (),
        hidden: bool = False,
        counts: bool = False,
        transport: Transport | None = None,
        gathers: Transport | None = None,
    ) -> None:
        self.flat_buffers, self.keeps_only_shards, self.is_counted = tuple(flats), hidden, counts
        self.buffer_of = {name: flat for flat in flats for name in flat.unit.parameters}
        self._transport, self.gather_transport = transport, gathers
        self._constants: dict[str, Tensor] = {}

    def install_parts(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace full parameters by this worker's parts in optimizers that were built on full ones."""
        table = {
            parameter: flat.optimizer_parts[name]
            for flat in self.flat_buffers
            for name, parameter in zip(flat.unit.parameters, flat.parameters, strict=True)
        }
        for optimizer in optimizers:
            replace_parameters(optimizer, table)

    def updated_parameters(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return what this worker's optimizer steps on: parts of sharded parameters, and unsharded ones."""
        updated_parameters = dict[str, nn.Parameter]()
        for name, parameter in parameters.items():
            if name not in self.buffer_of:
                updated_parameters[name] = parameter
            elif (piece := self.buffer_of[name].optimizer_parts[name]) is not None:
                updated_parameters[name] = piece.parameter
        return updated_parameters

    def constant_view(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return a detached alias of a parameter, which has its value whenever the parameter has."""
        if name not in self.buffer_of:
            return parameter.detach()
        if name not in self._constants:
            # Registered as a view, so that attach_full and release_full move it with the parameter.
            self._constants[name], flat = parameter.detach(), self.buffer_of[name]
            begin, _ = flat.spans[flat.unit.parameters.index(name)]
            flat.views.append((self._constants[name], begin, parameter.shape))
        return self._constants[name]

    def gather_updated(self, names: Collection[str]) -> None:
        """All-gather the new values of parameters after an optimizer step; nothing to do in ZeRO-3.

        Args:
            names: canonical names of the parameters that the step's objective trains.
        """
        if self.keeps_only_shards or self._transport is None:
            return
        under_way = deque[tuple[FlatBuffer, PendingTransfer]]()
        # A few gathers ahead overlap with each other; waiting for the oldest bounds the memory.
        for flat in self.flat_buffers:
            if any(name in names for name in flat.unit.parameters):
                under_way.append((flat, flat.start_all_gather(self._transport)))
            if len(under_way) >= AHEAD:
                _install_gathered(*under_way.popleft())
        for gather in under_way:
            _install_gathered(*gather)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Context manager: all parameters are full; a collective of all workers."""
        if self.keeps_only_shards and self.gather_transport is not None:
            for flat in self.flat_buffers:
                flat.attach_full(flat.start_all_gather(self.gather_transport).wait())
        try:
            yield
        finally:
            if self.keeps_only_shards:
                for flat in self.flat_buffers:
                    flat.release_full()

    def local_tensor(self, name: str, parameter: Tensor) -> Tensor | None:
        """Return what this worker keeps of a parameter between steps, or None for nothing of it."""
        if not self.keeps_only_shards or name not in self.buffer_of:
            return parameter
        piece = self.buffer_of[name].optimizer_parts[name]
        return None if piece is None else piece.parameter

    def shard_label(self, name: str) -> str:
        """Return a label of the shard that this worker keeps, as ``"[shard 0 of 2]"``; equal shards, equal labels."""
        if not self.keeps_only_shards or name not in self.buffer_of:
            return ""
        flat = self.buffer_of[name]
        return f"[shard {flat.shard_index} of {len(flat.ranks)}]"

    def local_part(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return this worker's part of a tensor in a parameter's full shape, or None if it updates nothing of it.

        Args:
            name: canonical name of the parameter.
            tensor: a tensor of the parameter's shape, a gradient say.
        """
        if name not in self.buffer_of:
            return tensor
        piece = self.buffer_of[name].optimizer_parts[name]
        return None if piece is None else piece.slice_of(tensor)

    def local_gradient(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """Return this worker's part of a parameter's gradient, padded with zeros to its shape; None for none of it."""
        if name not in self.buffer_of:
            return parameter.grad
        piece = self.buffer_of[name].optimizer_parts[name]
        if piece is None or piece.parameter.grad is None:
            return None
        gradient = piece.parameter.grad.new_zeros(parameter.shape)
        piece.slice_of(gradient).copy_(piece.parameter.grad)
        return gradient


def _install_gathered(flat: FlatBuffer, pending: PendingTransfer) -> None:
    full_buffer = pending.wait()
    # The optimizer's parameters move into the gathered buffer: it replaces the old one, and the shard is a view of it.
    begin, end = flat.bounds[flat.shard_index]
    flat.attach_full(full_buffer)
    flat.store_shard(full_buffer[begin:end])
