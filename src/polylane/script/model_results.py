"""Results of a model's call before it is made: their shapes and dtypes, from a run of the model on fake tensors.

Fake tensors have no numbers, and a model may ask for some. What it asks of tensors of its own (a mask that it keeps) is
answered. What it asks of its arguments (whether a mask is causal, how long sequences are) is answered by running it on
them, with zeros for what is not known: its weights, and what is still to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from polylane.graph.capture.export import python_kept
from polylane.graph.capture.known_values import KnownValues
from polylane.graph.python_state.forward_hooks import (
    Attribute,
    attributes_kept,
    attributes_unread,
    collect_calls,
    list_tensors,
)
from polylane.graph.python_state.random_generators import generators_kept
from polylane.graph.python_state.saved_tensor_hooks import torch_func_allowed
from polylane.runtime.stale_weights import allow_own_calls
from polylane.script.deferred import DeferredTensor, Spec, unflatten_arguments
from polylane.script.model_state.touched_state import StateStamp, TouchedState

MOST_TRIALS = 8  # attributes that are tried one by one
VALUES_NEEDED = DataDependentOutputException, DynamicOutputShapeException


class ModelCall(NamedTuple):
    """What is called of a loop's models: a model, a module inside of it, or a method of either.

    Attributes:
        model: index of the model.
        path: of the module in the model; "" for the model itself.
        method: name of the method; "__call__" for a call of the module.
        watched: paths of modules inside, whose calls are returned beside the result.
        assigned: attributes of modules that the forward assigns, which are returned as well, and not assigned.
    """

    model: int
    path: str = ""
    method: str = "__call__"
    watched: tuple[str, ...] = ()
    assigned: tuple[Attribute, ...] = ()

    @property
    def is_parameter(self) -> bool:
        """Whether it is no call, but takes a parameter of the module, by its name."""
        return self.method == "__getattr__"

    def run(self, models: Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call it, of these models."""
        called = getattr(models[self.model].get_submodule(self.path), self.method)
        return self.watch(models[self.model], lambda: called(*args, **kwargs))

    def watch(self, model: nn.Module, call: Callable[[], Any], checks: bool = False) -> Any:
        """Return what a call of the model returns, with calls of modules and attributes, if any are asked for."""
        if not self.watched and not self.assigned:
            return call()
        with collect_calls(model, self.watched, checks) as calls, attributes_kept(model, self.assigned) as values:
            result = call()
        return result, calls, values


class _CalledModel(nn.Module):
    """What is called of a model, as a module: its tensors are found by ``functional_call`` whatever is called."""

    def __init__(self, model: nn.Module, target: ModelCall) -> None:
        super().__init__()
        self.model, self.target = model, target
        self.replaced_buffers = set[str]()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        target, buffers = self.target._replace(model=0, watched=(), assigned=()), dict(self.model.named_buffers())
        result = self.target.watch(self.model, lambda: target.run([self.model], args, kwargs), checks=True)
        new_buffers = dict(self.model.named_buffers())
        self.replaced_buffers |= {name for name, buffer in buffers.items() if new_buffers.get(name) is not buffer}
        return result


class CallWatch(TorchDispatchMode):
    """Sees whether an operator draws random numbers, and what operators compute with.

    Attributes:
        has_drawn: whether one has, since this was set to False.
        used_ids: ids of the tensors that operators have taken, since this was emptied.
        written_ids: ids of running statistics that they have moved.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn, self.used_ids, self.written_ids = False, set[int](), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        self.used_ids.update(id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if "batch_norm" in func.__name__ and any(
            arg is True for arg in args
        ):  # torch counts no versions of running statistics
            self.written_ids.update(map(id, args[3:5]))
        return func(*args, **(kwargs or {}))


class UnknownValues(TorchDispatchMode):
    """Sees whether a shape, or what Python is told, depends on numbers that are not known.

    Args:
        unknown: the tensors whose numbers stand for others; what is computed from them is as unknown.

    Raises:
        DataDependentOutputException: it does.
    """

    def __init__(self, unknown: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The tensors are held, so that no other one is mistaken for them.
        self._unknown = {id(tensor): tensor for tensor in unknown}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(id(tensor) in self._unknown for tensor in tensors):
            depends = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
            # What is picked by a mask has as many rows as the mask says, whatever the values are.
            deciding = tensors[1:] if func in _PICKS else tensors
            if depends and any(id(tensor) in self._unknown and _picks(func, tensor) for tensor in deciding):
                raise DataDependentOutputException(func)
            self._unknown.update((id(leaf), leaf) for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
        return results


_PICKS = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default


def _picks(func: Any, tensor: Tensor) -> bool:
    """Return whether the numbers of an argument decide how many elements there are."""
    return func is not torch.ops.aten.index.Tensor or tensor.dtype in (torch.bool, torch.uint8)


class ModelResults:
    """Finds what calls of models return, in shape and dtype.

    Args:
        models: the models of the script, in order, whole.
        mode: the mode in which fake tensors are made.
        watch: sees whether the calls draw random numbers, and which buffers they take.

    Attributes:
        touched: what the last call of a model that was tried has read and written besides its parameters.
    """

    def __init__(self, models: Sequence[nn.Module], mode: FakeTensorMode, watch: CallWatch) -> None:
        self._models, self._mode, self._watch = models, mode, watch
        self.touched = TouchedState()
        # Before a plan takes the parameters apart: their shapes are those of the whole model.
        self._fakes: list[dict[str, Tensor]] = [
            {f"model.{name}": mode.from_tensor(tensor) for name, tensor in (*m.named_parameters(), *m.named_buffers())}
            for m in models
        ]
        self._zeros = dict[int, dict[str, Tensor]]()
        self._assigned = dict[ModelCall, dict[Attribute, bool]]()  # and whether it may be assigned by others

    def find(self, target: ModelCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call returns, as fake tensors.

        Args:
            target: what is called of a model.
            args: its arguments by position, tensors as fake ones.
            kwargs: its arguments by name, the same.

        Raises:
            DataDependentOutputException, DynamicOutputShapeException: it depends on numbers.
        """
        # The model's Python is kept in real numbers: tensors that it refers to are compared.
        with python_kept(self._models[target.model]), self._mode, KnownValues(), self._watch:
            return self._call(target, self._fakes[target.model], args, kwargs)

    def find_by_values(self, target: ModelCall, leaves: Sequence[Any], spec: Spec) -> Any:
        """Return the same for arguments of these values.

        Args:
            target: what is called of a model.
            leaves: its flat arguments, tensors of the script and deferred ones.
            spec: how they are nested.
        """
        if target.model not in self._zeros:
            fakes = self._fakes[target.model].items()
            self._zeros[target.model] = {name: _zeros_like(fake) for name, fake in fakes}
        values = [_with_values(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = unflatten_arguments(values, spec)
        with python_kept(self._models[target.model]), generators_kept(), self._watch:
            result = self._call(target, self._zeros[target.model], args, kwargs)
        return tree_map_only(Tensor, self._without_values, result)

    def find_of_function(
        self, func: Callable[..., Any], leaves: Sequence[Any], spec: Spec, values: Sequence[Tensor] | None
    ) -> Any:
        """Return what a function returns, as fake tensors, where its shapes depend on numbers.

        Args:
            func: the function that is called.
            leaves: its flat arguments, tensors of the script and deferred ones.
            spec: how they are nested.
            values: values of the deferred ones, in order; None: they are not known.

        Raises:
            DataDependentOutputException: it depends on numbers that are not known.
        """
        deferred = [leaf for leaf in leaves if isinstance(leaf, DeferredTensor)]
        if values is None:
            stand_ins = {id(leaf): _zeros_like(leaf.metadata) for leaf in deferred}
        else:
            pairs = zip(deferred, values, strict=True)
            stand_ins = {id(leaf): v.detach().clone().requires_grad_(leaf.metadata.requires_grad) for leaf, v in pairs}
        watch = nullcontext() if values is not None else UnknownValues([*stand_ins.values()])
        args, kwargs = unflatten_arguments([stand_ins.get(id(leaf), leaf) for leaf in leaves], spec)
        with generators_kept(), watch, self._watch:
            result = func(*args, **kwargs)
        return tree_map_only(Tensor, self._without_values, result)

    def follow_requires_grad(self, number: int) -> None:
        """Have a model's parameters require gradients as they do now."""
        for name, parameter in self._models[number].named_parameters():
            for tensors in (self._fakes[number], self._zeros.get(number, {})):
                if f"model.{name}" in tensors:
                    tensors[f"model.{name}"].requires_grad_(parameter.requires_grad)

    def _call(
        self, target: ModelCall, tensors: dict[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        model, old_tensors = self._models[target.model], list_tensors(self._models[target.model])
        called, stamp = _CalledModel(model, target), StateStamp(model)
        versions = {name: tensor._version for name, tensor in tensors.items()}
        self._watch.used_ids.clear()
        self._watch.written_ids.clear()

        def call() -> Any:
            with allow_own_calls():
                return functional_call(called, tensors, tuple(args), dict(kwargs))

        with _saved_memory() as saved:
            result = call()
        changed_python = (new_stamp := StateStamp(model)).list_changed(stamp)
        used = {name for name, tensor in tensors.items() if id(tensor) in self._watch.used_ids}
        moved = {name for name, tensor in tensors.items() if id(tensor) in self._watch.written_ids}
        written = moved | {name for name, tensor in tensors.items() if tensor._version != versions[name]}
        assigned = self._assigned.setdefault(target._replace(watched=(), assigned=()), {})
        changed = [key for key, tensor in list_tensors(model).items() if tensor is not old_tensors.get(key)]
        if new := [key for key in changed if key not in assigned]:
            # One that is read first belongs to the model's Python, and is what that makes it.
            is_unread = _succeeds(call, attributes_unread(model, new))
            assigned |= dict.fromkeys(new, is_unread)
            if not is_unread and 1 < len(new) <= MOST_TRIALS:
                assigned |= {key: _succeeds(call, attributes_unread(model, [key])) for key in new}
        if changed_python := {key: label for key, label in changed_python.items() if not assigned.get(key)}:
            _succeeds(call, nullcontext())  # once more: caches have settled by now
            settled = changed_python.keys() - StateStamp(model).list_changed(new_stamp).keys()
            changed_python = {key: label for key, label in changed_python.items() if key not in settled}
        buffers = {name for name, _ in model.named_buffers()}
        read_names, written_names = (
            frozenset(name.removeprefix("model.") for name in names) & buffers
            for names in (used, written | {f"model.{name}" for name in called.replaced_buffers})
        )
        saves_weights = any(tensor.requires_grad and _find_storage(tensor) in saved for tensor in tensors.values())
        self.touched = TouchedState(read_names, written_names, changed_python, saves_weights)
        return result

    def list_assigned(self, target: ModelCall) -> tuple[Attribute, ...]:
        """Return attributes of modules to which a call has been seen to assign tensors, without reading them."""
        return tuple(key for key, is_unread in self._assigned.get(target, {}).items() if is_unread)

    def _without_values(self, tensor: Tensor) -> Tensor:
        fake: Tensor = self._mode.from_tensor(tensor.detach())
        return fake.requires_grad_(tensor.requires_grad)


def _find_storage(tensor: Tensor) -> int | None:
    """Return which storage a tensor has; None for one that has none, and is no view of a parameter."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # of a sparse one
        return None


@contextmanager
def _saved_memory() -> Iterator[set[int]]:
    """Context manager: the storages of what autograd saves for backward passes, views of parameters among it."""
    saved = set[int]()

    def pack(tensor: Tensor) -> Tensor:
        if (storage := _find_storage(tensor)) is not None:
            saved.add(storage)
        return tensor

    with torch_func_allowed(), saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _succeeds(call: Callable[[], Any], setting: AbstractContextManager[None]) -> bool:
    try:
        with setting:
            call()
    except Exception:  # whatever the user's Python makes of it
        return False
    return True


def _zeros_like(fake: Tensor) -> Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device, requires_grad=fake.requires_grad)


def _with_values(leaf: Tensor) -> Tensor:
    # A copy: the model may write into its arguments.
    return _zeros_like(leaf.metadata) if isinstance(leaf, DeferredTensor) else leaf.clone()
