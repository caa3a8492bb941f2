"""Guarded tensors: what a script does between steps with weights that its process does not hold whole.

Between two calls of a job the script has the model in its hands: it clamps weights, initializes a layer again, loads a
state dict, copies or saves the model. Where a worker holds a part of a weight, or an old value of what another stage
trains, it would read that part, NaN or the old value, and write what no worker trains. So such tensors are of a class
of their own while the script runs, whose operations torch hands over (``__torch_function__``):

    asked for                                      answer
    shape, dtype, hooks, requires_grad             those of the whole tensor
    a new tensor like it                           one of the whole shape
    a write of values that are given, or drawn     made whole, of which this worker takes its part
    what torch.nn.init does with it                done to a whole draft, of which this worker takes its part at the end
    a write element by element                     made on this worker's part
    its values, or its gradient                    StaleWeights, which says what to call

Writes cost no message: every worker must make the same ones, as it must call the same methods.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from polylane.errors import PolylaneError

# What is the same of a part and of the whole.
_METADATA = """
    dtype device layout requires_grad requires_grad= requires_grad_ is_leaf is_floating_point is_complex is_cuda is_meta
    is_sparse is_quantized is_signed is_nested is_cpu is_mkldnn is_xpu is_mps is_sparse_csr is_inference _version
    __hash__ element_size itemsize names grad_fn output_nr grad= retain_grad retains_grad register_hook
    register_post_accumulate_grad_hook _backward_hooks _backward_hooks= _post_accumulate_grad_hooks
    _post_accumulate_grad_hooks= get_device is_shared is_pinned data_ptr name
"""
_SHAPES = "shape size numel nelement dim ndim ndimension __len__ nbytes is_same_size"
_LIKE = """
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full
    new_tensor new view_as reshape_as expand_as
"""
# Writes whose result does not depend on what was there; all of torch.nn.init are such, too.
_INITIALIZERS = "torch.nn.init"
_FRESH = "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ data="
_BY_ELEMENT = """
    add_ sub_ mul_ div_ multiply_ divide_ subtract_ true_divide_ clamp_ clamp_min_ clamp_max_ clip_ abs_ neg_ sign_
    sqrt_ rsqrt_ pow_ exp_ log_ round_ lerp_ addcmul_ addcdiv_ masked_fill_ nan_to_num_ erfinv_ relu_ tanh_ sigmoid_
    reciprocal_ square_ floor_ ceil_ trunc_ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__
"""
_KINDS = {
    name: kind
    for kind, names in {
        "metadata": _METADATA,
        "shape": _SHAPES,
        "like": _LIKE,
        "fresh": _FRESH,
        "by element": _BY_ELEMENT,
    }.items()
    for name in names.split()
}


class StaleWeights(PolylaneError):
    """A use of the user's model in a process where its weights are not those of the training."""


class Reader(Protocol):
    """Answers a script that asks for what is not whole here, where every worker runs the same script: collectives."""

    def read(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function on the values of guarded tensors among its arguments."""

    def begin_write(self, guard: Guard) -> None:
        """Prepare for a write of what a guard answers for."""

    def write(self, tensor: Tensor, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Make a write on a guarded tensor that needs the whole of it; the arguments are those behind the tensor."""

    def read_all(self, values: Any) -> Any:
        """Return nested values with those of guarded tensors in their place."""

    def gradient(self, guard: Guard) -> Tensor | None:
        """Return a parameter's gradient, guarded as well; None where it has none."""

    def set_gradient(self, guard: Guard, gradient: Tensor | None) -> None:
        """Give a parameter a whole gradient, of which each worker takes its part; None: take it away."""


@dataclass(eq=False)
class Guard:
    """How a tensor that is not whole, or not up to date, answers a script.

    Attributes:
        name: of the parameter or buffer, as a script writes it: model.0.weight, loss.centers.
        why: sentence that says what this worker has of it.
        shape: of the whole tensor.
        local: returns what this worker holds of it, where that is a part; None where it holds nothing.
        cut: returns this worker's part of a whole tensor; None: the tensor is whole, and its values are old ones.
        is_served: whether a server has it: its values may be read here, and not written.
        record_write: called after a write, with whether all values are given by it.
        draft: the whole tensor as far as torch.nn.init has written it; None where it is not about to.
        reader: answers what is asked of values and gradients; None: that is refused.
        aliases: tensors that share the tensor's memory as far as the script knows (``.data``, ``detach()``).
        has_aliases: whether there were any since other memory was assigned; the same on every worker.
    """

    name: str
    why: str
    shape: torch.Size
    local: Callable[[], Tensor | None] = lambda: None
    cut: Callable[[Tensor], Tensor | None] | None = None
    is_served: bool = False
    record_write: Callable[[bool], None] = lambda is_fresh: None
    draft: Tensor | None = None
    reader: Reader | None = None
    aliases: weakref.WeakSet[Tensor] = field(default_factory=weakref.WeakSet)
    has_aliases: bool = False
    is_view = False  # of a guarded tensor

    def take_part(self, full_tensor: Tensor) -> None:
        """Write this worker's part of a whole tensor."""
        local, part = self.local(), self.cut(full_tensor) if self.cut is not None else None
        if local is not None and part is not None:
            local.detach().copy_(part.view(local.shape))

    def part_from_aliases(self, tensor: Tensor) -> None:
        """Leave the old values to the aliases of a tensor that is given other memory (``tensor.data = new``)."""
        if self.reader is None or not self.has_aliases:
            return
        old_value = self.reader.read_all(tensor).clone()
        for alias in list(self.aliases):
            remove_guard(alias)
            alias.data = old_value
        self.aliases.clear()
        self.has_aliases = False

    def finish_draft(self, tensor: Tensor) -> None:
        """Take this worker's part of what torch.nn.init has written, if it has, and count a write on the tensor."""
        if self.draft is None:
            return
        full_tensor, self.draft = self.draft.detach(), None
        try:
            with torch._C.DisableTorchFunctionSubclass():
                self.take_part(full_tensor)
        except StaleWeights:  # of a training that has ended: nobody trains on it, and all reads are refused
            return
        self.record_write(True)
        torch.autograd.graph.increment_version(tensor)

    def refuse(self, operation: str) -> StaleWeights:
        """Return the error for a use that this process cannot make."""
        if self.reader is not None:
            return StaleWeights(
                f"{self.name} cannot be written by {operation}, as workers hold parts of it under this plan: write "
                "into a copy, and assign that (tensor.copy_(copy), or parameter.grad = copy)"
            )
        if operation == "grad":
            return StaleWeights(
                f"the gradient of {self.name} is not whole in this process: {self.why}; "
                "job.whole_gradients() returns whole ones"
            )
        if self.is_served:
            return StaleWeights(
                f"{self.name} cannot be written by hand: {self.why}, and would overwrite it; leave servers out "
                "of the plan, or write it before the training is prepared"
            )
        state = "job.state_dict()" if self.name.startswith("model.") else "job.state_dict(losses=True)"
        return StaleWeights(
            f"{self.name} is not whole in this process: {self.why}; read it from {state}, or read and "
            f"write it inside of `with job.whole_model():`, either of which every worker must call"
        )


class _Answers:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _answer(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary tensor, with the values that the guard answers."""
        tensor: Any = self
        value = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, tensor.requires_grad).__reduce_ex__(protocol)
        return value.__reduce_ex__(protocol)


class GuardedParameter(_Answers, nn.Parameter):
    """A parameter that is not whole in this process."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter, with the values that the guard answers."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


class GuardedTensor(_Answers, Tensor):
    """A buffer that is not whole in this process, or an alias of a guarded tensor (``.data``, ``detach()``)."""


def put_guard(tensor: Tensor, guard: Guard) -> None:
    """Let a guard answer for a tensor, which stays the same object."""
    tensor._polylane_guard = guard  # type: ignore[attr-defined]
    tensor.__class__ = GuardedParameter if isinstance(tensor, nn.Parameter) else GuardedTensor


def remove_guard(tensor: Tensor) -> None:
    """Make a tensor an ordinary one again."""
    if isinstance(tensor, _Answers):
        kind: type = nn.Parameter if isinstance(tensor, GuardedParameter) else Tensor
        tensor.__class__ = kind
        del tensor._polylane_guard  # type: ignore[attr-defined]


def guard_of(value: Any) -> Guard | None:
    """Return what answers for a tensor; None for an ordinary one."""
    return getattr(value, "_polylane_guard", None) if isinstance(value, _Answers) else None


def _answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Answer a call of torch with guarded tensors among its arguments."""
    if not args and "tensor" in kwargs:  # of torch.nn.init
        args, kwargs = (kwargs["tensor"],), {key: value for key, value in kwargs.items() if key != "tensor"}
    guarded: list[Any] = [value for value in tree_leaves((args, kwargs)) if isinstance(value, _Answers)]
    initializes = sys._getframe(2).f_globals.get("__name__") == _INITIALIZERS
    for value in guarded if not initializes else ():
        if (guard := guard_of(value)) is not None:
            guard.finish_draft(value)
    guards = {id(guard): guard for guard in map(guard_of, guarded) if guard is not None}
    if not guards:  # a copy that torch made of one, of which nobody knows
        return func(*args, **kwargs)
    operation, guard = _name_of(func), next(iter(guards.values()))
    kind, is_write = _KINDS.get(operation), _is_write(operation, func) or kwargs.get("out") is not None
    if guard.reader is not None and operation in ("grad", "grad="):
        return guard.reader.gradient(guard) if operation == "grad" else guard.reader.set_gradient(guard, args[1])
    if guard.reader is not None and operation.startswith("_foreach_") and is_write:
        return _write_each(operation, args, kwargs)
    if kind == "metadata" or (guard.is_served and operation not in ("data", "detach") and not is_write):
        return _guard_views(guarded[0], guard, operation, _on_ordinary(guarded, func, args, kwargs))
    # A view of one is no new tensor: what would be written to it is lost.
    is_view = operation.endswith("_as") and bool(args) and isinstance(args[0], _Answers)
    if kind in ("shape", "like") and not is_view:
        # Of the whole shape, in the memory of one element; if only the shape matters, without memory.
        new, kw = tree_map(lambda value: _stand_in(value, kind == "shape"), (tuple(args), kwargs))
        return func(*new, **kw)
    if initializes and len(guards) == 1 and not guard.is_served:
        return _initialize(guard, func, guarded[0], args, kwargs)
    if operation in ("data", "detach"):
        alias: Tensor = func(*args, **kwargs).as_subclass(Tensor)
        put_guard(alias, guard)
        if guard.reader is not None:
            guard.aliases.add(alias)
            guard.has_aliases = True
        return alias
    if operation in ("__repr__", "__format__", "__str__") and guard.reader is None:
        return f"<{guard.name}, of shape {tuple(guard.shape)}: {guard.why}>"
    # Optimizers and modules look for a gradient before they drop it.
    if operation == "grad" and sys._getframe(2).f_code.co_name == "zero_grad":
        return func(*args)
    is_target = bool(args) and isinstance(args[0], _Answers)
    if is_write and is_target and guard.reader is not None:
        args, kwargs = (args[0], *guard.reader.read_all(args[1:])), guard.reader.read_all(kwargs)
        guards, guarded = {id(guard): guard}, guarded[:1]
    if is_write and is_target and len(guards) == 1 and not guard.is_served:
        return _write(guard, operation, func, guarded, args, kwargs)
    if guard.reader is not None and not (is_write and is_target):
        return guard.reader.read(func, args, kwargs)
    raise guard.refuse(operation)


def _write_each(operation: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Make a write on a list of tensors (``torch._foreach_mul_``) on each of them."""
    write = getattr(Tensor, operation.removeprefix("_foreach_"))
    for number, tensor in enumerate(args[0]):
        operands = [arg[number] if isinstance(arg, (list, tuple)) else arg for arg in args[1:]]
        options = {"value": operands.pop()} if len(operands) > 2 else {}  # of addcmul_ and addcdiv_
        _answer(write, (tensor, *operands), {**kwargs, **options})


def _name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        return f"{func.__self__.__name__}{'=' * (name == '__set__')}"
    return name


def _is_write(operation: str, func: Any) -> bool:
    in_place = operation.endswith("_") and not operation.endswith("__")
    of_python = operation in ("data=", "__setitem__") or _KINDS.get(operation) == "by element"
    return in_place or of_python or getattr(func, "__module__", None) == _INITIALIZERS


def _on_ordinary(guarded: Iterable[Tensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function while guarded tensors are ordinary ones."""
    pairs = [(tensor, guard) for tensor in guarded if (guard := guard_of(tensor)) is not None]
    for tensor, _ in pairs:
        remove_guard(tensor)
    try:
        return func(*args, **kwargs)
    finally:
        for tensor, guard in pairs:
            put_guard(tensor, guard)


def _guard_views(tensor: Tensor, guard: Guard, operation: str, result: Any) -> Any:
    """Guard views of a tensor that a server has, too: what would be written to them is lost."""
    if guard.is_served and (operation == "__getitem__" or not operation.startswith("__")):
        base = tensor if tensor._base is None else tensor._base
        for value in tree_leaves(result):
            if type(value) is Tensor and value._base is base:
                put_guard(value, guard)
    return result


def _stand_in(value: Any, is_meta: bool) -> Any:
    guard = guard_of(value)
    if guard is None:
        return value
    return value.new_empty(guard.shape, device="meta") if is_meta else value.new_empty(()).expand(guard.shape)


def _initialize(guard: Guard, func: Any, tensor: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do to a draft what a function of torch.nn.init does: it may write it at once, by views, or element by element."""
    if guard.draft is None:
        guard.local()  # whether there is a part of it yet: an error belongs to the line that writes
        guard.draft = tensor.detach() if guard.cut is None else tensor.new_empty(guard.shape)
    draft = guard.draft
    new, kw = tree_map(lambda value: draft if isinstance(value, _Answers) else value, (tuple(args), kwargs))
    result = func(*new, **kw)
    return tensor if result is draft else result


def _write(
    guard: Guard, operation: str, func: Any, guarded: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Make a write on what this worker has of a tensor, and return the tensor that was written."""
    tensor = guarded[0]
    if operation == "data=" and len(guarded) > 1:  # `tensor.data += 1` assigns what it has written to itself
        return None
    if guard.reader is not None:
        guard.reader.begin_write(guard)
        guard = guard_of(tensor) or guard  # which has parts, if a plan has begun by that
    is_fresh = _KINDS.get(operation) == "fresh" or getattr(func, "__module__", None) == _INITIALIZERS
    if operation == "__setitem__" and _is_everything(args[1]):
        is_fresh, func, args = True, lambda target, value: target.__setitem__(..., value), (args[0], args[2])
    if operation == "data=":
        func = Tensor.copy_
        guard.part_from_aliases(tensor)
    if guard.is_view and guard.reader is not None:
        guard.reader.write(tensor, func, args[1:], kwargs)
    elif guard.cut is None:
        with torch.no_grad() if operation == "data=" else nullcontext():
            _on_ordinary(guarded, func, args, kwargs)
    elif is_fresh:
        full_tensor = tensor.new_empty(guard.shape)
        new, kw = tree_map(lambda value: full_tensor if isinstance(value, _Answers) else value, (tuple(args), kwargs))
        func(*new, **kw)
        guard.take_part(full_tensor)
    elif _KINDS.get(operation) == "by element" and guarded[0] is args[0]:
        local = guard.local()
        if local is not None:
            new, kw = tree_map(lambda value: _cut_argument(guard, local, value), (tuple(args[1:]), kwargs))
            func(local.detach(), *new, **kw)
    elif guard.reader is not None and guarded[0] is args[0]:
        guard.reader.write(tensor, func, args[1:], kwargs)
    else:
        raise guard.refuse(operation)
    guard.record_write(is_fresh)
    # Also where this worker holds nothing of it: all workers that make a write count one.
    torch.autograd.graph.increment_version(tensor)
    return tensor


def _is_everything(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _cut_argument(guard: Guard, local: Tensor, value: Any) -> Any:
    """Return the part of an argument that belongs to this worker's part of the tensor."""
    if not isinstance(value, Tensor) or value.dim() == 0 or guard.cut is None:
        return value
    part = guard.cut(value.broadcast_to(guard.shape).contiguous())
    return value if part is None else part.view(local.shape)
