"""Readings: what a loss asks of a batch itself (``if mask.any()``, ``int(index.max()) + 1``), asked of every batch.

Python that branches on such an answer, or makes a size of it, is captured for the answer that the example batch gave.
What was computed of the inputs up to the question is kept with it, as a short list of calls, so that the same question
can be put to any batch ahead of its step: a graph holds for the batches that answer as its own batch did. A batch that
answers otherwise is captured anew. These are guards on values, as those of :mod:`polylane.graph.open_sizes` on sizes.

A question is put to the whole batch, as one device puts it, however the batch is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from polylane.errors import PolylaneError
from polylane.graph.readings.asked_draws import AskedDraw, StepDraws

# An answer, which is part of a graph.
Answer = bool | int


@dataclass(frozen=True)
class Slot:
    """A tensor among those that were computed of a batch, by number."""

    number: int


@dataclass(frozen=True)
class SizeRead:
    """A size that follows from those of such tensors.

    Attributes:
        text: the size as torch writes it, a formula of symbols.
        function: the size as a function of the sizes at ``places``.
        places: (tensor's number, dimension) of each of its symbols.
    """

    text: str
    function: Callable[..., Any] = field(compare=False)
    places: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ReadingStep:
    """One call on the way to a question.

    Attributes:
        function: torch's function or method that was called, or a number of the step that is drawn.
        arguments: its (args, kwargs), with a Slot for each tensor of the batch and a SizeRead for each of its sizes.
        results: numbers of the tensors that it returned.
        written: numbers of the tensors that it writes into.
    """

    function: Callable[..., Any]
    arguments: Any
    results: tuple[int, ...]
    written: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A question to a batch, with the answer for which a graph was captured.

    Attributes:
        leaves: leaves of the batch that it reads, by their tensors' numbers.
        steps: calls that lead to it, in order.
        question: the last step: a call that returns a number, or a size.
        answer: what the batch answered from which the graph was captured.
        source: the user's line that asks, "file:line", or "".
    """

    leaves: Mapping[int, int]
    steps: tuple[ReadingStep, ...]
    question: ReadingStep | SizeRead
    answer: Answer
    source: str = ""

    @property
    def is_drawn(self) -> bool:
        """Whether the answer depends on a number that is drawn for the step."""
        return any(isinstance(step.function, AskedDraw) for step in self.steps)

    def ask(self, leaves: Sequence[Any], draws: StepDraws | None = None) -> Answer:
        """Return a batch's answer; the batch stays as it is.

        Args:
            leaves: flat leaves of the whole batch, nested as the captured one was.
            draws: random numbers of the step; None: there are none, and what depends on them counts as unchanged.
        """
        if draws is None and self.is_drawn:
            return self.answer
        copied = any(step.written for step in self.steps)
        slots: dict[int, Tensor] = {}
        for number, leaf in self.leaves.items():
            slots[number] = leaves[leaf].detach().clone() if copied else leaves[leaf].detach()
        with torch.no_grad():
            for step in self.steps:
                output = step.function(draws) if isinstance(step.function, AskedDraw) else _call(step, slots)
                results = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
                slots |= zip(step.results, results, strict=False)
            answer = (
                _read_size(self.question, slots) if isinstance(self.question, SizeRead) else _call(self.question, slots)
            )
        return type(self.answer)(answer)


def _call(step: ReadingStep, slots: Mapping[int, Tensor]) -> Any:
    args, kwargs = tree_map(lambda argument: _value_of(argument, slots), step.arguments)
    return step.function(*args, **kwargs)


def _value_of(argument: Any, slots: Mapping[int, Tensor]) -> Any:
    if isinstance(argument, Slot):
        return slots[argument.number]
    return _read_size(argument, slots) if isinstance(argument, SizeRead) else argument


def _read_size(size: SizeRead, slots: Mapping[int, Tensor]) -> Any:
    return size.function(*(slots[number].shape[dim] for number, dim in size.places))


def ask_batches(readings: Sequence[Reading]) -> bool:
    """Return whether an answer depends on the values of a batch, and not on the numbers of a step alone."""
    return any(reading.leaves for reading in readings)


def refuse_part(readings: Sequence[Reading]) -> PolylaneError:
    """Return the error of a worker that has only some of a batch's samples, where the loss asks about all of them."""
    source = next((f" ({reading.source})" for reading in readings if reading.source), "")
    return PolylaneError(
        f"the loss asks about the values of the whole batch{source}, and this worker has loaded only its own samples: "
        "give step() the whole batch, the same on every worker"
    )


def answer_alike(readings: Sequence[Reading], batch: Sequence[Any], other_batch: Sequence[Any]) -> bool:
    """Return whether two batches give equal answers to all questions, those of a graph or others."""
    try:
        return all(reading.ask(batch) == reading.ask(other_batch) for reading in readings)
    except Exception:  # what leads to a question does not work on such a batch
        return False


def are_answered(readings: Sequence[Reading], leaves: Sequence[Any], draws: StepDraws | None = None) -> bool:
    """Return whether a batch answers all questions as the batch did from which a graph was captured.

    In order: a question is only put where the answers before it led to it.

    Args:
        readings: questions of the graph.
        leaves: flat leaves of the whole batch, nested as the captured one was.
        draws: random numbers of the step; None: there are none, and they are ignored.
    """
    for reading in readings:
        try:
            if reading.ask(leaves, draws) != reading.answer:
                return False
        except Exception:  # what leads to the question does not work on such a batch
            return False
    return True
