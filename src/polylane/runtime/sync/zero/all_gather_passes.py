"""ZeRO-3 parameter all-gather: units are gathered for a pass one by one, and released after use.

Rajbhandari et al., SC 2020, section 5.3. In the forward pass a unit is full from its first use to its last, and the
next one is gathered meanwhile. Where autograd saves a view of a unit for the backward pass, only its position in the
unit is kept (:class:`ShardView`); the unit is gathered again when autograd first unpacks such a view, and released when
its gradients have been sent.

    forward      |gather 1|gather 2|        |gather 3|                   a unit ahead, in the order of first use
                          | use 1           | use 2           | use 3
    backward     |gather 3|gather 2|        |gather 1|                   a unit ahead, in reverse order of last use
                          | use 3 |scatter 3| use 2 |scatter 2| ...

Every worker gathers every unit exactly once in each pass, in an order that depends on the graph alone: collectives of
all workers match.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.nodes.memory import aliased_arguments
from polylane.runtime.parameters.zero_shards import FlatBuffer, Shards
from polylane.runtime.span_clock import CollectiveWaits
from polylane.runtime.stage_hooks import StageHooks, WatchedCall
from polylane.runtime.sync.zero.cast_weights import CastWeight, read_cast_weight
from polylane.runtime.transport.protocol import PendingTransfer


@dataclass(frozen=True)
class ShardView:
    """A saved view of a unit: position and strides (in elements), kept instead of the tensor while it is released."""

    flat_buffer: FlatBuffer
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _UnitUse:
    """Node positions of a unit's first and last use in a graph, and whether the user's own Python uses it."""

    flat_buffer: FlatBuffer
    first: int
    last: int
    is_opaque: bool


class GatheredPasses(StageHooks):
    """Keeps the units of one stage's code full while they are used.

    Args:
        shards: ZeRO shards of this worker.
        summed: names of the units whose gradients are reduced in the backward pass; :meth:`release_reduced` releases
            them.
        waits: counter to which time and bytes of the running action are added.
        read_otherwise: names of parameters that the code reads in their own dtype: a unit with one of them is gathered
            in that, even if other passes gather it in the dtype to which they cast it.
    """

    def __init__(
        self, shards: Shards, summed: Collection[str], waits: CollectiveWaits, read_otherwise: Collection[str] = ()
    ) -> None:
        assert shards.gather_transport is not None
        self._waits, self._read_otherwise = waits, frozenset(read_otherwise)
        self._shards, self._summed, self._transport = shards, frozenset(summed), shards.gather_transport
        self._uses: dict[str, _UnitUse] = {}
        # Of the current pass: all units in the order of gathers, the next one to launch, pending and full ones by name.
        self._order: list[_UnitUse] = []
        self._positions: dict[str, int] = {}
        self._next_use = 0
        self._pending_gathers: dict[str, PendingTransfer] = {}
        self._gathered_units: dict[str, FlatBuffer] = {}

    # ---- calls from a stage's code -----------------------------------------------------------------------------------

    def cast_weights(self, graph: fx.Graph) -> None:
        for node in [node for node in graph.nodes if node.op == "placeholder"]:
            kind, name = node.meta["role"]
            flat = self._shards.buffer_of.get(name) if kind == "parameter" else None
            if flat is not None and self._gathered_dtype(flat) != flat.shard.dtype:
                read_cast_weight(graph, node, flat)

    @contextmanager
    def insert_gates(self, graph: fx.Graph) -> Iterator[None]:
        """Context manager: insert calls that gather each unit before its first use, and release it after its last."""
        uses, nodes = _find_unit_uses(graph, self._shards), list(graph.nodes)
        if not self._uses:  # the first graph is the full stage; graphs of other sample counts follow its order
            self._uses = {use.flat_buffer.unit.name: use for use in uses}
        added = []
        for use in uses:
            with graph.inserting_before(nodes[use.first]):
                added.append(graph.call_function(_make_gate(self.gather_unit, use.flat_buffer)))
            if nodes[use.last].op != "output":  # an output may be a view of a parameter
                with graph.inserting_after(nodes[use.last]):
                    added.append(graph.call_function(_make_gate(self.release_unit, use.flat_buffer)))
        try:
            yield
        finally:
            for node in added:
                graph.erase_node(node)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context manager around a forward pass: gathers in the order of first use."""
        self._begin_pass(sorted(self._uses.values(), key=lambda use: (use.first, use.flat_buffer.unit.name)))
        keeps = torch.is_grad_enabled()
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack_saved, self.unpack_saved) if keeps else nullcontext()
        with self._releasing_units(), hooks:
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context manager around a backward pass: gathers in reverse order of last use.

        Units that the user's own Python uses are full during all of the pass: its reads cannot be predicted.
        """
        order = sorted(self._uses.values(), key=lambda use: (not use.is_opaque, -use.last, use.flat_buffer.unit.name))
        self._begin_pass(order)
        with self._releasing_units():
            for use in order:
                if use.is_opaque:
                    self.gather_unit(use.flat_buffer)
            yield

    def gather_unit(self, flat: FlatBuffer) -> None:
        """Wait until a unit is full, and launch the gather of the one that comes next in this pass."""
        name = flat.unit.name
        # Up to this unit and one more: launches stay in the order of the pass, whatever is needed first.
        while self._next_use < min(self._positions[name] + 2, len(self._order)):
            self._launch_next()
        if flat.full_buffer is not None:
            return
        pending = self._pending_gathers.pop(name, None)
        if pending is None:
            pending = self._start_gather(flat)
        with self._waits.timing():
            flat.attach_full(pending.wait())
        self._gathered_units[name] = flat

    def release_unit(self, flat: FlatBuffer) -> None:
        """Release a unit's full buffer, if this pass gathered it."""
        if self._gathered_units.pop(flat.unit.name, None) is not None:
            flat.release_full()

    def release_reduced(self, flat: FlatBuffer) -> None:
        """Release a unit whose gradients have been sent."""
        use = self._uses.get(flat.unit.name)  # None: only code of another objective uses it
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
        dtype = self._gathered_dtype(flat)
        self._waits.bytes += flat.shard.numel() * dtype.itemsize
        return flat.start_all_gather(self._transport, dtype)

    def _gathered_dtype(self, flat: FlatBuffer) -> torch.dtype:
        """Return the dtype in which passes gather a unit: the one to which they cast all of its parameters, if so."""
        casts = flat.unit.cast is not None and self._read_otherwise.isdisjoint(flat.unit.parameters)
        return flat.unit.cast if casts and flat.unit.cast is not None else flat.shard.dtype

    @contextmanager
    def _releasing_units(self) -> Iterator[None]:
        """Context manager: release all units after a pass; if it fails, drop pending gathers without waiting."""
        try:
            yield
            self._drain_gathers()
        finally:
            self._pending_gathers.clear()
            for flat in list(self._gathered_units.values()):
                self.release_unit(flat)

    def _drain_gathers(self) -> None:
        """Gather the units that this pass did not need: other workers of the group may have needed them."""
        while self._next_use < len(self._order):
            self._launch_next()
        for pending in self._pending_gathers.values():
            pending.wait()

    # ---- tensors that autograd saves ---------------------------------------------------------------------------------

    def pack_saved(self, tensor: Tensor) -> Tensor | ShardView:
        """Return a view's position in its unit in place of the view; other tensors as they are."""
        if tensor.layout is not torch.strided:
            return tensor
        # By address, since autograd saves views and aliases of parameters as new tensor objects.
        address = tensor.data_ptr()
        for flat in self._gathered_units.values():
            full_buffer = flat.full_buffer
            if full_buffer is not None and address and 0 <= address - full_buffer.data_ptr() < full_buffer.nbytes:
                if tensor.dtype != full_buffer.dtype or tensor.is_conj() or tensor.is_neg():
                    return tensor  # strides alone do not describe it: keep its memory
                offset = (address - full_buffer.data_ptr()) // full_buffer.element_size()
                return ShardView(flat, tensor.shape, tensor.stride(), offset)
        return tensor

    def unpack_saved(self, saved_value: Tensor | ShardView) -> Tensor:
        """Return the tensor of what was packed, from its unit, which is gathered if it is not full."""
        if isinstance(saved_value, Tensor):
            return saved_value
        self._release_passed(saved_value.flat_buffer)
        self.gather_unit(saved_value.flat_buffer)
        full_buffer = saved_value.flat_buffer.full_buffer
        assert full_buffer is not None
        return full_buffer.as_strided(
            saved_value.shape, saved_value.stride, full_buffer.storage_offset() + saved_value.offset
        )

    def _release_passed(self, flat: FlatBuffer) -> None:
        """Release units without gradients that a backward pass is past; no reduction releases those.

        Args:
            flat: the unit that is unpacked now; units used only after its last use are not needed any more.
        """
        if flat.full_buffer is not None:
            return
        last_use = self._uses[flat.unit.name].last
        for name in [name for name in self._gathered_units if name not in self._summed]:
            if self._uses[name].first > last_use and not self._uses[name].is_opaque:
                self.release_unit(self._gathered_units[name])


def _make_gate(act: Callable[[FlatBuffer], None], flat: FlatBuffer) -> Callable[[], None]:
    """Return the call in a stage's graph that gathers a unit before its first use, or releases it after its last."""

    def gate() -> None:
        act(flat)

    return gate


def _find_unit_uses(graph: fx.Graph, shards: Shards) -> list[_UnitUse]:
    """Return the uses of units in a graph, in the order of first use; uses of views count."""
    units: dict[fx.Node, FlatBuffer] = {}
    uses: dict[str, list[Any]] = {}
    for position, node in enumerate(graph.nodes):
        kind, name = node.meta["role"] if node.op == "placeholder" else ("", "")
        if kind == "parameter" and name in shards.buffer_of:
            units[node] = shards.buffer_of[name]
        for flat in (units[n] for n in node.all_input_nodes if n in units):
            # What shares the unit's memory, or is the parameter itself, extends the unit's lifetime by its users.
            if isinstance(node.target, CastWeight) or units.keys() & aliased_arguments(node):
                units[node] = flat
            use = uses.setdefault(flat.unit.name, [flat, position, position, False])
            use[2], use[3] = position, use[3] or isinstance(node.target, WatchedCall)
    return [_UnitUse(*use) for use in uses.values()]
