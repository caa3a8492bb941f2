"""Prepared model: a script's model, whose calls are recorded; all else is the model's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polylane.errors import PolylaneError
from polylane.script.loop import TrainingLoop
from polylane.script.model_results import ModelCall
from polylane.script.model_state.pending_calls import PendingCalls

_FIXED = "a prepared model keeps its own modules, parameters and buffers"


class _FixedTensors(dict[str, Any]):
    """The parameters or buffers that a prepared module has itself, none of which may be replaced."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise PolylaneError(
            f"{_FIXED}: call torch.func.functional_call with a copy (copy.deepcopy(model)), and register tensors "
            "before prepare()"
        )

    __setitem__ = __delitem__ = _refuse


COMPILED = "_orig_mod."  # what torch.compile puts before the names of a module's tensors


class PreparedModel(nn.Module):
    """A model of a prepared script, or a module inside of it.

    Args:
        loop: records the calls of the model.
        target: where the module is in the loop's models.
        module: the module that the script has built.
        is_compiled: whether the script has it from ``torch.compile``, which gives its tensors further names.
    """

    def __init__(self, loop: TrainingLoop, target: ModelCall, module: nn.Module, is_compiled: bool = False) -> None:
        # Names that no model has, and no state of a module: hooks and modes are those of the script's module.
        self.__dict__.update(_polylane_loop=loop, _polylane_call=target, _polylane_module=module)
        self.__dict__["_polylane_prefix"] = COMPILED if is_compiled else ""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the script's model, for ``isinstance``."""
        return type(self._polylane_module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loop = self._polylane_loop
        if loop.runner.is_running:
            return self._polylane_module(*args, **kwargs)
        return loop.call_model(self._polylane_call, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__["_polylane_module"]
        if self._polylane_prefix and name == "_orig_mod":
            return PreparedModel(self._polylane_loop, self._polylane_call, module)
        self._pending.begin_read_python(self._polylane_call.model, self._polylane_call.path, name)
        value = getattr(module, name)
        if name in ("_parameters", "_buffers"):
            return _FixedTensors(value)
        if isinstance(value, nn.Module) and name in dict(module.named_children()):
            return self._prepare_child(value, name)
        if isinstance(value, MethodType) and value.__self__ is module and not hasattr(nn.Module, name):
            return self._record_method(name, value)
        return value

    def _record_method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that is recorded where it is given tensors; without any it runs on the script's module."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_given = any(isinstance(value, Tensor) for value in tree_leaves((args, kwargs)))
            if not is_given or self._polylane_loop.runner.is_running:
                self._pending.begin_read_python(self._polylane_call.model)
                return method(*args, **kwargs)
            return self._polylane_loop.call_model(self._polylane_call._replace(method=name), args, kwargs)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        old_value = vars(self._polylane_module).get("_modules", {}).get(name)
        if not self._polylane_loop.runner.is_running and _list_ids(old_value) != _list_ids(value):
            raise PolylaneError(
                f"{name} of a prepared model is replaced by a module with other parameters, which neither its "
                "optimizer nor its plan has: replace it before the optimizer is made and before prepare()"
            )
        module = self._polylane_module
        buffer = module._buffers.get(name)
        if isinstance(buffer, Tensor) and isinstance(value, Tensor) and buffer.shape == value.shape:
            with torch.no_grad():  # programs have the tensor that is there
                buffer.copy_(value)
        elif isinstance(value, nn.Parameter):
            self._refuse_to_change(name)
        elif name not in vars(module) or vars(module)[name] is not value:
            self._pending.begin_write(self._polylane_call.model)
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._polylane_module, name)

    @property
    def _pending(self) -> PendingCalls:
        pending: PendingCalls = self._polylane_loop.runner.pending
        return pending

    def _refuse_to_change(self, name: Any, *_: Any, **__: Any) -> Any:
        self._polylane_loop.refuse(f"{_FIXED}, and {name} would be another: replace or register it before prepare()")

    register_buffer = register_parameter = register_module = add_module = _refuse_to_change
    __setitem__ = __delitem__ = _refuse_to_change

    def __getitem__(self, key: Any) -> Any:
        """Return a module of a container (``model[0]``), or a container of some (``model[:2]``)."""
        module: Any = self._polylane_module
        value = module[key]
        paths = {id(child): path for path, child in module.named_modules()}
        if id(value) not in paths:
            for name, child in value.named_children() if isinstance(value, nn.Module) else ():
                value.add_module(name, self._prepare_child(child, paths[id(child)]))
            return value
        return self._prepare_child(value, paths[id(value)])

    def _prepare_child(self, module: nn.Module, path: str) -> PreparedModel:
        path = ".".join(filter(None, (self._polylane_call.path, path)))
        return PreparedModel(self._polylane_loop, self._polylane_call._replace(path=path), module)

    def __iter__(self) -> Iterator[Any]:
        return (self[key] for key in range(len(self)))

    def __len__(self) -> int:
        module: Any = self._polylane_module
        return len(module)

    # ---- torch.nn.Module ---------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> PreparedModel:
        self._polylane_module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> PreparedModel:
        self._polylane_module.apply(fn)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> PreparedModel:
        self._polylane_module.requires_grad_(requires_grad)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PreparedModel:
        """Move or cast the model; once a plan has its parts, these stay where they are."""
        if self._polylane_loop.runner.job is None:
            with self._polylane_loop.runner.running():
                self._polylane_module._apply(fn)
            self._polylane_loop.recording.forget_results()
            return self
        tensor = next(self._polylane_module.parameters(), torch.empty(0))
        with self._polylane_loop.runner.running():
            dtype = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).dtype
        if dtype != tensor.dtype:
            raise PolylaneError(
                f"the model cannot be cast to {dtype} once its training has begun: cast it before prepare(), or a copy "
                "of it (copy.deepcopy(model))"
            )
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Leave the model as it is: what the script compiles is captured from its originals."""

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        prefix = ".".join(filter(None, (prefix, self._polylane_prefix.removesuffix("."))))
        yield from self._polylane_module.named_parameters(prefix, *args, **kwargs)

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        prefix = ".".join(filter(None, (prefix, self._polylane_prefix.removesuffix("."))))
        yield from self._polylane_module.named_buffers(prefix, *args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self._pending.begin_read_python(self._polylane_call.model)
        yield from self._polylane_module.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        for name, _ in self._polylane_module.named_children():
            yield name, getattr(self, name)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        state = self._polylane_loop.weights.state_dict(self._polylane_call)
        prefix += self._polylane_prefix
        if destination is None and not prefix:
            return state
        destination = {} if destination is None else destination
        destination.update({prefix + name: value for name, value in state.items()})
        return destination

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if self._polylane_prefix:
            state_dict = {name.removeprefix(self._polylane_prefix): value for name, value in state_dict.items()}
        return self._polylane_loop.weights.load_state_dict(self._polylane_call, state_dict, strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._polylane_loop.weights.zero_grad(self._polylane_call)

    # ---- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the script's module, with whole weights, that is not prepared; collective."""
        state = self._polylane_loop.weights.state_dict(self._polylane_call)
        tensors = {**dict(self._polylane_module.named_parameters()), **dict(self._polylane_module.named_buffers())}
        with self._polylane_loop.runner.running():
            for name, tensor in tensors.items():
                value = state[name].detach().clone().to(tensor.device) if name in state else tensor.detach().clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            with self._polylane_loop.runner.hooks.put_back():
                copied: nn.Module = copy.deepcopy(self._polylane_module, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the script's module with whole weights, as if it had never been prepared; collective."""
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._polylane_module)


def _list_ids(value: Any) -> list[int]:
    """Return the parameters of a module by their ids; those of anything else are none."""
    return [id(parameter) for parameter in value.parameters()] if isinstance(value, nn.Module) else []
