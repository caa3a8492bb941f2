"""Asked gradients: ``torch.autograd.grad(loss, parameters)`` in a script's loop, whose result no loss is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polylane.runtime.guarded_tensors import guard_of
from polylane.script.deferred import DeferredTensor
from polylane.script.recorded_calls import Result


class AskedGradients(NamedTuple):
    """A call of ``torch.autograd.grad`` for the gradients of a loss by parameters.

    Attributes:
        loss: what is differentiated, a scalar result.
        names: names of the parameters among those of all models, in order.
        allows_unused: whether None is the gradient of what has no part in the loss.
        keeps_graph: whether the loss may be differentiated again.
    """

    loss: Result
    names: tuple[str, ...]
    allows_unused: bool
    keeps_graph: bool

    @classmethod
    def of_call(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Mapping[int, str]
    ) -> AskedGradients | None:
        """Return what is asked; None where it is something else, or becomes a part of a loss (``create_graph``).

        Args:
            func: the function that is called.
            args: its arguments by position.
            kwargs: its arguments by name.
            names: names of the script's parameters, by their ids.
        """
        if func is not torch.autograd.grad:
            return None
        arguments = dict(zip(_NAMES, args, strict=False)) | dict(kwargs)
        roots, inputs = (_as_sequence(arguments[name]) for name in _NAMES[:2])
        input_names = [_name_of(value, names) for value in inputs]
        is_plain = not any(arguments.get(name) for name in ("create_graph", "is_grads_batched", "grad_outputs"))
        if not is_plain or len(roots) != 1 or not isinstance(roots[0], DeferredTensor) or None in input_names:
            return None
        loss = Result(roots[0].call, roots[0].position)
        allows_unused, keeps_graph = bool(arguments.get("allow_unused")), bool(arguments.get("retain_graph"))
        return (
            cls(loss, tuple(name for name in input_names if name), allows_unused, keeps_graph) if loss.is_loss else None
        )

    def answer(self, gradients: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients in the order in which they are asked for.

        Raises:
            RuntimeError: one of the parameters has no part in the loss.
        """
        if not self.allows_unused and any(name not in gradients for name in self.names):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        return tuple(None if (g := gradients.get(name)) is None else g.clone() for name in self.names)


_NAMES = "outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "allow_unused", "is_grads_batched"


def _as_sequence(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _name_of(value: Any, names: Mapping[int, str]) -> str | None:
    """Return the name of a parameter, itself or as a deferred tensor; None of anything else."""
    if isinstance(value, DeferredTensor):
        call = value.call
        if not call.is_parameter:
            return None
        return str(call.recorder.runner.name_parameter(call))
    return None if guard_of(value) is None else names.get(id(value))
