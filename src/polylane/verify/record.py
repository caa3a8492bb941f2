"""Records of a training: its results, and the state with which each step of the reference began and ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from polylane.verify.rounding_floor import RoundingFloors
from polylane.verify.training_state import TrainingState


@dataclass(frozen=True)
class TrainingRecord:
    """The results of a training.

    Attributes:
        losses: mean loss of each step.
        gradients: of the first step, by parameter, as the optimizer gets them; None for a parameter without one.
        state: weights and buffers after the last step, by name.
    """

    losses: list[float]
    gradients: Mapping[str, Tensor | None]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class ReferenceStep:
    """One step of one device, or of one replica that has weights of its own.

    Attributes:
        loss: mean over the samples of this device or replica.
        before: weights, buffers and optimizer state with which the step began.
        after: the same after the step, and after an average that ended it.
        gradients: by parameter, as the optimizer gets them.
        floors: how far the step is from itself when its sums are rounded otherwise.
        updated: weights after the update and before replicas averaged them; empty where they never do.
    """

    loss: float
    before: TrainingState
    after: TrainingState
    gradients: Mapping[str, Tensor]
    floors: RoundingFloors
    updated: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ReferenceRun(TrainingRecord):
    """The results of the reference, with all its steps.

    Attributes:
        steps: for each step the record of each replica, or a single one for all replicas; empty for a replay of
            asynchronous servers, which has no order of steps.
        eager: whether the model itself was run, and not its captured graph. The graph is run for models that draw
            random numbers, which only the graph draws by key, and for those with a kernel that has no float64.
        floors: of the whole run, where it was repeated from perturbed weights.
    """

    steps: list[tuple[ReferenceStep, ...]]
    eager: bool
    floors: RoundingFloors = field(default_factory=RoundingFloors)

    def step_of(self, step: int, replica: int) -> ReferenceStep:
        """Return the record of a replica's step; where all replicas share one record, that one."""
        each = self.steps[step]
        return each[replica % len(each)]
