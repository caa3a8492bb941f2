"""Records of a training: what it leaves behind, and what each step of the reference began with and left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from polylane.verify.rounding_floor import RoundingFloors
from polylane.verify.training_state import TrainingState


@dataclass(frozen=True)
class TrainingRecord:
    """What a training leaves behind.

    Attributes:
        losses: one a step.
        gradients: of the first step, by parameter, as the optimizer would take them.
        state: weights and buffers after the last step.
    """

    losses: list[float]
    gradients: Mapping[str, Tensor | None]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class ReferenceStep:
    """One step of one device, or of one replica that trains apart from the others.

    Attributes:
        loss: of its samples.
        before, after: with what it began, and what it left.
        gradients: as its optimizer took them, by parameter.
        floors: how far the step is from itself, where its sums are rounded otherwise.
        updated: weights as the update left them, where replicas may then agree on others.
    """

    loss: float
    before: TrainingState
    after: TrainingState
    gradients: Mapping[str, Tensor]
    floors: RoundingFloors
    updated: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ReferenceRun(TrainingRecord):
    """What one worker leaves behind.

    Attributes:
        steps: of every step what each replica did, or once what all of them did; empty where steps have no order.
        eager: whether the model itself was run: so it is unless it draws random numbers, which only its graph draws by
            key, or has a kernel that knows no float64.
        floors: of the whole run, where it was done again from weights that were nudged.
    """

    steps: list[tuple[ReferenceStep, ...]]
    eager: bool
    floors: RoundingFloors = field(default_factory=RoundingFloors)

    def step_of(self, step: int, replica: int) -> ReferenceStep:
        """What a replica did in a step."""
        each = self.steps[step]
        return each[replica % len(each)]
