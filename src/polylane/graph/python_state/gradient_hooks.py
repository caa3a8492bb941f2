"""Gradient hooks: the user's hooks on parameters see the whole gradient of a step once, as on one device.

Autograd calls a hook (``register_hook``, ``register_post_accumulate_grad_hook``, ``register_multi_grad_hook``) in
every backward pass that reaches the parameter. On one device that is once a step, with the gradient of the whole batch;
here it would be once on every replica and for every microbatch, with a part of it, of which a hook that is not linear
(a clamp, a norm) makes something else. So hooks are taken off during passes, and run once the gradient is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError

# Where torch keeps the two kinds of hooks of a tensor, which see the gradient before it is accumulated, and after.
_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SEED = "polylane: seed"  # key of the first hook, beside torch's numbers

Hooks = tuple[dict[Any, Any], dict[Any, Any]]  # the functions of both kinds, by torch's number


@dataclass(frozen=True)
class OwnHook:
    """A hook of polylane's own on a parameter, which is called in every pass.

    Attributes:
        function: called as torch calls the hook.
    """

    function: Callable[[Tensor], None]

    def __call__(self, tensor: Tensor) -> None:
        self.function(tensor)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether the user has registered a hook on a tensor's gradient."""
    hooks, later_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    # Every parameter is asked several times in a step, and nearly none has any.
    return bool(hooks and _users_hooks(hooks)) or bool(later_hooks and _users_hooks(later_hooks))


def _users_hooks(hooks: Mapping[Any, Any] | None) -> dict[Any, Any]:
    return {key: hook for key, hook in (hooks or {}).items() if not isinstance(hook, OwnHook)}


def hooked_names(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Return the names of the parameters that have hooks on their gradients."""
    return [name for name, parameter in parameters if has_gradient_hooks(parameter)]


def copy_hooks(model: nn.Module, copied: nn.Module) -> None:
    """Give the parameters of a deep copy the gradient hooks of the model's own, which copy.deepcopy leaves out."""
    for tensor, copy in zip(model.parameters(), copied.parameters(), strict=True):
        if tensor is not copy and has_gradient_hooks(tensor):
            _put_hooks(copy, (_users_hooks(tensor._backward_hooks), _users_hooks(tensor._post_accumulate_grad_hooks)))


def put_own_hook(tensor: Tensor, key: object, hook: OwnHook) -> None:
    """Call a hook of polylane's own whenever a gradient was accumulated, until :func:`remove_own_hook`.

    It goes straight into torch's dictionary: ``register_post_accumulate_grad_hook`` takes twenty times as long, for
    every parameter in every step.

    Args:
        tensor: the parameter whose gradients are meant.
        key: what the hook is removed by; no other hook has it.
        hook: called with the parameter.
    """
    hooks: Any = tensor._post_accumulate_grad_hooks
    if hooks is None:
        tensor.register_post_accumulate_grad_hook(lambda _: None).remove()  # leaves the dictionary
        hooks = tensor._post_accumulate_grad_hooks
    hooks[key] = hook


def remove_own_hook(tensor: Tensor, key: object) -> None:
    """Remove a hook of :func:`put_own_hook`, if it is there."""
    if hooks := tensor._post_accumulate_grad_hooks:
        hooks.pop(key, None)


def _take_hooks(tensor: Tensor) -> Hooks:
    """Empty torch's own dictionaries: autograd goes on calling what is in one that was replaced."""
    hooks = dict[Any, Any](), dict[Any, Any]()
    for kind, into in zip(_KINDS, hooks, strict=True):
        into.update(_users_hooks(getattr(tensor, kind)))
        for key in into:
            del getattr(tensor, kind)[key]
    return hooks


def _put_hooks(tensor: Tensor, hooks: Hooks) -> None:
    register: tuple[Any, Any] = tensor.register_hook, tensor.register_post_accumulate_grad_hook
    for kind, content, make in zip(_KINDS, hooks, register, strict=True):
        if content and getattr(tensor, kind) is None:
            make(lambda _: None).remove()  # leaves the dictionary
        if content:
            getattr(tensor, kind).update(content)


@dataclass
class GradientHooks:
    """The hooks on the gradients of some parameters, taken off while passes run.

    Attributes:
        parameters: the parameters that the user's hooks are on, by canonical name.
        shapes: shapes of whole parameters by name, where some of those above may be parts.
        taken: hooks that are off at present, by the parameter's name.
        leaves_accumulated: whether hooks on accumulated gradients are left to whoever accumulates them.
    """

    parameters: Mapping[str, nn.Parameter]
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    taken: dict[str, Hooks] = field(default_factory=dict)
    leaves_accumulated: bool = False

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Context manager: no hook is called but by :meth:`run`."""
        outer, hooked = self.taken, [name for name, p in self.parameters.items() if has_gradient_hooks(p)]
        self.taken = {name: _take_hooks(self.parameters[name]) for name in hooked}
        try:
            yield
        finally:
            for name, hooks in self.taken.items():
                _put_hooks(self.parameters[name], hooks)
            self.taken = outer

    def run(
        self,
        tensors: Mapping[str, nn.Parameter],
        seed: int,
        step: int,
        earlier: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        """Run the hooks that are off on the gradients of parameters, which are complete.

        Args:
            tensors: by name, the parameters whose gradients they are: those of :attr:`parameters`, or what an optimizer
                has in their place, in the same shape.
            seed: seed of the training.
            step: number of the step; with the seed it determines what random numbers hooks draw.
            earlier: gradients of earlier passes by name, to which these are added; default: none.

        Raises:
            PolylaneError: a hook raised, or is on a parameter that the plan has cut.
        """
        hooked = [name for name in self.taken if name in tensors and tensors[name].grad is not None]
        if not hooked:
            return
        for name in hooked:
            if name in self.shapes and tuple(tensors[name].shape) != tuple(self.shapes[name]):
                raise PolylaneError(
                    f"a hook on the gradient of {name} was registered after the training was prepared, and the plan "
                    f"cuts {name} into parts: register it before"
                )
        gradients, running = [tensors[name].grad for name in hooked], [hooked[0]]
        for name in hooked:
            tensors[name].grad = (earlier or {}).get(name)
            hooks, post_hooks = self.taken[name]
            _put_hooks(
                tensors[name],
                (
                    {_SEED: _make_seeding(f"{seed} {step} {name}", partial(running.__setitem__, 0, name)), **hooks},
                    {} if self.leaves_accumulated else post_hooks,
                ),
            )
        try:
            # Autograd calls them itself, in a backward pass that consists of these parameters alone.
            with torch.random.fork_rng(devices=[]):
                torch.autograd.backward([tensors[name] for name in hooked], gradients)
        except PolylaneError:  # a hook that polylane refuses, with the sentence that says so
            raise
        except Exception as error:
            message = " ".join(str(error).split()) or "no message"
            raise PolylaneError(
                f"a hook on the gradient of {running[0]} raised {type(error).__name__}: {message}"
            ) from error
        finally:
            for name in hooked:
                hooks, post_hooks = _take_hooks(tensors[name])
                hooks.pop(_SEED)
                self.taken[name] = hooks, post_hooks or self.taken[name][1]


def _make_seeding(key: str, begin: Callable[[], None]) -> Any:
    """Return a first hook: random numbers that the others draw depend on the key alone, and not on the worker.

    Args:
        key: what the random numbers depend on.
        begin: called first, so that it is known whose hooks run.
    """
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")

    def seed(gradient: Tensor) -> None:
        begin()
        torch.manual_seed(number)

    return seed
