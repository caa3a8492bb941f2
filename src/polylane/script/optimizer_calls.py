"""Optimizer calls: what a script calls of its optimizers acts on what each worker holds of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch

from polylane.compile.objectives import needs_closure
from polylane.script.tape_runner import TapeRunner


class SteppingLoop(Protocol):
    """What steps optimizers: see :class:`polylane.script.loop.TrainingLoop`."""

    runner: TapeRunner

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step an optimizer on what this worker holds of the parameters."""

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients of an optimizer's parameters."""


def take_over(optimizer: torch.optim.Optimizer, loop: SteppingLoop) -> None:
    """Have an optimizer's ``step`` and ``zero_grad`` act on what this worker holds of the parameters.

    One that cannot step without a closure evaluates the loss as often as it likes, and then writes the weights as a
    script does by hand: its ``step`` stays what it is, and the plan has no part in it.
    """
    is_by_hand = needs_closure(optimizer)  # asked of the optimizer as it is
    plain_step, plain_zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(plain_step)
    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if loop.runner.is_running:
            return plain_step() if closure is None else plain_step(closure)
        return loop.step(optimizer, closure)

    @functools.wraps(plain_zero_grad)
    def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        with loop.runner.running():
            plain_zero_grad(set_to_none)
            if set_to_none:
                loop.clear_gradients(optimizer)

    plain_state_dict, plain_load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    @functools.wraps(plain_state_dict)
    def state_dict() -> dict[str, Any]:
        return loop.runner.optimizers.call_with_whole_state(optimizer, plain_state_dict)

    @functools.wraps(plain_load_state_dict)
    def load_state_dict(state: dict[str, Any]) -> None:
        loop.runner.optimizers.load_whole_state(optimizer, lambda: plain_load_state_dict(state))

    # Methods, not functions: a scheduler made after this one wraps the function of the method that it finds.
    optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    if not is_by_hand:
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict  # type: ignore
