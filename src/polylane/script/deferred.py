"""Deferred tensors: what a training loop gets from its model, before anything has been computed.

A deferred tensor knows its shape, dtype and device, as torch's fake tensors do, and the call that makes it. torch's
functions on it are recorded; what needs its numbers (``item()``, printing, a comparison) makes them be computed.

    asked for                                    answer
    shape, dtype, requires_grad, len()           at once, from the metadata
    torch's functions and methods                a further deferred tensor
    item(), float(), bool(), print(), numpy()    the value of the step, computed by then
    backward()                                   the step's passes, under the plan
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_map_only, tree_unflatten

from polylane.graph.argument_trees import flatten_tree
from polylane.runtime.guarded_tensors import guard_of

# Runs the body of a torch function on a subclass as on a plain tensor.
plain_tensors: Any = torch._C.DisableTorchFunctionSubclass

_METADATA = frozenset(
    """
    shape dtype device layout ndim requires_grad is_leaf is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_mps
    is_xpu is_nested itemsize nbytes size dim numel nelement ndimension element_size is_floating_point is_complex
    is_signed stride is_contiguous get_device __len__ is_tensor is_same_size
    """.split()  # noqa: SIM905
)
_VALUES = frozenset(
    """
    item tolist numpy __float__ __int__ __bool__ __index__ __complex__ __format__ __repr__ __array__ __contains__
    is_nonzero equal allclose __dlpack__ __deepcopy__ __reduce_ex__ nonzero unique
    """.split()  # noqa: SIM905
)
# What makes a tensor like its first argument, whose values do not depend on that one's: it is made at once.
_LIKE = frozenset(
    """
    randn_like rand_like randint_like empty_like zeros_like ones_like full_like new_zeros new_ones new_empty new_full
    new_tensor
    """.split()  # noqa: SIM905
)
# What asks for torch's graph of gradients, which there is none of until the step has run: with what to write instead.
_REFUSED = {
    "register_hook": "a hook on what the model returns would not be called: put it on a module "
    "(register_full_backward_hook) or on a parameter",
    "register_post_accumulate_grad_hook": "a hook on what the model returns would not be called: put it on a parameter",
    "retain_grad": "the gradient of what the model returns is not kept: take it in the loss, by torch.autograd.grad",
    "grad_fn": "what the model returns has no grad_fn until its step has run: requires_grad says whether there is one",
    "__set__": "an attribute of what the model returns is assigned: use a function that returns a new tensor",
    "requires_grad_": "what the model returns becomes the beginning of gradients of its own: take the gradient in the "
    "loss, by torch.autograd.grad, or call backward() once for all models",
    "data_ptr": "what the model returns has no memory until its step has run",
    "untyped_storage": "what the model returns has no memory until its step has run",
}


class Recorder(Protocol):
    """What deferred tensors ask: see :class:`polylane.script.loop.TrainingLoop`."""

    def record(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...

    def compute(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...

    def take_argument(self, tensor: Tensor) -> Tensor: ...

    def refuse(self, reason: str) -> NoReturn: ...

    def backward(self, root: DeferredTensor, *args: Any, **kwargs: Any) -> None: ...


class Handling(Enum):
    """What is done with a function of torch that is called on a deferred tensor."""

    METADATA = auto()
    VALUE = auto()
    BACKWARD = auto()
    REFUSE = auto()
    LIKE = auto()
    NO_GRADIENT = auto()
    RECORD = auto()


class DeferredTensor(Tensor):
    """A tensor of a training loop that is still to be computed.

    Attributes:
        metadata: a fake tensor of its shape, dtype and device.
        call: the recorded call that makes it.
        position: of it among the call's results.
        form: what the metadata of a call's results depends on, of this as an argument.
    """

    is_deferred = True
    metadata: Tensor
    call: Any  # a RecordedCall of recording.py, which imports this module
    position: int
    form: Any

    @staticmethod
    def __new__(cls, metadata: Tensor, call: Any, position: int, form: Any) -> DeferredTensor:
        tensor: DeferredTensor = Tensor._make_wrapper_subclass(
            cls,
            metadata.shape,
            dtype=metadata.dtype,
            device=metadata.device,
            requires_grad=metadata.requires_grad,
        )
        tensor.metadata, tensor.call, tensor.position, tensor.form = metadata, call, position, form
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return answer_call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tensors = list_deferred((args, kwargs))
        tensor = tensors[0]
        if not func._schema.is_mutable and all(tensor.call.readers for tensor in tensors):
            return tensor.call.recorder.compute(func, args, kwargs or {})  # of a loader's batch, by compiled code
        # A number, or a copy without a gradient, that a function of torch takes of it by itself. A step cannot be run
        # from here, below torch's recording of gradients.
        if str(func) not in _TAKEN or not tensor.call.is_known(tensor.position):
            tensor.call.recorder.refuse(
                f"torch takes what the model returns as a number ({func}) before its step has run: write x.item()"
            )
        return func(tensor.call.recorder.compute(_identity, args, {}))


def _identity(value: Any) -> Any:
    return value


_TAKEN = ("aten._local_scalar_dense.default", "aten.detach.default")


def answer_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Answer a call of a torch function with deferred tensors among its arguments."""
    handling = _HANDLINGS.get(func)
    if handling is None:
        handling = _HANDLINGS[func] = _choose_handling(func)
    if handling is Handling.METADATA:
        with plain_tensors():
            return func(*[arg.metadata if isinstance(arg, DeferredTensor) else arg for arg in args], **kwargs)
    recorder: Recorder = _find_deferred(args, kwargs).call.recorder
    if handling is Handling.LIKE:
        model = args[0] if args else kwargs["input"]
        model = _memory_like(model) if isinstance(model, DeferredTensor) else model
        kwargs = {name: value for name, value in kwargs.items() if name != "input"}
        return recorder.compute(functools.partial(func, model), args[1:], kwargs)
    if handling is Handling.RECORD:
        return recorder.record(func, args, kwargs)
    if handling is Handling.NO_GRADIENT:  # as of every tensor of torch that is no leaf
        return None
    if handling is Handling.REFUSE and _is_without_effect(func, args, kwargs):
        return args[0]
    if handling is Handling.REFUSE:
        reason = _REFUSED[_name_of(func)]
        if _find_deferred(args, kwargs).call.readers:
            reason = reason.replace("what the model returns", "what a loader returns")
            reason += "; or have every worker read whole batches: polylane.prepare(..., whole_batches=True)"
        recorder.refuse(reason)
    if handling is Handling.BACKWARD:
        return recorder.backward(*args, **kwargs)
    value = recorder.compute(func, args, kwargs)
    return _tell_gradient(value, args[0]) if _name_of(func) == "__repr__" else value


def _is_without_effect(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function that is refused changes nothing: requires_grad_() of what has a gradient already."""
    flag = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
    return _name_of(func) == "requires_grad_" and bool(flag) == bool(args[0].metadata.requires_grad)


_LINE_WIDTH, _INDENT = 80, 7  # of what torch prints of a tensor


def _tell_gradient(text: str, tensor: DeferredTensor) -> str:
    """Return what is printed of a value with what torch says of its gradient."""
    metadata = tensor.metadata
    if not metadata.requires_grad:
        return text
    suffix = "requires_grad=True" if metadata.grad_fn is None else f"grad_fn=<{type(metadata.grad_fn).__name__}>"
    body = text.removesuffix(")")
    is_long = len(body) - body.rfind("\n") + 1 + len(suffix) + 2 > _LINE_WIDTH
    return body + (",\n" + " " * _INDENT if is_long else ", ") + suffix + ")"


_HANDLINGS = dict[Any, Handling]()


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    # A property is that of a method-wrapper.
    return str(getattr(func.__self__, "__name__", "") if name == "__get__" else name)


def _choose_handling(func: Any) -> Handling:
    name = _name_of(func)
    if name in _REFUSED:
        return Handling.REFUSE
    if name == "grad" and getattr(func, "__name__", "") == "__get__":
        return Handling.NO_GRADIENT
    if name in _LIKE:
        return Handling.LIKE
    if name in _METADATA:
        return Handling.METADATA
    if name == "backward":
        return Handling.BACKWARD
    return Handling.VALUE if name in _VALUES else Handling.RECORD


def _memory_like(tensor: DeferredTensor) -> Tensor:
    return torch.empty_strided(
        tensor.metadata.shape, tensor.metadata.stride(), dtype=tensor.dtype, device=tensor.device
    )


def list_deferred(values: Any) -> list[DeferredTensor]:
    """Return the deferred tensors among nested values."""
    tensors = list[DeferredTensor]()
    tree_map_only(DeferredTensor, tensors.append, values)
    return tensors


# Folders whose frames are no lines of the user's script.
_NOT_THE_USERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def find_frame() -> FrameType:
    """Return the frame of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame


def is_differentiated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a gradient flows through what a function makes of its arguments."""
    return torch.is_grad_enabled() and any(t.metadata.requires_grad for t in list_deferred((tuple(args), dict(kwargs))))


def _find_deferred(args: Any, kwargs: Mapping[str, Any]) -> DeferredTensor:
    """Return a deferred tensor among arguments: one that is differentiated, if there is one, whose loop records."""
    stack, constant = [*args, *kwargs.values()], None
    while stack:
        value = stack.pop()
        if isinstance(value, DeferredTensor):
            if value.metadata.requires_grad:
                return value
            constant = value
        elif isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, dict):
            stack += value.values()
    if constant is None:
        raise RuntimeError("a function of a deferred tensor was called without one")
    return constant


# ---- functions with backward passes of their own --------------------------------------------------------------------


def record_functions() -> None:
    """Let a script's ``torch.autograd.Function`` be recorded where it is applied to what is still to be computed.

    torch does not hand its calls over as those of other functions. Not undone, since the script is that of a worker.
    """
    original = torch.autograd.Function.__dict__["apply"]  # a classmethod, or from torch 2.14 on one in C
    if hasattr(torch.autograd.Function.apply, "records"):
        return

    @functools.wraps(torch.autograd.Function.apply)
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        leaves = [*args, *kwargs.values()]
        if any(isinstance(leaf, DeferredTensor) for leaf in leaves):
            return answer_call(_apply_of(cls), args, kwargs)
        guard = next((guard for leaf in leaves if (guard := guard_of(leaf)) is not None), None)
        if guard is None or guard.reader is None:
            return original.__get__(None, cls)(*args, **kwargs)
        return guard.reader.read(_apply_of(cls), args, kwargs)

    apply.records = True  # type: ignore[attr-defined]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]


@functools.cache
def _apply_of(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    return apply


# ---- writes in place ------------------------------------------------------------------------------------------------

_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor")}

_AUGMENTED = {  # bytecode of ``a += b`` and its like, which differs from one Python to the next
    (instruction.opcode, instruction.arg)
    for operator in ("+", "-", "*", "/", "//", "**", "%", "&", "|", "^", "@", "<<", ">>")
    for instruction in dis.Bytecode(f"a {operator}= b")
    if instruction.opname == "BINARY_OP"
}


def is_augmented_assignment() -> bool:
    """Return whether the script's code that is running is ``a += b`` or its like, which binds the result to the name.

    torch does not tell ``a += b`` from ``a.add_(b)``.
    """
    frame = find_frame()
    code, at = frame.f_code.co_code, frame.f_lasti
    return (code[at], code[at + 1]) in _AUGMENTED


def moves_statistics(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a normalization writes running statistics of the script's own, which torch does not count."""
    if func.__name__ not in ("batch_norm", "instance_norm"):
        return False
    statistics = (*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
    trains = kwargs.get("training", kwargs.get("use_input_stats", True))
    return bool(trains) and any(isinstance(value, Tensor) for value in statistics)


def writes_in_place(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    is_method = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return is_method or name == "__setitem__" or name in _IN_PLACE


@functools.cache
def on_copy(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a write on a copy of its first argument, and returns the copy."""

    @functools.wraps(func)
    def write(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = target.clone()
        func(copy, *args, **kwargs)
        return copy

    return write


# ---- arguments of calls ----------------------------------------------------------------------------------------------


class FlatArguments(NamedTuple):
    """How arguments without containers among them are put together again; cheaper than a tree.

    Attributes:
        positions: number of arguments by position.
        names: names of the others.
    """

    positions: int
    names: tuple[str, ...]


Spec = TreeSpec | FlatArguments


def flatten_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Spec]:
    """Return the flat arguments of a call, and how they are nested."""
    leaves = [*args, *kwargs.values()]
    if all(type(leaf) in _PLAIN_TYPES for leaf in leaves):
        return leaves, FlatArguments(len(args), tuple(kwargs))
    return flatten_tree((tuple(args), dict(kwargs)))


def unflatten_arguments(leaves: Sequence[Any], spec: Spec) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of a call, by position and by name."""
    if isinstance(spec, FlatArguments):
        return leaves[: spec.positions], dict(zip(spec.names, leaves[spec.positions :], strict=True))
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


_PLAIN_TYPES = frozenset([DeferredTensor, Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype])
