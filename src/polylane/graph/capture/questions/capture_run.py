"""Capture run: the state of one export, with the questions that it has asked of the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polylane.graph.capture.questions.tape import BatchTape
from polylane.graph.readings.asked_draws import StepDraws, draws_replayed
from polylane.graph.readings.batch_readings import Reading


@dataclass
class CaptureRun:
    """State of one export: its symbolic batch size, the leaves that have it, and calls of each leaf so far.

    Attributes:
        samples: the symbolic number of samples.
        sampled: positions of the batch's leaves that have it as their first size.
        tensors: the model's own parameters and buffers, by name.
        calls: calls of each leaf so far.
        tape: takes down what the loss asks of the batch, where such questions are answered; None: they are not.
        draws: numbers of the step for which the loss is exported; None: for no one.
    """

    samples: Any = None
    sampled: Sequence[int] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    tape: BatchTape | None = None
    draws: StepDraws | None = None

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The questions that were asked of the batch in the last export, with its answers."""
        return () if self.tape is None else tuple(self.tape.readings)

    def drawn_alike(self) -> AbstractContextManager[None]:
        """Return a context manager: the loss, run eagerly, draws the single numbers that its export gets."""
        return nullcontext() if self.tape is None else draws_replayed(self.draws)

    def answer_questions(self, leaves: Sequence[Any]) -> bool:
        """Let questions about the batch be answered from now on; False if they were already, or have no answers.

        Args:
            leaves: flat leaves of the batch that is exported; on the meta device they have no data to answer from.
        """
        if self.tape is not None or any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return False
        self.tape = BatchTape(leaves, self.draws)
        return True
