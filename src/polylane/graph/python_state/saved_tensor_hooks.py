"""Hooks on tensors that autograd saves, and torch.func, which refuses to run inside of them.

Sharded parameters and recomputation hook what a pass saves. Inside of torch.func's transforms they are set aside, where
torch would raise: what is saved there keeps its memory until the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph as autograd_graph

_hooks: Any = torch._C._autograd
_disable = autograd_graph.disable_saved_tensors_hooks


@contextmanager
def torch_func_allowed() -> Iterator[None]:
    """Context manager: transforms of torch.func set hooks on saved tensors aside instead of refusing them."""
    original = torch.autograd.graph.disable_saved_tensors_hooks
    torch.autograd.graph.disable_saved_tensors_hooks = _set_aside
    try:
        yield
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = original


@contextmanager
def _set_aside(error_message: str) -> Iterator[None]:
    aside = list[Any]()
    while (pair := _hooks._top_saved_tensors_default_hooks(False)) is not None:
        aside.append(pair)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        with _disable(error_message):
            yield
    finally:
        for pair in reversed(aside):
            _hooks._push_saved_tensors_default_hooks(*pair)
