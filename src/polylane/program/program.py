"""Program: all that one worker does in a step, and which parts of the graph and the gradients are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polylane.graph.partition import Partition, StageCrossing
from polylane.schedule.action import Action


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are summed together.

    Attributes:
        name: "stage0.2"; "stage0.tensor.0" where the ranks of an operator axis each have a summand; "tied0-2.0" for
            weights that several stages hold. The same for all of ``ranks``, and each of them has it once; ranks with
            other coordinates sum other gradients under the same name.
        ranks: who sums: the replicas of a stage, or of all stages that hold the tied weights; with them those along the
            operator axes on which the gradients are summands.
        parameters: canonical names, in the order in which a backward pass finishes them.
        zero_contributors: those of the ranks whose gradients another one of them has as well: they add zeros.
    """

    name: str
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    zero_contributors: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Program:
    """What one worker runs in a step.

    Attributes:
        rank, stage, replica: who it is.
        replicas: ranks that hold the same parts of the same stage, ascending.
        actions: in order; receives stand where their value is needed (a worker may post them earlier).
        receives: values that come in for each microbatch, with their stage of origin.
        sends: values that go out for each microbatch.
        buckets: what it reduces, in the order of reduction.
        partition: the graph and its cuts.
        coordinates: its index on each axis along which operators are split.
    """

    rank: int
    stage: int
    replica: int
    replicas: tuple[int, ...]
    actions: tuple[Action, ...]
    receives: tuple[StageCrossing, ...]
    sends: tuple[StageCrossing, ...]
    buckets: tuple[GradientBucket, ...]
    partition: Partition
    coordinates: Mapping[str, int]
