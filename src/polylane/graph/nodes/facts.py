"""Node facts: the operator of a node, its in-place and stand-in forms, and its arguments by torch's names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

# A schema's default dtype is torch's own number of it (c10/core/ScalarType.h); the only default in use is int64.
_DTYPES = {4: torch.int64}

_TWINS = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.float_power_.Scalar": "aten.float_power.Tensor_Scalar",
    "aten.float_power_.Tensor": "aten.float_power.Tensor_Tensor",
    "aten.floor_divide_.Tensor": "aten.floor_divide.default",
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.pow_.Scalar": "aten.pow.Tensor_Scalar",
    "aten.pow_.Tensor": "aten.pow.Tensor_Tensor",
    "aten.transpose_.default": "aten.transpose.int",
    "aten.zero_.default": "aten.zeros_like.default",
}
_UNFILLED = ("aten.empty", "aten.new_empty")


def op_name(node: fx.Node) -> str:
    """Return "aten.linear.default" for an operator of torch; for any other target the callable's own name."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


class UnderSetting:
    """An operator that runs under a setting of its own (autocast, float64, joint gradients)."""

    __module__ = "polylane"

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.__name__ = str(getattr(target, "__name__", target)).replace(".", "_")


def unwrap_settings(target: Any) -> Any:
    """Return an operator without the settings that it runs under."""
    while isinstance(target, UnderSetting):
        target = target.target
    return target


def is_unfilled(op: str) -> bool:
    """Return whether an operator returns uninitialized memory, which cannot be compared."""
    return op.startswith(_UNFILLED)


def functional_name(node: fx.Node) -> str:
    """Return the operator that returns as a new value what ``node`` writes in place ("aten.add.Tensor"), or ""."""
    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
    if not str(node.target).startswith("aten.") or not name.endswith("_") or name.endswith("__"):
        return ""
    return _TWINS.get(f"aten.{name}.{overload}", f"aten.{name[:-1]}.{overload}")


def find_operator(name: str) -> Any:
    """Return torch's operator of a name ("aten.linear.default"); None if there is none."""
    if not name.startswith("aten."):
        return None
    _, base, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, base, None), overload, None)


def cast_value(val: Any, dtype: torch.dtype) -> Tensor:
    """Return a node's value, a tensor without data, in another dtype."""
    with getattr(val, "fake_mode", nullcontext()):
        cast: Tensor = val.detach().to(dtype)
    return cast


def bind_arguments(node: fx.Node) -> tuple[int, dict[str, Any], list[str]]:
    """Bind a node's arguments to the names in torch's schema.

    Returns:
        The number of leading arguments that are not torch's, all others by name, and the names that are positional.
    """
    function, args, kwargs = find_operator(operator_name(node)), node.args, node.kwargs
    if function is None:
        return 0, {**{f"#{i}": a for i, a in enumerate(args)}, **kwargs}, [f"#{i}" for i in range(len(args))]
    # Keyed operators take no generator: torch lets some of its own have one by position.
    schema = function._schema.arguments
    names = [a.name for a in schema if not a.kwarg_only and a.name != "generator"]
    # Polylane's stand-ins for torch's operators take arguments of their own first; torch's operators do not.
    prefix = 0 if isinstance(unwrap_settings(node.target), torch._ops.OpOverload) else _count_leading_arguments(node)
    arguments = dict(zip(names, args[prefix:], strict=False))
    result = {a.name: arguments.get(a.name, kwargs.get(a.name, _default_value(a))) for a in schema}
    return prefix, {**result, **{k: v for k, v in kwargs.items() if k not in result}}, names


def _default_value(argument: Any) -> Any:
    """Return an argument's default; a schema has torch's own number for a dtype, which Python does not know."""
    is_dtype = argument.name == "dtype" and isinstance(argument.default_value, int)
    return _DTYPES[argument.default_value] if is_dtype else argument.default_value


def _count_leading_arguments(node: fx.Node) -> int:
    """Return the number of leading arguments: the sample slice, for keyed operators also salt and batch dimension."""
    target = unwrap_settings(node.target)
    return 1 if getattr(target, "__name__", "") == "batch_norm" else 3


def operator_name(node: fx.Node) -> str:
    """Return "aten.linear.default"; for a stand-in of polylane's own, the name of the operator that capture saw."""
    return str(node.meta.get("op") or op_name(node))


def base_name(node: fx.Node) -> str:
    """Return the name of an aten operator without library and overload, "linear"; "" for any other node."""
    name = operator_name(node)
    return name.split(".")[1] if name.startswith("aten.") else ""
