"""ZeRO: parameters of which every replica holds a shard, whole and in parts (Rajbhandari et al., SC 2020).

Over n replicas, for P bytes of parameters and K of optimizer states, a worker holds beside its activations

    shard: optimizer     P     parameters,  P      gradients,  K / n  states     (ZeRO-1)
    shard: gradients     P     parameters,  P / n  gradients,  K / n  states     (ZeRO-2), and a unit's whole gradients
    shard: parameters    P / n parameters,  P / n  gradients,  K / n  states     (ZeRO-3), and two whole units
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

from polylane.runtime.sync.zero.optimizer_parts import OptimizerPart, replace_parameters
from polylane.runtime.sync.zero.units import ShardUnit
from polylane.runtime.transport.protocol import PendingTransfer, Transport

AHEAD = 2  # units that are under way at once


@dataclass
class FlatBuffer:
    """One unit's parameters end to end.

    Attributes:
        unit: what is in it.
        ranks: that hold a part each, by the index of their part.
        shard_index: of this worker's part among ``ranks``.
        parameters: this worker's; they show their whole values as long as ``whole`` is there, else NaN.
        shard: this worker's part, a vector.
        optimizer_parts: of the parameters, what this worker updates; None: nothing of it.
        full_buffer: all parts, a vector; None where only the shard is held.
        placeholder: what they show while only the shard is held.
        views: (tensor, offset, shape) of every alias of the flat buffer: the parameter itself, and its detached
            constant where one is used.
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
        """Elements of each rank's part."""
        return tuple(end - begin for begin, end in self.bounds)

    def start_all_gather(self, transport: Transport) -> PendingTransfer:
        """Start to gather all parts; all ranks must ask."""
        return transport.all_gather(self.shard, self.ranks, self.sizes)

    def attach_full(self, whole: Tensor) -> None:
        """Let parameters have their values in ``whole``."""
        self.full_buffer = whole
        for face, begin, shape in self.views:
            face.data = whole[begin : begin + shape.numel()].view(shape)

    def store_shard(self, shard: Tensor) -> None:
        """Let the pieces be views of ``shard``, which has their values."""
        self.shard, first = shard, self.bounds[self.shard_index][0]
        for (begin, _), piece in zip(self.spans, self.optimizer_parts.values(), strict=True):
            if piece is not None:
                at = begin + piece.begin - first
                piece.parameter.data = shard[at : at + piece.end - piece.begin].view(piece.parameter.shape)

    def release_full(self) -> None:
        """Let go of all but the shard: parameters keep their shapes only, and read as NaN."""
        self.full_buffer = None
        for face, _, shape in self.views:
            face.data = self.placeholder.expand(shape)


def empty_storage(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of a shape without the memory that it would take: NaN everywhere."""
    return like.new_full((), math.nan).expand(shape)


def flat_buffer_of(
    unit: ShardUnit,
    ranks: tuple[int, ...],
    rank: int,
    parameters: Mapping[str, nn.Parameter],
    hidden: bool,
    kept: Mapping[str, Tensor] | None = None,
) -> FlatBuffer:
    """A unit's parameters, laid end to end.

    Args:
        unit: names of the parameters, and how they are cut.
        ranks: that hold a part each, by the index of their part.
        rank: of this worker, one of ``ranks``.
        parameters: this worker's, by canonical name.
        hidden: only this worker's part is kept.
        kept: this worker's part of each parameter, where the whole is not here any more.
    """
    # Where each parameter begins and ends in the unit, and where each rank's part does: the two cuts are independent.
    index, own = ranks.index(rank), tuple(parameters[name] for name in unit.parameters)
    elements = [parameter.numel() for parameter in own]
    bounds, spans = unit.part_bounds(elements, len(ranks)), tuple(pairwise((0, *accumulate(elements))))
    if kept is None:
        whole = torch.cat([parameter.detach().reshape(-1) for parameter in own])
        shard = whole[slice(*bounds[index])]
    else:
        shard = torch.cat([kept[name] for name in unit.parameters])
    flat = FlatBuffer(unit, ranks, index, own, spans, bounds, shard)
    for name, parameter, (begin, _) in zip(unit.parameters, own, spans, strict=True):
        flat.views.append((parameter, begin, parameter.shape))
        flat.optimizer_parts[name] = None
        # Which elements of the parameter are in this rank's part; an owner has all of them, even where there are none.
        low, high = unit.part_range(name, elements, len(ranks), index)
        if high > low or (unit.owners and unit.owners[unit.parameters.index(name)] == index):
            at = begin + low - bounds[index][0]
            part = shard[at : at + high - low].view(parameter.shape if unit.owners else (high - low,))
            flat.optimizer_parts[name] = OptimizerPart(_parameter_like(parameter, part), low, high)
    if hidden:
        flat.store_shard(shard if kept is not None else shard.clone())
        flat.release_full()
    else:
        flat.attach_full(whole)
    return flat


def _parameter_like(parameter: nn.Parameter, part: Tensor) -> nn.Parameter:
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


class Shards:
    """What a worker holds in parts.

    Args:
        flats: the units, in the order in which they are summed.
        hidden: only the parts of parameters are kept between uses (ZeRO-3).
        counts: whether this worker's pieces count in sums over all workers.
        transport: of the gathering of new values after an update, once a step.
        gathers: transport of what is gathered during passes; None where parameters stay whole.

    Attributes:
        buffer_of: the unit of every parameter that has one.
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
        """Let optimizers that were made of whole parameters have the pieces of this worker."""
        table = {
            parameter: flat.optimizer_parts[name]
            for flat in self.flat_buffers
            for name, parameter in zip(flat.unit.parameters, flat.parameters, strict=True)
        }
        for optimizer in optimizers:
            replace_parameters(optimizer, table)

    def updated_parameters(self, held: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """What this worker updates of parameters: pieces of those that are cut, others as they are."""
        found = dict[str, nn.Parameter]()
        for name, parameter in held.items():
            if name not in self.buffer_of:
                found[name] = parameter
            elif (piece := self.buffer_of[name].optimizer_parts[name]) is not None:
                found[name] = piece.parameter
        return found

    def constant_view(self, name: str, parameter: nn.Parameter) -> Tensor:
        """A detached alias of a parameter, which shows its value whenever the parameter does."""
        if name not in self.buffer_of:
            return parameter.detach()
        if name not in self._constants:
            self._constants[name], flat = parameter.detach(), self.buffer_of[name]
            begin, _ = flat.spans[flat.unit.parameters.index(name)]
            flat.views.append((self._constants[name], begin, parameter.shape))
        return self._constants[name]

    def gather_updated(self, names: Collection[str]) -> None:
        """After an update of the pieces of these parameters: let all have the new values of all pieces."""
        if self.keeps_only_shards or self._transport is None:
            return
        under_way = deque[tuple[FlatBuffer, PendingTransfer]]()
        for flat in self.flat_buffers:
            if any(name in names for name in flat.unit.parameters):
                under_way.append((flat, flat.start_all_gather(self._transport)))
            if len(under_way) >= AHEAD:
                _install_gathered(*under_way.popleft())
        for each in under_way:
            _install_gathered(*each)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Context manager: all parameters are whole; a collective of all workers."""
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
        """What this worker keeps of a parameter between steps; None for nothing of it."""
        if not self.keeps_only_shards or name not in self.buffer_of:
            return parameter
        piece = self.buffer_of[name].optimizer_parts[name]
        return None if piece is None else piece.parameter

    def shard_label(self, name: str) -> str:
        """Which part of a parameter this worker keeps; equal parts have equal labels."""
        if not self.keeps_only_shards or name not in self.buffer_of:
            return ""
        flat = self.buffer_of[name]
        return f"[shard {flat.shard_index} of {len(flat.ranks)}]"

    def local_part(self, name: str, whole: Tensor) -> Tensor | None:
        """This worker's piece of a tensor in a parameter's shape, a gradient say; None where it has none."""
        if name not in self.buffer_of:
            return whole
        piece = self.buffer_of[name].optimizer_parts[name]
        return None if piece is None else piece.slice_of(whole)

    def local_gradient(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """What this worker has of a parameter's gradient, in its shape with zeros around; None for nothing of it."""
        if name not in self.buffer_of:
            return parameter.grad
        piece = self.buffer_of[name].optimizer_parts[name]
        if piece is None or piece.parameter.grad is None:
            return None
        whole = piece.parameter.grad.new_zeros(parameter.shape)
        piece.slice_of(whole).copy_(piece.parameter.grad)
        return whole


def _install_gathered(flat: FlatBuffer, pending: PendingTransfer) -> None:
    whole = pending.wait()
    begin, end = flat.bounds[flat.shard_index]
    flat.attach_full(whole)
    flat.store_shard(whole[begin:end])
