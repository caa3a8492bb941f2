"""Stage hooks: what is done around a stage's passes, and around the calls of the user's own Python in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from polylane.errors import PolylaneError
from polylane.graph.capture.leaves import LeafCall
from polylane.graph.graph import Node
from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.nodes.user_lines import format_line
from polylane.runtime.pipeline.sample_witness import WitnessedCall, record_call, record_gradients


class StageHooks:
    """Context managers around a stage's passes, and around the writing of its code; these do nothing, ZeRO's do."""

    def cast_weights(self, graph: fx.Graph) -> None:
        """Have a graph read weights in the dtype of its passes where they are gathered in that."""

    def insert_gates(self, graph: fx.Graph) -> AbstractContextManager[None]:
        """Return a context manager in which a graph has further calls (all-gathers of sharded parameters)."""
        return nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        """Return the context manager for a forward pass."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Return the context manager for a backward pass."""
        return nullcontext()

    def backward_input(self) -> AbstractContextManager[None]:
        """Return the context manager for the first half of a backward pass in two."""
        return nullcontext()

    def backward_weight(self) -> AbstractContextManager[None]:
        """Return the context manager for its second half, after which all of its gradients are there."""
        return nullcontext()

    def pack_saved(self, tensor: Tensor) -> Any:
        """Return what autograd is to keep in place of a tensor that it saves in a forward pass."""
        return tensor

    def unpack_saved(self, handle: Any) -> Tensor:
        """Return the tensor for which :meth:`pack_saved` returned this."""
        tensor: Tensor = handle
        return tensor


class PythonCallWatch:
    """Watches the nodes that run the user's own Python: which one is in its backward pass, and what their inputs were.

    Autograd's traceback does not show it: no frame of the stage's code is on the stack in a backward pass.
    """

    def __init__(self) -> None:
        self.current_node: Node | None = None
        self.records: list[WitnessedCall] | None = None  # calls in the forward passes of a step that is checked
        self._placed = ExitStack()  # of the tensors of a module whose call is in its backward pass

    def watch_backward(self, node: Node, result: Any, arguments: Any, context: Callable[[], Any] = nullcontext) -> None:
        """Register hooks by which ``node`` is the current one from the gradient of its result to its arguments'.

        ``context`` returns a context manager, which is entered for that time.
        """

        def begin(_: Any) -> None:
            self.leave()
            self.current_node = node
            self._placed.enter_context(context())

        def end(_: Any) -> None:
            if self.current_node is node:
                self.leave()

        _register_prehooks(result, begin)
        _register_prehooks(arguments, end)

    def leave(self) -> None:
        """End the backward pass of the current node."""
        self.current_node = None
        self._placed.close()


def _register_prehooks(values: Any, hook: Callable[[Any], None]) -> None:
    """Have a hook called before the backward pass of each tensor in nested values."""

    def register(value: Any) -> Any:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.grad_fn.register_prehook(hook)
        return value

    fx.node.map_aggregate(values, register)


class WatchedCall:
    """Wraps the callable of a node whose calls and backward pass are watched."""

    __module__ = "polylane"

    def __init__(self, target: Callable[..., Any], node: Node, watch: PythonCallWatch) -> None:
        self.target, self.node, self.watch = target, node, watch
        self.__name__ = str(getattr(target, "__name__", "watched"))
        call = unwrap_settings(target)
        while not isinstance(call, LeafCall) and hasattr(call, "target"):  # wrapped with keys for random numbers
            call = unwrap_settings(call.target)
        is_checked = isinstance(call, LeafCall) and not call.normalizes
        self.leaf = call if isinstance(call, LeafCall) else None
        self.buffers = slice(len(call.parameters), len(call.parameters) + len(call.buffers)) if is_checked else slice(0)

    def _refuse_write(self, part: SampleSlice) -> None:
        """Refuse a write to a buffer that one device would make once for the whole batch.

        Raises:
            PolylaneError: the buffer would be written once for each part of the batch, from that part's samples.
        """
        if part.samples < part.count_loss_samples and torch.is_grad_enabled():
            raise PolylaneError(
                f"{self.node.module or 'the model'}{format_line(self.node.source)} writes its buffers in a part of the "
                "batch, and one device would write them once, for all samples: use microbatches=1, and leave it out of "
                "per_sample"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part, tensors = args
        record = None if self.watch.records is None else record_call(self.node, part, tensors)
        # Every in-place write raises a tensor's version counter.
        versions = [buffer._version for buffer in tensors[self.buffers]]
        result = self.target(*args, **kwargs)
        if versions != [buffer._version for buffer in tensors[self.buffers]]:
            self._refuse_write(part)
        if record is not None:
            self.watch.records.append(record)  # type: ignore[union-attr]
            record_gradients(record, result)
        # Tensors that a leaf passed on are not the module's own: these are put in place for its backward pass, too. The
        # call's other tensors are activations, which nobody keeps for that.
        leaf = self.leaf
        context = nullcontext if leaf is None else partial(leaf.tensors_in_place, tensors[: leaf.own_tensors])
        self.watch.watch_backward(self.node, result, (args, kwargs), context)
        return result
