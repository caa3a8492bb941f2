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

from polylane.runtime.mesh import Waits
from polylane.runtime.stage import Watched
from polylane.runtime.sync.sharded import Flat, Shards
from polylane.runtime.transport.protocol import Pending


@dataclass(frozen=True)
class Place:
    """A tensor as a part of a unit: what stands for it while the unit is not whole."""

    flat: Flat
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class _Gate:
    """What a stage's code calls before the first use of a unit, or behind its last."""

    passes: Passes
    flat: Flat
    opens: bool

    __name__ = "gate"
    __module__ = "polylane"

    def __call__(self) -> None:
        if self.opens:
            self.passes.need(self.flat)
        else:
            self.passes.drop(self.flat)


@dataclass(frozen=True)
class _Use:
    """From where to where in a graph a unit is used, and whether the user's own Python uses it."""

    flat: Flat
    first: int
    last: int
    opaque: bool


class Passes:
    """Has the units of one stage's code whole while they are used.

    Args:
        shards: what this worker holds.
        summed: the units whose gradients are summed in the backward pass, and which :meth:`used` is told of.
        waits: of the action under way.
    """

    def __init__(self, shards: Shards, summed: Collection[str], waits: Waits) -> None:
        assert shards.gathers is not None
        self._waits = waits
        self._shards, self._summed, self._transport = shards, frozenset(summed), shards.gathers
        self._uses: dict[str, _Use] = {}
        self._order: list[_Use] = []
        self._at: dict[str, int] = {}
        self._next = 0
        self._under_way: dict[str, Pending] = {}
        self._shown: dict[str, Flat] = {}

    # ---- what a stage's code calls -----------------------------------------------------------------------------------

    @contextmanager
    def gates(self, graph: fx.Graph) -> Iterator[None]:
        """Context manager: the graph calls :meth:`need` before a unit's first use, and :meth:`drop` after its last."""
        uses, nodes = _uses(graph, self._shards), list(graph.nodes)
        if not self._uses:  # of the whole stage: its parts, one for each number of samples, follow this order
            self._uses = {use.flat.unit.name: use for use in uses}
        added = []
        for use in uses:
            with graph.inserting_before(nodes[use.first]):
                added.append(graph.call_function(_Gate(self, use.flat, True)))
            if nodes[use.last].op != "output":  # what leaves the stage may be a view of a parameter
                with graph.inserting_after(nodes[use.last]):
                    added.append(graph.call_function(_Gate(self, use.flat, False)))
        try:
            yield
        finally:
            for node in added:
                graph.erase_node(node)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        self._begin(sorted(self._uses.values(), key=lambda use: (use.first, use.flat.unit.name)))
        keeps = torch.is_grad_enabled()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if keeps else nullcontext()
        with self._letting_go(), hooks:
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass. What the user's own Python uses is whole all the time: it may read it as it likes."""
        order = sorted(self._uses.values(), key=lambda use: (not use.opaque, -use.last, use.flat.unit.name))
        self._begin(order)
        with self._letting_go():
            for use in order:
                if use.opaque:
                    self.need(use.flat)
            yield

    def need(self, flat: Flat) -> None:
        """Have a unit whole; start to gather the one that comes next in this pass."""
        name = flat.unit.name
        while self._next < min(self._at[name] + 2, len(self._order)):
            self._launch()
        if flat.whole is not None:
            return
        pending = self._under_way.pop(name, None)
        if pending is None:
            pending = self._gather(flat)
        start = time.perf_counter()
        flat.show(pending.wait())
        self._waits.seconds += time.perf_counter() - start
        self._shown[name] = flat

    def drop(self, flat: Flat) -> None:
        """Let go of a unit."""
        if self._shown.pop(flat.unit.name, None) is not None:
            flat.hide()

    def used(self, flat: Flat) -> None:
        """A unit's gradients have left: let go of it."""
        use = self._uses.get(flat.unit.name)  # another objective may use it, and this one's code not at all
        if use is not None and not use.opaque:
            self.drop(flat)

    # ---- the order in which units are gathered -----------------------------------------------------------------------

    def _begin(self, order: Sequence[_Use]) -> None:
        self._order, self._next = list(order), 0
        self._at = {use.flat.unit.name: number for number, use in enumerate(order)}

    def _launch(self) -> None:
        flat = self._order[self._next].flat
        self._under_way[flat.unit.name] = self._gather(flat)
        self._next += 1

    def _gather(self, flat: Flat) -> Pending:
        self._waits.bytes += flat.shard.nbytes
        return flat.gather(self._transport)

    @contextmanager
    def _letting_go(self) -> Iterator[None]:
        """Let go of all units behind a pass; where it failed, of what is under way as well, without waiting for it."""
        try:
            yield
            self._gather_rest()
        finally:
            self._under_way.clear()
            for flat in list(self._shown.values()):
                self.drop(flat)

    def _gather_rest(self) -> None:
        """Gather what nobody here needed, for others may have."""
        while self._next < len(self._order):
            self._launch()
        for pending in self._under_way.values():
            pending.wait()

    # ---- what autograd keeps -----------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | Place:
        if tensor.layout is not torch.strided:
            return tensor
        address = tensor.data_ptr()
        for flat in self._shown.values():
            whole = flat.whole
            if whole is not None and address and 0 <= address - whole.data_ptr() < whole.nbytes:
                if tensor.dtype != whole.dtype or tensor.is_conj() or tensor.is_neg():
                    return tensor  # keeps the memory, and is right
                offset = (address - whole.data_ptr()) // whole.element_size()
                return Place(flat, tensor.shape, tensor.stride(), offset)
        return tensor

    def _unpack(self, kept: Tensor | Place) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._leave_behind(kept.flat)
        self.need(kept.flat)
        whole = kept.flat.whole
        assert whole is not None
        return whole.as_strided(kept.shape, kept.stride, whole.storage_offset() + kept.offset)

    def _leave_behind(self, flat: Flat) -> None:
        """Let go of units without gradients that a backward pass has come past."""
        if flat.whole is not None:
            return
        here = self._uses[flat.unit.name].last
        for name in [name for name in self._shown if name not in self._summed]:
            if self._uses[name].first > here and not self._uses[name].opaque:
                self.drop(self._shown[name])


def _uses(graph: fx.Graph, shards: Shards) -> list[_Use]:
    """Where a graph uses units, in the order of first use."""
    units: dict[fx.Node, Flat] = {}
    found: dict[str, list[Any]] = {}
    for position, node in enumerate(graph.nodes):
        kind, name = node.meta["role"] if node.op == "placeholder" else ("", "")
        if kind == "parameter" and name in shards.of:
            units[node] = shards.of[name]
        for flat in (units[n] for n in node.all_input_nodes if n in units):
            if _is_view(node):
                units[node] = flat
            use = found.setdefault(flat.unit.name, [flat, position, position, False])
            use[2], use[3] = position, use[3] or isinstance(node.target, Watched)
    return [_Use(*use) for use in found.values()]


def _is_view(node: fx.Node) -> bool:
    """Whether what a node gives may be its input's own memory: operators say so in their schemas."""
    if isinstance(node.target, torch._ops.OpOverload):
        return any(each.alias_info is not None for each in node.target._schema.returns)
    return node.target is operator.getitem
