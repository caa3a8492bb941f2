"""Optimizer calls: what a script calls of its optimizers acts on what each worker holds of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Protocol

import torch

from polylane.script.tape_runner import TapeRunner


class SteppingLoop(Protocol):
    """What steps optimizers: see :class:`polylane.script.loop.TrainingLoop`."""

    runner: TapeRunner

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step an optimizer on what this worker holds of the parameters."""

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped by itself."""

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients of an optimizer's parameters."""


def take_over(optimizer: torch.optim.Optimizer, loop: SteppingLoop, is_by_hand: bool) -> None:
    """Have an optimizer's ``step`` and ``zero_grad`` act on what this worker holds of the parameters.

    One that cannot step without a closure evaluates the loss as often as it likes, and then writes the weights as a
    script does by hand: its ``step`` stays what it is, and the plan has no part in it.

    Args:
        optimizer: one of the script's.
        loop: the loop that the optimizer steps in.
        is_by_hand: whether it cannot step without a closure.
    """
    plain_step, plain_zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(plain_step)
    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if loop.runner.is_running:
            return plain_step() if closure is None else plain_step(closure)
        return loop.step(optimizer, closure)

    @functools.wraps(plain_step)
    def step_by_itself(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        result = plain_step() if closure is None else plain_step(closure)
        if not loop.runner.is_running:
            loop.end_step(optimizer)
        return result

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
    optimizer.step = MethodType(step_by_itself if is_by_hand else step, optimizer)  # type: ignore[method-assign]
    if not is_by_hand:
        optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict  # type: ignore


def list_with_nested(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return optimizers, and those that they have as attributes, which they step with."""
    values = (value for optimizer in optimizers for value in (optimizer, *vars(optimizer).values()))
    return [value for value in values if isinstance(value, torch.optim.Optimizer)]
