"""Forward hooks: those of the user's that look at what modules take and return, called apart from the passes.

    changes      returns a value, or writes in place: a part of the model, which captures have
    looks on     keeps or prints activations: taken off the model; what it would see is returned by the pass, and it is
                 called with that

Which of the two a hook is shows when it is called once, before the first pass.
"""

from __future__ import annotations

import contextlib
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from polylane.errors import PolylaneError

Hook = Callable[..., Any]
ModuleCall = tuple[str, Any, Any, Any]  # path, arguments by position and by name, and what was returned


@contextmanager
def collect_calls(model: nn.Module, paths: Sequence[str], checks: bool = False) -> Iterator[list[ModuleCall]]:
    """Context manager: collect the calls of modules, in the order in which they end.

    Args:
        model: the model that is called inside.
        paths: which of its modules.
        checks: whether what modules returned must be the same when the model has ended.

    Yields:
        The calls so far.

    Raises:
        PolylaneError: the model has written into a result behind the module that returned it.
    """
    watched, calls = {id(model.get_submodule(path)): path for path in paths}, list[ModuleCall]()
    versions = list[tuple[str, Tensor, int]]()

    def collect(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if (path := watched.get(id(module))) is not None:
            calls.append((path, args, kwargs, output))
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)] if checks else []
            versions.extend((path, tensor, tensor._version) for tensor in tensors)

    # A hook on all modules, which belongs to none: the modules are plain for whoever asks.
    handle = register_module_forward_hook(collect, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
    if path := next((path for path, tensor, version in versions if tensor._version != version), ""):
        raise PolylaneError(
            f"a forward hook on {path} keeps what the model writes in place afterwards (inplace=True of the next "
            "module?), and would see what is left of it: leave inplace out"
        )


def list_modules(model: nn.Module) -> list[nn.Module]:
    """Return what ``model.modules()`` yields, in a tenth of the time: every call of a model asks for it."""
    modules, stack = dict[nn.Module, None](), [model]
    while stack:
        module = stack.pop()
        if module not in modules:
            modules[module] = None
            stack += [child for child in reversed(module._modules.values()) if child is not None]
    return list(modules)


class ForwardHooks:
    """The forward hooks of models.

    Args:
        models: the models, whose hooks come and go.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = list(models)
        self._changes = dict[int, tuple[Hook, bool]]()  # by id of a hook, itself and whether it changes something
        self._off = list[tuple[nn.Module, Any]]()

    def _is_watched(self, module: nn.Module) -> bool:
        hooks = module._forward_hooks.values()
        return bool(hooks) and not any(self._changes.get(id(hook), (hook, True))[1] for hook in hooks)

    def has_new(self, model: int) -> bool:
        """Return whether a model has hooks that were not called so far."""
        tables = [module._forward_hooks for module in list_modules(self._models[model]) if module._forward_hooks]
        return any(id(hook) not in self._changes for table in tables for hook in table.values())

    def list_watched(self, model: int, path: str) -> tuple[str, ...]:
        """Return the paths of modules with hooks that look on, inside of the module at a path."""
        if not self._changes:
            return ()
        called = self._models[model].get_submodule(path)
        return tuple(
            ".".join(filter(None, (path, name))) for name, module in called.named_modules() if self._is_watched(module)
        )

    @contextmanager
    def tried(self, model: int) -> Iterator[None]:
        """Context manager: inside, the model is called once, and shows what its new hooks are."""
        new_hooks = dict[int, Hook]()

        def try_hook(hook: Hook) -> Hook:
            def call(*arguments: Any) -> Any:
                marks = _mark(arguments)
                try:
                    result = hook(*arguments)
                except Exception:  # it asks for numbers that there are none of yet, to look at them
                    return None
                if result is not None or _mark(arguments) != marks:
                    self._changes[id(hook)] = hook, True
                return result

            return call

        modules = [module for module in self._models[model].modules() if module._forward_hooks]
        tables = [(module, module._forward_hooks) for module in modules]
        for module, table in tables:
            new_hooks |= {id(hook): hook for hook in table.values() if id(hook) not in self._changes}
            module._forward_hooks = OrderedDict((key, try_hook(hook)) for key, hook in table.items())
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            for module, table in tables:
                module._forward_hooks = table
            for key, hook in new_hooks.items():
                self._changes.setdefault(key, (hook, False))

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Context manager: modules have no hooks that look on."""
        modules = (module for model in self._models for module in model.modules()) if self._changes else ()
        self._off = [(module, module._forward_hooks) for module in modules if self._is_watched(module)]
        for module, _ in self._off:
            module._forward_hooks = OrderedDict()
        try:
            yield
        finally:
            for module, table in self._off:
                module._forward_hooks = table
            self._off = []

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Context manager: modules have all their hooks again, inside of :meth:`taken_off`."""
        for module, table in self._off:
            module._forward_hooks = table
        try:
            yield
        finally:
            for module, _ in self._off:
                module._forward_hooks = OrderedDict()

    def call(self, model: int, calls: Sequence[ModuleCall]) -> None:
        """Call the hooks that look on, for calls of their modules.

        Raises:
            PolylaneError: a hook changes what its module returns, and did not when it was tried.
        """
        for path, args, kwargs, output in calls:
            module = self._models[model].get_submodule(path)
            for key, hook in list(module._forward_hooks.items()):
                marks = _mark((args, kwargs, output))
                has_kwargs = key in module._forward_hooks_with_kwargs
                result = hook(module, args, kwargs, output) if has_kwargs else hook(module, args, output)
                if result is not None or _mark((args, kwargs, output)) != marks:
                    raise PolylaneError(
                        f"a forward hook on {path} changes what the module returns, and did not when it was called for "
                        "the first time: let it change every call or none, or write the change into the forward"
                    )


def _mark(values: Any) -> list[Any]:
    """Return what a write in place changes of tensors; one that is still to be computed has another call then."""
    tensors: list[Any] = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [tensor.call if getattr(tensor, "is_deferred", False) else tensor._version for tensor in tensors]


# ---- attributes ------------------------------------------------------------------------------------------------------

Attribute = tuple[str, str]  # path of a module, and name
_ABSENT: Any = object()


class _Unread:
    """Stands for an attribute that a forward does not read: whoever uses it raises."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __bool__(self) -> bool:
        raise TypeError("nobody reads this")


def list_tensors(model: nn.Module) -> dict[Attribute, Tensor]:
    """Return the tensors that modules have as plain attributes, neither parameters nor buffers."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


@contextmanager
def attributes_unread(model: nn.Module, attributes: Sequence[Attribute]) -> Iterator[None]:
    """Context manager: what reads these attributes of modules before it writes them raises."""
    with attributes_kept(model, attributes):
        for path, name in attributes:
            vars(model.get_submodule(path))[name] = _Unread()
        yield


@contextmanager
def attributes_kept(model: nn.Module, attributes: Sequence[Attribute]) -> Iterator[list[Any]]:
    """Context manager: attributes of modules are what they were before.

    Yields:
        A list that has what they were in the end of it.
    """
    tables = [(vars(model.get_submodule(path)), name) for path, name in attributes]
    old_values, new_values = [table.get(name, _ABSENT) for table, name in tables], list[Any]()
    try:
        yield new_values
    finally:
        new_values += [table.get(name) for table, name in tables]
        for (table, name), value in zip(tables, old_values, strict=True):
            if value is _ABSENT:
                table.pop(name, None)
            else:
                table[name] = value


class AssignedTensors:
    """Attributes of modules that have tensors which are still to be computed, as a forward has assigned them."""

    def __init__(self) -> None:
        self._old_values = dict[tuple[int, str], tuple[dict[str, Any], str, Any]]()  # by module and name

    def assign(self, model: nn.Module, attributes: Sequence[Attribute], values: Sequence[Any]) -> None:
        """Give modules of a model their attributes, which its forward would have assigned."""
        for (path, name), value in zip(attributes, values, strict=True):
            table = vars(model.get_submodule(path))
            self._old_values.setdefault((id(table), name), (table, name, table.get(name, _ABSENT)))
            table[name] = value

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Context manager: the attributes are what they were before, whoever looks through the modules."""
        assigned = [
            (table, name, table[name], old_value)
            for table, name, old_value in self._old_values.values()
            if getattr(table.get(name), "is_deferred", False)
        ]
        for table, name, _, old_value in assigned:
            if old_value is _ABSENT:
                del table[name]
            else:
                table[name] = old_value
        try:
            yield
        finally:
            for table, name, value, _ in assigned:
                table[name] = value
