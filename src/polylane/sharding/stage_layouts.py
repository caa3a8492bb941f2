"""Layouts: how the operators of every stage lie on its own mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from polylane.graph.partition import Partition
from polylane.placement.placement import REPLICATE, Placement, Shard
from polylane.plan.plan import Plan
from polylane.sharding.layout import Layout, choose_layout, layout_like

SHARED_BY = "stages with different meshes share it"


@dataclass(frozen=True)
class StageLayouts:
    """One graph's layouts.

    Attributes:
        stages: of every stage its layout, None where no operator is split. Stages with the same mesh have the same one.
    """

    stages: tuple[Layout | None, ...]

    def __getitem__(self, stage: int) -> Layout | None:
        return self.stages[stage]

    def axes(self, stage: int) -> tuple[str, ...]:
        """The axes along which a stage's operators are split; "data" among them where the samples of a batch meet."""
        layout = self.stages[stage]
        return () if layout is None else tuple(layout.splits)

    @cached_property
    def distinct(self) -> tuple[Layout, ...]:
        """Every layout once, in the order of the stages."""
        return tuple({id(layout): layout for layout in self.stages if layout is not None}.values())

    def sharded_names(self, names: Collection[str]) -> list[str]:
        """Those of some parameters and buffers of which a rank has only a part."""
        return sorted(
            str(source.role[1])
            for layout in self.distinct
            for key, source in layout.view.sources.items()
            if source.role[0] in ("parameter", "buffer")
            and source.role[1] in names
            and any(isinstance(split.source_placements.get(key), Shard) for split in layout.splits.values())
        )

    @property
    def batch_is_sharded(self) -> bool:
        """Whether replicas split operators too: samples meet in this graph."""
        return any("data" in layout.splits for layout in self.distinct)

    @cached_property
    def placement_hash(self) -> str:
        """A number of all that was chosen: workers that chose apart must have chosen alike."""
        return hashlib.sha256(" ".join(layout.placement_hash for layout in self.distinct).encode()).hexdigest()[:16]

    @cached_property
    def partial_gradient_axes(self) -> tuple[Mapping[str, tuple[str, ...]], ...]:
        """Of every stage, parameters whose gradients are summands on the ranks of an axis, and the axes."""
        return tuple({} if layout is None else layout.partial_gradient_axes() for layout in self.stages)


def choose_layouts(
    partition: Partition, plan: Plan, samples: int, whole: Mapping[str, str] | None = None, sampled: Sequence[bool] = ()
) -> StageLayouts:
    """Choose how the operators of every stage lie on its mesh.

    The whole graph is laid out once for every mesh that there is, so that all stages that have it fit together. What
    crosses between two meshes is whole values or parts of them, on both sides.

    Args:
        samples: of a microbatch.
        whole: parameters that every rank must hold whole, and why.
        sampled: as for :func:`polylane.sharding.layout.choose_layout`; empty where samples do not meet.
    """
    plain = values_between_meshes(partition, plan)
    found: dict[tuple[int, ...], Layout | None] = {}
    for stage in range(plan.pipeline):
        mesh = plan.degrees(stage)
        axes = (*(("data",) if sampled and mesh.data > 1 else ()), *plan.axes_of(stage))
        if mesh not in found:
            alike = [other for other in range(plan.pipeline) if plan.degrees(other) == mesh]
            found[mesh] = None
            if axes:
                found[mesh] = choose_layout(
                    partition.graph,
                    {axis: plan.degree(axis, stage) for axis in axes},
                    max(2, samples if sampled else -(-samples // mesh.data)),
                    pins={axis: plan.pins(axis, alike) for axis in plan.axes_of(stage)},
                    whole=whole,
                    sampled=sampled,
                    plain=plain,
                )
    made = StageLayouts(tuple(found[plan.degrees(stage)] for stage in range(plan.pipeline)))
    check_peers(made, partition, plan)
    return made


def layouts_like(main: StageLayouts, partition: Partition, plan: Plan) -> StageLayouts:
    """Split another graph of the same model (evaluation, another loss) so that its parameters lie as in ``main``."""
    plain = values_between_meshes(partition, plan)
    found = {id(layout): layout_like(layout, partition.graph, plain) for layout in main.distinct}
    made = StageLayouts(tuple(None if layout is None else found[id(layout)] for layout in main.stages))
    check_peers(made, partition, plan)
    return made


def check_peers(layouts: StageLayouts, partition: Partition, plan: Plan) -> None:
    """See that of what crosses nobody needs anything of a rank that is none of its peers (:meth:`Plan.peers`).

    Between stages with as many replicas those are the ranks of the same replica. Where each replica has its own samples
    nobody else has what it needs. Where replicas split the operators, each holds what its place on the axis "data"
    gives it: that must be the same of a value on both stages, for their layouts are chosen apart.

    Raises:
        RuntimeError: it is not.
    """
    for crossing in partition.crossings:
        start = crossing.producer
        for end in crossing.consumers:
            if plan.have_same_mesh(start, end) or plan.degree("data", start) != plan.degree("data", end):
                continue
            ways = [_replica_placement(layouts[stage], crossing.value) for stage in (start, end)]
            if ways[0] != ways[1]:
                raise RuntimeError(
                    f"over the replicas, {crossing.value} is {ways[0]} on stage {start} and {ways[1]} on stage {end}: "
                    "a replica would need what no rank that sends to it has"
                )


def _replica_placement(layout: Layout | None, value: str) -> Placement:
    """How a value lies on the replicas that split the operators between them; if they do not, each has its own."""
    if layout is None or "data" not in layout.splits:
        return REPLICATE
    return layout.state(value, layout.samples)[list(layout.splits).index("data")]


def values_between_meshes(partition: Partition, plan: Plan) -> frozenset[str]:
    """The values that cross between stages whose meshes differ."""
    return frozenset(
        c.value for c in partition.crossings for stage in c.consumers if not plan.have_same_mesh(c.producer, stage)
    )


def tensors_on_unequal_meshes(partitions: Iterable[Partition], plan: Plan) -> set[str]:
    """The parameters and buffers that stages with different meshes hold, in any of a model's graphs."""
    holders: dict[str, list[int]] = {}
    for partition in partitions:
        for stage in range(partition.stages):
            for name in (*partition.parameters(stage), *partition.buffers(stage)):
                holders.setdefault(name, []).append(stage)
    return {name for name, stages in holders.items() if not all(plan.have_same_mesh(stages[0], s) for s in stages)}
