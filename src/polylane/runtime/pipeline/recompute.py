"""Recomputation: tensors that autograd would save are dropped in the forward pass, and made again for the backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022. Which tensors are dropped is a set of the graph's nodes, for any
model; autograd's graph of the forward pass stays as it is:

    forward     a call that makes or reads a dropped value saves handles in place of tensors: which node made the value,
                and the offset and strides in its memory. The memory is freed after the value's last use.
    backward    when autograd asks for a handle's tensor, the piece of the graph that it belongs to (dropped nodes that
                feed each other) runs again from what was kept. The handles get its results, so that autograd frees
                each of them with the node that saved it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from polylane.graph.capture.repeatable import DroppedTensors, repeatable_nodes
from polylane.graph.graph import Node
from polylane.graph.nodes.memory import storage_id
from polylane.runtime.pipeline.recomputed_pieces import Piece, cut_pieces, list_tensors, map_tensors

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class _Origin(NamedTuple):
    """The dropped value whose memory a tensor uses.

    Attributes:
        node: name of the fx node that made it.
        result: number of the tensor among its results.
        offset, dtype: of that result: elements from the beginning of its memory, and its dtype.
    """

    node: str
    result: int
    offset: int
    dtype: torch.dtype


class DroppedTensor:
    """What autograd keeps in place of a tensor that is recomputed.

    Attributes:
        record: record of its microbatch.
        node: name of the fx node that makes it again.
        index: number among the node's results, or among what the node saves besides.
        form: shape, stride and offset in the result's memory; None for what the node saves besides.
        tensor: the recomputed tensor, once its piece has run again.
    """

    __slots__ = ("__weakref__", "form", "index", "node", "record", "tensor")

    def __init__(
        self,
        record: MicrobatchRecord,
        node: str,
        index: int,
        form: tuple[torch.Size, tuple[int, ...], int] | None = None,
    ) -> None:
        self.record, self.node, self.index, self.form = record, node, index, form
        self.tensor: Tensor | None = None


class Recomputation:
    """Recomputation in one stage's code.

    Args:
        graph: the code, as one rank runs it.
        dropped: what is dropped, by the names of the captured graph's nodes.
        pack, unpack: make what stands for a kept tensor between the passes, and the tensor of it.
        nodes: the captured graph's nodes by name, for errors.
    """

    def __init__(
        self, graph: fx.Graph, dropped: DroppedTensors, pack: Pack, unpack: Unpack, nodes: Mapping[str, Node]
    ) -> None:
        self.graph, self.pack, self.unpack, self._nodes = graph, pack, unpack, nodes
        able = repeatable_nodes(graph) if dropped else set()
        self.again = {node for node in able if node.meta["name"] in dropped.again}
        self.values = {node for node in able if node.meta["name"] in dropped.values}
        self.nodes_by_line: dict[str, dict[int, Node]] = {}  # of the generated code of pieces, by file
        self.record: MicrobatchRecord | None = None  # of the forward pass that is running
        self._pieces: dict[tuple[frozenset[str], frozenset[str]], tuple[Piece, ...]] = {}

    @contextmanager
    def watching_calls(self) -> Iterator[None]:
        """Context manager: in the graph's code that is generated inside, calls drop what they are to drop."""
        changed = [n for n in self.graph.nodes if n in self.again or any(i in self.values for i in n.all_input_nodes)]
        changed = [node for node in changed if node.op == "call_function"]
        targets = [node.target for node in changed]
        for node in changed:
            node.target = _WatchedForward(node, self)
        try:
            yield
        finally:
            for node, target in zip(changed, targets, strict=True):
                node.target = target

    @contextmanager
    def recording(self, settings: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Context manager around a forward pass: what is dropped is recorded, if there will be a backward pass.

        Args:
            settings: returns the context manager of the pass's settings (autocast), for the second run.
        """
        if not self.again or not torch.is_grad_enabled():
            yield
            return
        self.record = record = MicrobatchRecord(self, settings)
        try:
            yield
        finally:
            self.record = None
        record.finish()

    def pieces(self, values: frozenset[str], inner: frozenset[str]) -> tuple[Piece, ...]:
        """Return the pieces of the graph that run again.

        Args:
            values: names of the fx nodes whose results autograd asks for.
            inner: names of those of which it asks for what they save besides.
        """
        if (values, inner) not in self._pieces:
            pieces = cut_pieces(self.graph, {node.name for node in self.values}, values, inner)
            self._pieces[values, inner] = pieces
            for code in (piece.code for piece in pieces):
                lines = {line: self._nodes[node.meta["name"]] for line, node in code.nodes_by_line.items()}
                self.nodes_by_line[code.file] = lines
        return self._pieces[values, inner]


class MicrobatchRecord:
    """What one forward pass dropped, and what it kept to make that again.

    Args:
        owner: the recomputation of the stage's code.
        settings: returns the context manager of the pass's settings.
    """

    def __init__(self, owner: Recomputation, settings: Callable[[], AbstractContextManager[Any]]) -> None:
        self.owner, self._settings = owner, settings
        # Of the forward pass: by fx node, the origins of its results by their storage's id; kept values.
        self.origins: dict[str, dict[int, _Origin]] = {}
        self._kept: dict[str, Any] = {}
        # By fx node: handles of its results and of what it saves besides; and which of its arguments had gradients.
        self._values: dict[str, list[weakref.ref[DroppedTensor]]] = {}
        self._inner: dict[str, list[weakref.ref[DroppedTensor] | None]] = {}
        self._flags: dict[str, tuple[bool, ...]] = {}
        self._pieces: tuple[Piece, ...] = ()
        self._inputs: dict[int, list[Any]] = {}

    def keep(self, name: str, value: Any) -> None:
        """Keep a value that a dropped node reads, without its autograd graph."""
        if name not in self._kept:
            self._kept[name] = map_tensors(lambda t: _Kept(self.owner.pack(t.detach())), value)

    def drop_value(self, origin: _Origin, tensor: Tensor) -> DroppedTensor:
        """Return a handle for a tensor in the memory of a dropped value."""
        offset = int(tensor.storage_offset()) - origin.offset
        handle = DroppedTensor(self, origin.node, origin.result, (tensor.shape, tensor.stride(), offset))
        self._values.setdefault(origin.node, []).append(weakref.ref(handle))
        return handle

    def drop_inner(self, name: str, flags: tuple[bool, ...]) -> DroppedTensor:
        """Return a handle for the next tensor that a node saves besides inputs and results.

        Args:
            name: name of the fx node.
            flags: for each tensor among its arguments, whether it requires a gradient.
        """
        handles = self._inner.setdefault(name, [])
        self._flags[name] = flags
        handle = DroppedTensor(self, name, len(handles))
        handles.append(weakref.ref(handle))
        return handle

    def keep_inner(self, handle: DroppedTensor) -> None:
        """Leave a handle its tensor, which is kept anyway: no second run is needed for it."""
        self._inner[handle.node][handle.index] = None

    def finish(self) -> None:
        """End the forward pass: of the kept values only those stay that the second run reads."""
        alive = [
            frozenset(name for name, refs in handles.items() if any(ref is not None and ref() for ref in refs))
            for handles in (self._values, self._inner)
        ]
        self._pieces = self.owner.pieces(*alive)
        self._inputs = {i: [self._kept[name] for name in piece.inputs] for i, piece in enumerate(self._pieces)}
        self.origins, self._kept = {}, {}

    def tensor_of(self, handle: DroppedTensor) -> Tensor:
        """Return the tensor that a handle stands for; its piece runs again if it has not yet."""
        if handle.tensor is None:
            number = next(i for i, piece in enumerate(self._pieces) if handle.node in piece.names)
            self._run_again(self._pieces[number], self._inputs.pop(number))
        assert handle.tensor is not None
        return handle.tensor

    def _run_again(self, piece: Piece, kept_values: list[Any]) -> None:
        # In forward order, in which parameters that are sharded over replicas are gathered.
        inputs = [_unpack_kept(kept_value, self.owner.unpack) for kept_value in kept_values]
        with torch.no_grad(), self._settings():
            results, inner = piece.run(inputs, self._flags)
        for name, tensors in inner.items():
            handles = self._inner[name]
            if len(tensors) != len(handles):
                raise RuntimeError(
                    f"{name} saved {len(handles)} tensors of its own, and {len(tensors)} when it was recomputed"
                )
            for ref, tensor in zip(handles, tensors, strict=True):
                if ref is not None and (handle := ref()) is not None:
                    handle.tensor = tensor
        for name, value in results.items():
            value_tensors = list_tensors(value)
            for ref in self._values[name]:
                if (handle := ref()) is not None:
                    assert handle.form is not None
                    (shape, stride, offset), base = handle.form, value_tensors[handle.index]
                    handle.tensor = base.as_strided(shape, stride, int(base.storage_offset()) + offset)


class _Kept(NamedTuple):
    """Marks what stands for a kept tensor among a value's items."""

    packed: Any


def _unpack_kept(value: Any, unpack: Unpack) -> Any:
    if isinstance(value, _Kept):
        return unpack(value.packed)
    return type(value)(_unpack_kept(v, unpack) for v in value) if type(value) in (list, tuple) else value


class _WatchedForward:
    """Wraps the callable of a node that makes or reads a dropped value.

    Args:
        node: the fx node, with its own target.
        owner: the recomputation of the stage's code.
    """

    __module__ = "polylane"

    def __init__(self, node: fx.Node, owner: Recomputation) -> None:
        self.target: Any = node.target
        self.name, self.owner = node.name, owner
        self.__name__ = str(getattr(node.target, "__name__", "call")).replace(".", "_")
        self._runs_again = node in owner.again
        self._drops_value = self._runs_again and node in owner.values
        self._reads = list(_find_reads(node))
        head = node.args[0] if node.args else None
        self._defers = isinstance(head, fx.Node) and head.op == "placeholder" and head.meta["role"][0] == "deferred"
        # What the second run reads and no second run makes.
        dropped = {value.name for value in owner.values}
        self._keeps = [(name, path) for name, path in self._reads if name not in dropped] if self._runs_again else []
        self._keeps = self._keeps[1:] if self._defers else self._keeps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record = self.owner.record
        if record is None:
            return self.target(*args, **kwargs)
        known_origins: dict[int, _Origin | None] = {}
        for name, path in self._reads:
            origins = record.origins.get(name, {})
            for tensor in list_tensors(_follow(path, args, kwargs)):
                at = _storage(tensor)
                known_origins[at] = known_origins.get(at) or origins.get(at)
        for name, path in self._keeps:
            record.keep(name, _follow(path, args, kwargs))
        flags = tuple(t.requires_grad for t in list_tensors((args, kwargs))) if self._runs_again else ()
        undecided = list[DroppedTensor]()

        def pack(tensor: Tensor) -> Any:
            if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
                return self.owner.pack(tensor)  # strides alone do not describe it
            at = _storage(tensor)
            if at not in known_origins and self._runs_again:
                handle = record.drop_inner(self.name, flags)
                if not self._drops_value:  # it may be the result, which is kept
                    handle.tensor = tensor
                    undecided.append(handle)
                return handle
            origin = known_origins.get(at)
            if origin is None or origin.dtype != tensor.dtype:
                return self.owner.pack(tensor)
            return record.drop_value(origin, tensor)

        with saved_tensors_hooks(pack, self._unpack), self._local_model(args, pack):
            result = self.target(*args, **kwargs)
        results = {_storage(tensor) for tensor in list_tensors(result)} if undecided else set()
        for handle in undecided:
            assert handle.tensor is not None
            if _storage(handle.tensor) in results:
                record.keep_inner(handle)
            else:
                handle.tensor = None
        self._note_origins(record, result, known_origins)
        return result

    @contextmanager
    def _local_model(self, args: tuple[Any, ...], pack: Pack) -> Iterator[None]:
        """Context manager: a call whose weight gradient is computed later holds handles of dropped operands, too."""
        deferred = args[0] if self._defers else None
        if deferred is None:
            yield
            return

        def hold(operand: Tensor) -> Callable[[], Tensor] | None:
            handle = pack(operand)
            return partial(self._unpack, handle) if isinstance(handle, DroppedTensor) else None

        deferred.hold_dropped = hold
        try:
            yield
        finally:
            deferred.hold_dropped = None

    def _unpack(self, handle: Any) -> Tensor:
        return handle.record.tensor_of(handle) if isinstance(handle, DroppedTensor) else self.owner.unpack(handle)

    def _note_origins(self, record: MicrobatchRecord, result: Any, known_origins: dict[int, _Origin | None]) -> None:
        """Record whose memory the results use: that of a dropped value, or memory that is dropped here."""
        new_origins: dict[int, _Origin] = {}
        for index, tensor in enumerate(list_tensors(result)):
            if tensor.layout is not torch.strided:
                continue
            at = _storage(tensor)
            origin = known_origins.get(at)
            if origin is None and at not in known_origins and self._drops_value:
                origin = new_origins.get(at) or _Origin(self.name, index, int(tensor.storage_offset()), tensor.dtype)
            if origin is not None:
                new_origins[at] = origin
        if new_origins:
            record.origins[self.name] = new_origins


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor) if tensor.layout is torch.strided else -1


def _find_reads(node: fx.Node) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the nodes that a node reads by name, each with the path to it through the node's arguments."""

    def walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        if isinstance(value, fx.Node):
            yield value.name, path
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                yield from walk(item, (*path, i))
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, (*path, key))
        elif isinstance(value, slice):
            for name in ("start", "stop", "step"):
                yield from walk(getattr(value, name), (*path, name))

    yield from walk(tuple(node.args), (0,))
    yield from walk(dict(node.kwargs), (1,))


def _follow(path: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
    value: Any = (args, kwargs)
    for step in path:
        value = getattr(value, step) if isinstance(value, slice) else value[step]
    return value
