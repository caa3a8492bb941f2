"""Reassigned buffers: ``self.buffer = new`` in a forward is a write of the buffer, which export alone would lose.

The module's own table then has another tensor, and what polylane holds is the first one: it takes the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook

from polylane.graph.nodes.memory import alias_groups


@contextmanager
def reassignments_written(model_with_loss: nn.Module) -> Iterator[None]:
    """Context manager: behind each module's forward, write into its buffers the tensors put in their place.

    What a forward reads between the assignment and its end is the new tensor, as without polylane.

    Args:
        model_with_loss: model and loss under export, with the tensors of the export in the place of their own.

    Raises:
        ValueError: inside, a new tensor has another shape or dtype, or is none: no write makes a buffer that.
    """
    buffers = [(module, key, tensor) for module in model_with_loss.modules() for key, tensor in module._buffers.items()]
    module_buffers = dict[int, list[tuple[nn.Module, str, Tensor | None]]]()
    for module, key, tensor in buffers:
        module_buffers.setdefault(id(module), []).append((module, key, tensor))

    def write(module: nn.Module, *_: Any) -> None:
        _write_reassigned(module_buffers.get(id(module), ()))

    # A hook on all modules, which belongs to none: the user's own are called behind it, as ever.
    hook = register_module_forward_hook(write)
    try:
        yield
    finally:
        hook.remove()
    _write_reassigned(buffers)  # a parent may assign to a child, and the loss to the model


def _write_reassigned(buffers: Any) -> None:
    changed = [(module, key, old) for module, key, old in buffers if module._buffers.get(key) is not old]
    # All values first: what is assigned may be another buffer, which is written as well.
    values = [_value_of(module, key, old) for module, key, old in changed]
    # Not for every module: export takes time in the square of the number of regions without gradients.
    guarded = any(old.requires_grad for _, _, old in changed)
    with torch.no_grad() if guarded else nullcontext():
        for (module, key, old), value in zip(changed, values, strict=True):
            old.copy_(value)
            module._buffers[key] = old


def _value_of(module: nn.Module, key: str, old: Tensor | None) -> Tensor:
    """Return the value that a forward has assigned to a buffer, apart from the memory of all others."""
    value = module._buffers.get(key)
    if old is None or value is None or value.dtype != old.dtype or value.shape != old.shape:
        forms = [f"{list(item.shape)} of {item.dtype}" if item is not None else "nothing" for item in (old, value)]
        raise ValueError(f"forward assigns to the buffer {key}, which is {forms[0]}, {forms[1]}")
    return value.detach().clone()


def copy_what_is_read(graph: fx.Graph) -> None:
    """Let operators before the one write of a buffer read a copy, which autograd may keep for a backward pass.

    Without polylane a new tensor takes the buffer's place, and autograd keeps the old one.

    Args:
        graph: captured code, unlabelled; changed in place.
    """
    groups, order = alias_groups(graph), {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        buffer = node.args[0] if str(node.target) == "aten.copy_.default" else None
        if not isinstance(buffer, fx.Node) or buffer.op != "placeholder" or buffer.meta["role"][0] != "buffer":
            continue
        if sum(root is groups[buffer] for root in groups.values()) > 2:  # the buffer, the write, and other views
            continue
        readers = sorted((user for user in buffer.users if order[user] < order[node]), key=order.__getitem__)
        if not readers:
            continue
        with graph.inserting_before(readers[0]):
            copy = graph.call_function(torch.ops.aten.clone.default, (buffer,))
        keys = ("stack_trace", "nn_module_stack")
        copy.meta = {key: readers[0].meta[key] for key in keys if key in readers[0].meta} | {"val": buffer.meta["val"]}
        for reader in readers:
            reader.replace_input_with(buffer, copy)
