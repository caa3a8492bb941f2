"""Numbers of the reference that no plan can be compared with: losses that are not finite, and NaN in any tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.batch import flatten_nested
from polylane.verify.record import ReferenceRun, ReferenceStep
from polylane.verify.training_state import TrainingState


def refuse_undefined_numbers(reference: ReferenceRun) -> None:
    """Refuse a training in which one worker itself comes to NaN, or to an infinite loss: nothing is equal to NaN.

    Args:
        reference: the training on one worker.

    Raises:
        PolylaneError: there is such a number; the message names the first of them, and its step.
    """
    description = next(_find_undefined(reference), None)
    if description is not None:
        raise PolylaneError(
            f"{description} on one worker: there is nothing that a plan could be compared with; mend the "
            f"{'loss' if description.startswith('the loss') else 'model'}, or verify fewer steps"
        )


def _find_undefined(reference: ReferenceRun) -> Iterator[str]:
    """Yield what is undefined, in the order in which it was computed."""
    for number, loss in enumerate(reference.losses):
        if not math.isfinite(loss):
            yield f"the loss of step {number + 1} is {'NaN' if math.isnan(loss) else 'infinite'}"
        if number == 0:  # a replay records no other gradients
            yield from (f"the gradient of {name} holds NaN in step 1" for name in _find_nan(reference.gradients))
        for step in reference.steps[number] if reference.steps else ():
            yield from (f"{label} holds NaN in step {number + 1}" for label in _find_in_step(step))
    yield from (f"{name} holds NaN after the last step" for name in _find_nan(reference.state))


def _find_in_step(step: ReferenceStep) -> Iterator[str]:
    yield from (f"the gradient of {name}" for name in _find_nan(step.gradients))
    yield from _find_nan(step.updated)
    yield from _find_nan(step.after.tensors)
    yield from _find_in_memories(step.after)


def _find_in_memories(state: TrainingState) -> Iterator[str]:
    for memory in state.memories:
        for name, entries in memory.entries.items():
            yield from (f"the optimizer's {key} of {name}" for key in _find_nan(entries))
        for options in memory.options:
            yield from (f"the optimizer's option {key}" for key in _find_nan(options))


def _find_nan(values: Mapping[str, Any]) -> Iterator[str]:
    return (str(name) for name, value in values.items() if any(map(_is_nan, flatten_nested(value)[0])))


def _is_nan(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        leaf = leaf.coalesce().values() if leaf.is_sparse else leaf
        return bool(leaf.isnan().any())
    return isinstance(leaf, float) and math.isnan(leaf)
