"""Deep copies of the user's modules, of those too that copy.deepcopy refuses or copies in part."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from polylane.graph.python_state.gradient_hooks import copy_hooks

_TORCHS = ("_parameters", "_buffers", "_modules")


def copy_module(module: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module.

    Hooks on the gradients of its parameters come with it. A tensor that is computed from parameters and kept as an
    attribute (``torch.nn.utils.weight_norm`` does so before each forward) is copied by its values. What cannot be
    copied at all (a lock, an open file) is shared.

    Args:
        module: the user's module, which stays as it is.
        shared: objects that the copy shares with the module, by id.

    Raises:
        Exception: the module has a ``__deepcopy__`` of its own, which raised.
    """
    memo = dict(shared or {})
    for submodule in module.modules():
        for name, value in vars(submodule).items():
            if name not in _TORCHS:
                memo |= _values_of_computed(value)
    try:
        copied = copy.deepcopy(module, dict(memo))
    except Exception:  # of a lock, an open file, a tensor with a graph: the two share it. To find it takes a while.
        copied = copy.deepcopy(module, memo | _uncopyable(module))
    copy_hooks(module, copied)
    return copied


def _values_of_computed(value: Any) -> dict[int, Any]:
    """Return by id the copies of tensors that autograd has computed: copy.deepcopy refuses them."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return {id(v): v.detach().clone() for v in values if isinstance(v, Tensor) and not v.is_leaf}


def _uncopyable(module: nn.Module) -> dict[int, Any]:
    values: dict[int, Any] = {}
    for submodule in module.modules():
        for name, value in vars(submodule).items():
            if name in _TORCHS or isinstance(value, Tensor):
                continue
            try:
                copy.deepcopy(value)
            except Exception:
                values[id(value)] = value
    return values
