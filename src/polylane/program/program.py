"""Program: the actions of one worker in one step, in order, with its gradient buckets and crossing values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polylane.graph.partition import Partition, StageCrossing
from polylane.schedule.action import Action


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are summed in one all-reduce.

    Attributes:
        name: "stage0.2"; "stage0.tensor.0" where the ranks of an operator axis each have a partial sum; "tied0-2.0" for
            weights that several stages hold. The same for all of ``ranks``, and each of them has it once; ranks with
            other coordinates sum other gradients under the same name.
        ranks: the group of the all-reduce: the replicas of a stage, or of all stages that hold the tied weights; with
            the ranks along those operator axes on which the gradients are partial sums.
        parameters: canonical names, in the order in which a backward pass finishes them.
        zero_contributors: ranks whose gradients another rank of the group has as well; they contribute zeros.
        is_sparse: whether it is the sparse gradient of one table of embeddings, of which ranks exchange rows.
    """

    name: str
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    zero_contributors: frozenset[int] = frozenset()
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Posting:
    """A receive that a worker posts before it needs the message.

    Attributes:
        receive: the action that waits for the message.
        steps_ahead: steps before its own in which it is posted; 0 but in asynchronous pipelines.
    """

    receive: Action
    steps_ahead: int = 0


@dataclass(frozen=True)
class Program:
    """What one worker runs in a step.

    Attributes:
        rank, stage, replica: the worker's rank, its (first) stage and its replica, each from 0.
        replicas: ranks that hold the same shards of the same stage, ascending, this one among them.
        actions: all actions in order; receives are where their value is needed (a worker may post them earlier).
        stages: all stages of the worker, ascending; more than one are its chunks.
        local_sources: values that stages of the worker get from another stage of it, by (value, stage that reads it).
        buckets: gradients that it reduces, in the order of reduction.
        partition: the graph and its cuts into stages.
        coordinates: the worker's index on each axis along which operators are sharded.
        microbatches: number of microbatches that the batch is divided into, those of other replicas included.
        takes_turns: whether the replicas compute whole microbatches in turn, and do not split every one.
        late_sends: sends for which the worker waits later than for others, by action: the microbatch before whose
            backward pass on their stage it waits; the number of microbatches where only the end of the step does. See
            :mod:`polylane.program.late_sends`.
        meetings: by position, and behind the last action, the receives that are posted before it where a posted one may
            hold up all that follows: each when its message is sent, in an order that all workers agree with. Empty
            until it is found. See :mod:`polylane.program.meeting_order`.
    """

    rank: int
    stage: int
    replica: int
    replicas: tuple[int, ...]
    actions: tuple[Action, ...]
    stages: tuple[int, ...]
    local_sources: Mapping[tuple[str, int], int]
    buckets: tuple[GradientBucket, ...]
    partition: Partition
    coordinates: Mapping[str, int]
    microbatches: int
    takes_turns: bool
    late_sends: Mapping[Action, int] = field(default_factory=dict)
    meetings: tuple[tuple[Posting, ...], ...] = ()

    def inputs(self, stage: int) -> tuple[StageCrossing, ...]:
        """Return the values that come in to a stage for each microbatch, from whichever stage."""
        return tuple(c for c in self.partition.crossings if stage in c.consumers)

    def outputs(self, stage: int) -> tuple[StageCrossing, ...]:
        """Return the values that other stages need from a stage for each microbatch."""
        return tuple(c for c in self.partition.crossings if c.producer == stage)
