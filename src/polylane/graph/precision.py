"""Floating-point precision inside a graph: autocast regions, and promotion to float64 for verification."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from polylane.graph.batch import cast_tensor
from polylane.graph.nodes.facts import UnderSetting, cast_value, op_name
from polylane.graph.python_state.moved_module import data_replaced
from polylane.graph.python_state.random_generators import generator_states, restore_generators

# What each lower dtype becomes for verification; integers and double precision are unchanged.
PROMOTED = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
LOWER = tuple(PROMOTED)

# Functions that make a tensor of numbers which need not be floats of a lower precision, with an argument dtype.
FROM_NUMBERS = (
    torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, Tensor.new_tensor, torch.full, torch.arange,
    torch.range, torch.linspace, torch.logspace,
)  # fmt: skip

# Types of arguments with nothing inside.
_LEAVES = {Tensor, nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device}


class InAutocast(UnderSetting):
    """An operator of a region that the user put under autocast, or out of it."""

    def __init__(self, target: Callable[..., Any], setting: Sequence[Any]) -> None:
        super().__init__(target)
        self.device_type, self.dtype, self.enabled, self.cache = setting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache):
            return self.target(*args, **kwargs)


class InFloat64(UnderSetting):
    """The user's own Python with all its casts to lower floating dtypes promoted."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Promoted():
            return self.target(*args, **kwargs)


class Promoted(TorchFunctionMode):
    """Mode in which casts to, and new tensors of, a lower floating dtype are float64."""

    _CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._CASTS:
            return Tensor.double(*args)
        args, kwargs = _promote_value(args), _promote_value(kwargs or {})
        with default_float64():
            result = _call_promoted(func, args, kwargs)
        # A new tensor without a tensor among its arguments has the default dtype.
        if not isinstance(result, Tensor) or result.dtype not in LOWER or any(isinstance(a, Tensor) for a in args):
            return result
        wide = PROMOTED[result.dtype]
        return func(*args, **{**kwargs, "dtype": wide}) if func in FROM_NUMBERS else result.to(wide)


def _call_promoted(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function, in float64 also on tensors of a lower dtype, such as plain attributes of a module."""
    flat = [*args, *kwargs.values()]
    if not all(type(value) in _LEAVES for value in flat):  # looking for leaves takes as long as a small operator
        flat = tree_leaves(flat)
    lower = [value for value in flat if isinstance(value, Tensor) and value.dtype in LOWER]
    if not lower:
        return func(*args, **kwargs)
    old_states = generator_states()
    try:
        result = func(*args, **kwargs)
    except RuntimeError:  # operands of two dtypes
        result = None
    memory = {value.untyped_storage().data_ptr() for value in lower}
    tensors = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    # What is written, or looked at from elsewhere, stays the tensor that it is.
    if result is not None and (
        not any(value.dtype in LOWER for value in tensors)
        or any(value.untyped_storage().data_ptr() in memory for value in tensors)
    ):
        return result
    restore_generators(old_states)
    wide = tree_map(lambda v: v.to(PROMOTED[v.dtype]) if isinstance(v, Tensor) and v.dtype in LOWER else v, args)
    return func(*wide, **kwargs)


class _DefaultFloat64:
    """torch's default dtype, which all threads of a process share, as float64 while any of them asks for it."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, torch.float32

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context manager: inside, float64 is what integers become where a function makes floats of them.

        Threads enter and leave in any order (each of a server, say): the first sets it, and the last puts it back.
        """
        with self._lock:
            if not self._inside:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(torch.float64)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    torch.set_default_dtype(self._before)


default_float64 = _DefaultFloat64()


class FromIntegers(UnderSetting):
    """An operator that makes floats of integers: in float64."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with default_float64():
            return self.target(*args, **kwargs)


class LiteralRecorder(TorchFunctionMode):
    """Mode that keeps the numbers which the user's code makes tensors of, in double precision.

    A capture in float32 rounds them: of 1/3 it has the nearest float32, which the same code in float64 has not.

    Attributes:
        tensors: one for each tensor that was made of Python numbers or of an array, and for each Python float.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in FROM_NUMBERS and isinstance(result, Tensor) and result.dtype in LOWER:
            tensor = func(*args, **{**(kwargs or {}), "dtype": PROMOTED[result.dtype]})
            self.tensors += [] if tensor.is_meta else [tensor.detach().cpu()]
        numbers = {value for value in tree_leaves((args, kwargs)) if isinstance(value, float)}
        self.tensors += [torch.tensor(number, dtype=torch.float64) for number in numbers]
        return result

    def find(self, value: Tensor) -> Tensor | None:
        """Return the tensor whose rounding to the dtype of ``value`` is ``value``; None if none is recorded."""
        rounds = (t for t in self.tensors if t.shape == value.shape and torch.equal(t.to(value.dtype), value.cpu()))
        return next((tensor.to(value.device) for tensor in rounds), None)


def wrap_autocast(graph: fx.Graph) -> None:
    """Put operators captured under autocast under their setting again."""
    for node in graph.nodes:
        of_tensors = isinstance(node.meta.get("val"), (Tensor, list, tuple))
        if node.op == "call_function" and "autocast" in node.meta and of_tensors:
            node.meta.setdefault("op", op_name(node))
            node.target = InAutocast(node.target, node.meta["autocast"])


def unwrap_autocast(graph: fx.Graph) -> None:
    """Undo :func:`wrap_autocast`."""
    for node in graph.nodes:
        if isinstance(node.target, InAutocast):
            node.target = node.target.target


def promote_to_float64(graph: fx.Graph, constants: dict[str, Tensor], literals: LiteralRecorder) -> None:
    """Make a graph captured in float32 compute in float64 throughout, for verification.

    Args:
        graph: the captured graph, which is changed.
        constants: tensors that it closes over, by placeholder name, which are changed.
        literals: what the user's code made tensors of.
    """
    written = {n.args[0].name for n in graph.nodes if n.target is torch.ops.aten.lift_fresh_copy.default}
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = _promote_value(node.args)
            node.kwargs = _promote_value(node.kwargs)
            node.meta.pop("autocast", None)
            if hasattr(node.target, "fake"):  # the user's own Python
                node.target = InFloat64(node.target)
            elif _makes_lower(node):
                node.kwargs = {**node.kwargs, "dtype": PROMOTED[node.meta["val"].dtype]}
            elif _makes_floats_of_integers(node):
                node.meta.setdefault("op", op_name(node))
                node.target = FromIntegers(node.target)
        node.meta |= {key: _to_double(node.meta[key]) for key in ("val", "open") if key in node.meta}
    for name, value in constants.items():
        if value.dtype in LOWER:
            constants[name] = _exact_literal(value, literals) if name in written else value.to(PROMOTED[value.dtype])


def _exact_literal(value: Tensor, literals: LiteralRecorder) -> Tensor:
    """Return a constant that was written in the code as it was written: 0.1, not the nearest float32 to it."""
    exact = literals.find(value)
    if exact is not None or value.dim() > 0 or value.is_complex():
        return value.to(PROMOTED[value.dtype]) if exact is None else exact
    return torch.tensor(float(str(value.float().numpy())), dtype=torch.float64)  # the shortest decimal that gives it


def to_float64(module: nn.Module) -> nn.Module:
    """Cast all parameters and buffers of a module to double precision, complex ones too."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.to(PROMOTED.get(tensor.dtype, tensor.dtype))
    return module


def _makes_lower(node: fx.Node) -> bool:
    """Return whether an operator makes a new tensor of the default floating dtype."""
    val = node.meta.get("val")
    reads_tensor = any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)
    is_new = isinstance(val, Tensor) and val.dtype in LOWER and not reads_tensor
    schema = getattr(node.target, "_schema", None)
    return is_new and schema is not None and any(argument.name == "dtype" for argument in schema.arguments)


def _makes_floats_of_integers(node: fx.Node) -> bool:
    """Return whether an operator makes floats, of the default dtype, of tensors that have none: ``integers * 0.5``."""
    val, read = node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [tensor for tensor in read if isinstance(tensor, Tensor)]
    if not isinstance(val, Tensor) or not val.dtype.is_floating_point or not isinstance(node.target, OpOverload):
        return False
    says_dtype = any(isinstance(value, torch.dtype) for value in tree_leaves((node.args, node.kwargs)))
    floats = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    return bool(tensors) and not says_dtype and not floats


def _to_double(val: Any) -> Any:
    if isinstance(val, Tensor):
        return cast_value(val, PROMOTED[val.dtype]) if val.dtype in LOWER else val
    return type(val)(_to_double(v) for v in val) if isinstance(val, (list, tuple)) else val


def _promote_value(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return PROMOTED.get(value, value)
    if isinstance(value, list):  # fx's immutable lists and dictionaries become plain ones
        return [_promote_value(v) for v in value]
    if type(value) is tuple:  # not torch.Size and named tuples
        return tuple(_promote_value(v) for v in value)
    if isinstance(value, dict):
        return {k: _promote_value(v) for k, v in value.items()}
    return value


@contextmanager
def cast_module(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context manager: cast all floating and complex parameters and buffers of a module to another precision inside.

    The tensor objects stay the same. What is written to buffers inside is lost.
    """
    tensors = [(tensor, cast_tensor(tensor.data, dtype)) for tensor in (*module.parameters(), *module.buffers())]
    changed = [(tensor, data) for tensor, data in tensors if data.dtype != tensor.dtype]
    with data_replaced(changed):
        yield


# ---- autocast -----------------------------------------------------------------------------------------------------


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of the autocast that a plan's precision asks for; None: ``float32`` casts nothing."""
    return None if precision == "float32" else getattr(torch, precision)


def autocast_to(dtype: torch.dtype | None, device_type: str) -> AbstractContextManager[Any]:
    """Context manager: autocast to a dtype on a type of device, "cpu" or "cuda"; of None nothing."""
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)
