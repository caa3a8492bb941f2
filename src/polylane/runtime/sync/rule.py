"""What a rule of agreement between replicas decides in a step; the plain one: gradients are summed in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Rule:
    """How replicas agree, as a job sees it; gradients are summed by the step's program, and nothing is left to do.

    Attributes:
        slack: steps by which replicas may be apart: as many reports of steps may be under way.
    """

    slack = 1

    def alone(self, objective: str) -> bool:
        """Whether replicas take the next step of an objective apart from each other."""
        return False

    def stepped(self, objective: str, samples: int) -> None:
        """After an optimizer step: agree, where it is time.

        Args:
            objective: that was stepped.
            samples: in the whole batch.
        """

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """For the while, this worker's weights are those on which all replicas agree. All workers must enter it."""
        yield
