"""All-gather of parameters for a pass, unit by unit, and their release (ZeRO-3: Rajbhandari et al., SC 2020,
section 5.3).

In the forward pass a unit is whole from its first use to its last, and the next one is gathered meanwhile. What
autograd keeps of it for the backward pass is kept as a place in the unit, not as a tensor; the unit is gathered again
when autograd first asks for such a place, and let go of when its gradients have left.

    forward      |gather 1|gather 2|        |gather 3|                   a unit ahead, in the order of first use
                          | use 1           | use 2           | use 3
    backward     |gather 3|gather 2|        |gather 1|                   a unit ahead, in reverse order of last use
                          | use 3 |scatter 3| use 2 |scatter 2| ...

All workers gather all units once in each pass, in an order that comes from the graph alone.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from polylane.runtime.pipeline.stage_runner import WatchedCall
from polylane.runtime.sync.zero.flat_shards import FlatBuffer, Shards
from polylane.runtime.tensor_parallel import CollectiveWaits
from polylane.runtime.transport.protocol import PendingTransfer


@dataclass(frozen=True)
class ShardView:
    """A tensor as a part of a unit: what stands for it while the unit is not whole."""

    flat_buffer: FlatBuffer
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class _Gate:
    """What a stage's code calls before the first use of a unit, or behind its last."""

    passes: GatheredPasses
    flat_buffer: FlatBuffer
    is_opening: bool

    __name__ = "gate"
    __module__ = "polylane"

    def __call__(self) -> None:
        if self.is_opening:
            self.passes.gather_unit(self.flat_buffer)
        else:
            self.passes.release_unit(self.flat_buffer)


@dataclass(frozen=True)
class _UnitUse:
    """From where to where in a graph a unit is used, and whether the user's own Python uses it."""

    flat_buffer: FlatBuffer
    first: int
    last: int
    is_opaque: bool


class GatheredPasses:
    """Has the units of one stage's code whole while they are used.

    Args:
        shards: what this worker holds.
        summed: the units whose gradients are summed in the backward pass, and which :meth:`used` is told of.
        waits: of the action under way.
    """

    def __init__(self, shards: Shards, summed: Collection[str], waits: CollectiveWaits) -> None:
        assert shards.gather_transport is not None
        self._waits = waits
        self._shards, self._summed, self._transport = shards, frozenset(summed), shards.gather_transport
        self._uses: dict[str, _UnitUse] = {}
        self._order: list[_UnitUse] = []
        self._positions: dict[str, int] = {}
        self._next_use = 0
        self._pending_gathers: dict[str, PendingTransfer] = {}
        self._gathered_units: dict[str, FlatBuffer] = {}

    # ---- what a stage's code calls -----------------------------------------------------------------------------------

    @contextmanager
    def insert_gates(self, graph: fx.Graph) -> Iterator[None]:
        """Context manager: the graph calls :meth:`need` before a unit's first use, and :meth:`drop` after its last."""
        uses, nodes = _find_unit_uses(graph, self._shards), list(graph.nodes)
        if not self._uses:  # of the whole stage: its parts, one for each number of samples, follow this order
            self._uses = {use.flat_buffer.unit.name: use for use in uses}
        added = []
        for use in uses:
            with graph.inserting_before(nodes[use.first]):
                added.append(graph.call_function(_Gate(self, use.flat_buffer, True)))
            if nodes[use.last].op != "output":  # what leaves the stage may be a view of a parameter
                with graph.inserting_after(nodes[use.last]):
                    added.append(graph.call_function(_Gate(self, use.flat_buffer, False)))
        try:
            yield
        finally:
            for node in added:
                graph.erase_node(node)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        self._begin_pass(sorted(self._uses.values(), key=lambda use: (use.first, use.flat_buffer.unit.name)))
        keeps = torch.is_grad_enabled()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if keeps else nullcontext()
        with self._releasing_units(), hooks:
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass. What the user's own Python uses is whole all the time: it may read it as it likes."""
        order = sorted(self._uses.values(), key=lambda use: (not use.is_opaque, -use.last, use.flat_buffer.unit.name))
        self._begin_pass(order)
        with self._releasing_units():
            for use in order:
                if use.is_opaque:
                    self.gather_unit(use.flat_buffer)
            yield

    def gather_unit(self, flat: FlatBuffer) -> None:
        """Have a unit whole; start to gather the one that comes next in this pass."""
        name = flat.unit.name
        while self._next_use < min(self._positions[name] + 2, len(self._order)):
            self._launch_next()
        if flat.full_buffer is not None:
            return
        pending = self._pending_gathers.pop(name, None)
        if pending is None:
            pending = self._start_gather(flat)
        start = time.perf_counter()
        flat.attach_full(pending.wait())
        self._waits.seconds += time.perf_counter() - start
        self._gathered_units[name] = flat

    def release_unit(self, flat: FlatBuffer) -> None:
        """Let go of a unit."""
        if self._gathered_units.pop(flat.unit.name, None) is not None:
            flat.release_full()

    def release_reduced(self, flat: FlatBuffer) -> None:
        """A unit's gradients have left: let go of it."""
        use = self._uses.get(flat.unit.name)  # another objective may use it, and this one's code not at all
        if use is not None and not use.is_opaque:
            self.release_unit(flat)

    # ---- the order in which units are gathered -----------------------------------------------------------------------

    def _begin_pass(self, order: Sequence[_UnitUse]) -> None:
        self._order, self._next_use = list(order), 0
        self._positions = {use.flat_buffer.unit.name: number for number, use in enumerate(order)}

    def _launch_next(self) -> None:
        flat = self._order[self._next_use].flat_buffer
        self._pending_gathers[flat.unit.name] = self._start_gather(flat)
        self._next_use += 1

    def _start_gather(self, flat: FlatBuffer) -> PendingTransfer:
        self._waits.bytes += flat.shard.nbytes
        return flat.start_all_gather(self._transport)

    @contextmanager
    def _releasing_units(self) -> Iterator[None]:
        """Let go of all units behind a pass; where it failed, of what is under way as well, without waiting for it."""
        try:
            yield
            self._drain_gathers()
        finally:
            self._pending_gathers.clear()
            for flat in list(self._gathered_units.values()):
                self.release_unit(flat)

    def _drain_gathers(self) -> None:
        """Gather what nobody here needed, for others may have."""
        while self._next_use < len(self._order):
            self._launch_next()
        for pending in self._pending_gathers.values():
            pending.wait()

    # ---- what autograd keeps -----------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | ShardView:
        if tensor.layout is not torch.strided:
            return tensor
        address = tensor.data_ptr()
        for flat in self._gathered_units.values():
            whole = flat.full_buffer
            if whole is not None and address and 0 <= address - whole.data_ptr() < whole.nbytes:
                if tensor.dtype != whole.dtype or tensor.is_conj() or tensor.is_neg():
                    return tensor  # keeps the memory, and is right
                offset = (address - whole.data_ptr()) // whole.element_size()
                return ShardView(flat, tensor.shape, tensor.stride(), offset)
        return tensor

    def _unpack(self, kept: Tensor | ShardView) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._release_passed(kept.flat_buffer)
        self.gather_unit(kept.flat_buffer)
        whole = kept.flat_buffer.full_buffer
        assert whole is not None
        return whole.as_strided(kept.shape, kept.stride, whole.storage_offset() + kept.offset)

    def _release_passed(self, flat: FlatBuffer) -> None:
        """Let go of units without gradients that a backward pass has come past."""
        if flat.full_buffer is not None:
            return
        here = self._uses[flat.unit.name].last
        for name in [name for name in self._gathered_units if name not in self._summed]:
            if self._uses[name].first > here and not self._uses[name].is_opaque:
                self.release_unit(self._gathered_units[name])


def _find_unit_uses(graph: fx.Graph, shards: Shards) -> list[_UnitUse]:
    """Where a graph uses units, in the order of first use."""
    units: dict[fx.Node, FlatBuffer] = {}
    found: dict[str, list[Any]] = {}
    for position, node in enumerate(graph.nodes):
        kind, name = node.meta["role"] if node.op == "placeholder" else ("", "")
        if kind == "parameter" and name in shards.buffer_of:
            units[node] = shards.buffer_of[name]
        for flat in (units[n] for n in node.all_input_nodes if n in units):
            if _is_view(node):
                units[node] = flat
            use = found.setdefault(flat.unit.name, [flat, position, position, False])
            use[2], use[3] = position, use[3] or isinstance(node.target, WatchedCall)
    return [_UnitUse(*use) for use in found.values()]


def _is_view(node: fx.Node) -> bool:
    """Whether what a node gives may be its input's own memory: operators say so in their schemas."""
    if isinstance(node.target, torch._ops.OpOverload):
        return any(each.alias_info is not None for each in node.target._schema.returns)
    return node.target is operator.getitem
