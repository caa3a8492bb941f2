"""Stage graph: which stages feed which; a chain, or any directed acyclic graph, whose branches run at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polylane.graph.partition import Partition


class CyclicStages(ValueError):
    """Stages wait for each other in a cycle.

    Attributes:
        stages: stages of the cycle, each waiting for the one before; the first one is repeated at the end.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = tuple(stages)
        super().__init__(self.stages)

    def __str__(self) -> str:
        return f"stages {' -> '.join(map(str, self.stages))} wait for each other"


@dataclass(frozen=True)
class StageGraph:
    """The stages and what each one waits for.

    Attributes:
        predecessors: for every stage, those whose values its forward pass reads; ascending, each once. Its backward
            pass reads gradients of the stages that read its values.

    Raises:
        ValueError: a predecessor that does not exist.
        CyclicStages: stages wait for each other.
    """

    predecessors: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for stage, producers in enumerate(self.predecessors):
            for producer in producers:
                if not 0 <= producer < len(self.predecessors):
                    raise ValueError(f"stage {stage} comes after stage {producer}, which is not there")
        try:
            TopologicalSorter(dict(enumerate(self.predecessors))).prepare()
        except CycleError as error:
            *circle, _ = error.args[1]  # its first stage again at the end
            lowest = circle.index(min(circle))
            raise CyclicStages([*circle[lowest:], *circle[: lowest + 1]]) from None

    @classmethod
    def chain(cls, stages: int) -> StageGraph:
        """Build a chain: every stage reads values of the one before.

        Raises:
            ValueError: fewer than one stage.
        """
        if not isinstance(stages, int) or stages < 1:
            raise ValueError(f"stages must be a whole number of at least 1, not {stages!r}")
        return cls(tuple((s - 1,) if s else () for s in range(stages)))

    @classmethod
    def of_edges(cls, stages: int, edges: Iterable[tuple[int, int]]) -> StageGraph:
        """Build a stage graph from its edges.

        Args:
            stages: number of stages in the graph.
            edges: pairs (producer, consumer) of stages, in any order.

        Raises:
            ValueError: an edge from or to a stage that does not exist.
            CyclicStages: stages wait for each other.
        """
        producer_sets: list[set[int]] = [set() for _ in range(stages)]
        for start, end in edges:
            if not (0 <= start < stages and 0 <= end < stages):
                raise ValueError(f"no edge can go from stage {start} to {end}: stages are 0 to {stages - 1}")
            producer_sets[end].add(start)
        return cls(tuple(tuple(sorted(producers)) for producers in producer_sets))

    @classmethod
    def of_partition(cls, partition: Partition) -> StageGraph:
        """Build the stage graph of a partition: each stage waits for those whose values it reads.

        Raises:
            CyclicStages: stages wait for each other.
        """
        return cls.of_edges(partition.stages, partition.edges)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.predecessors)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For every stage, those that read its values, ascending."""
        consumers: list[list[int]] = [[] for _ in self.predecessors]
        for stage, producers in enumerate(self.predecessors):
            for producer in producers:
                consumers[producer].append(stage)
        return tuple(map(tuple, consumers))

    @cached_property
    def depth_to_end(self) -> tuple[int, ...]:
        """For every stage, the number of stages on the longest path from it to the end, itself included."""
        depths: dict[int, int] = {}
        # Every stage after those that read its values: in that order their depths are known.
        for stage in TopologicalSorter(dict(enumerate(self.successors))).static_order():
            depths[stage] = 1 + max((depths[successor] for successor in self.successors[stage]), default=0)
        return tuple(depths[stage] for stage in range(self.stages))


def as_stage_graph(stages: int | StageGraph) -> StageGraph:
    """Return a stage graph as it is; a number of stages as a chain."""
    return stages if isinstance(stages, StageGraph) else StageGraph.chain(stages)
