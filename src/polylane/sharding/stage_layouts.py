"""Layouts of pipeline stages: the placements of every stage's operators on the stage's own mesh."""

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
    """The layouts of one graph's stages.

    Attributes:
        stages: the layout of every stage, None where no operator is split; stages with the same mesh share one layout.
    """

    stages: tuple[Layout | None, ...]

    def __getitem__(self, stage: int) -> Layout | None:
        return self.stages[stage]

    def axes(self, stage: int) -> tuple[str, ...]:
        """Return the axes that split a stage's operators; "data" is among them if the loss couples samples."""
        layout = self.stages[stage]
        return () if layout is None else tuple(layout.splits)

    @cached_property
    def distinct(self) -> tuple[Layout, ...]:
        """Every layout once, in the order of the stages."""
        return tuple({id(layout): layout for layout in self.stages if layout is not None}.values())

    def sharded_names(self, names: Collection[str]) -> list[str]:
        """Return the names, among parameters and buffers given, of which a rank holds only a part."""
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
        """Whether replicas split operators too, because the loss couples samples."""
        return any("data" in layout.splits for layout in self.distinct)

    @cached_property
    def placement_hash(self) -> str:
        """Hash of the placements of all stages; must be equal on all ranks, which choose independently."""
        return hashlib.sha256(" ".join(layout.placement_hash for layout in self.distinct).encode()).hexdigest()[:16]

    @cached_property
    def partial_gradient_axes(self) -> tuple[Mapping[str, tuple[str, ...]], ...]:
        """For every stage, the parameters whose gradients are Partial on the ranks of an axis, and those axes."""
        return tuple({} if layout is None else layout.partial_gradient_axes() for layout in self.stages)


def choose_layouts(
    partition: Partition,
    plan: Plan,
    samples: int,
    whole_parameters: Mapping[str, str] | None = None,
    sampled: Sequence[bool] = (),
) -> StageLayouts:
    """Choose the placements of every stage's operators on its mesh.

    The whole graph is laid out once for every distinct mesh, so that all stages with that mesh fit together. Values
    that cross between two meshes are replicated or sharded on both sides, never partial.

    Args:
        partition: the graph, divided into stages.
        plan: degrees of every stage's axes, and pins.
        samples: number of samples of a microbatch, over all replicas.
        whole_parameters: parameters that every rank must hold whole, and the reason.
        sampled: as for :func:`polylane.sharding.layout.choose_layout`; empty where the loss does not couple samples.
    """
    plain = values_between_meshes(partition, plan)
    layouts: dict[tuple[int, ...], Layout | None] = {}
    for stage in range(plan.pipeline):
        mesh = plan.degrees(stage)
        # Replicas split operators only if the loss couples their samples; otherwise each computes its own samples
        # alone.
        axes = (*(("data",) if sampled and mesh.data > 1 else ()), *plan.axes_of(stage))
        if mesh not in layouts:
            mesh_stages = [other_stage for other_stage in range(plan.pipeline) if plan.degrees(other_stage) == mesh]
            layouts[mesh] = None
            if axes:
                layouts[mesh] = choose_layout(
                    partition.graph,
                    {axis: plan.degree(axis, stage) for axis in axes},
                    # At least two samples: a dimension of size 1 offers no shards, so that what is chosen for one
                    # sample would not carry over to more.
                    max(2, samples if sampled else -(-samples // mesh.data)),
                    pins={axis: plan.pins(axis, mesh_stages) for axis in plan.axes_of(stage)},
                    whole=whole_parameters,
                    sampled=sampled,
                    plain=plain,
                )
    stage_layouts = StageLayouts(tuple(layouts[plan.degrees(stage)] for stage in range(plan.pipeline)))
    check_peers(stage_layouts, partition, plan)
    return stage_layouts


def layouts_like(main: StageLayouts, partition: Partition, plan: Plan) -> StageLayouts:
    """Split another graph of the same model (evaluation, another loss) with the parameter placements of ``main``."""
    plain = values_between_meshes(partition, plan)
    layouts = {id(layout): layout_like(layout, partition.graph, plain) for layout in main.distinct}
    stage_layouts = StageLayouts(tuple(None if layout is None else layouts[id(layout)] for layout in main.stages))
    check_peers(stage_layouts, partition, plan)
    return stage_layouts


def check_peers(layouts: StageLayouts, partition: Partition, plan: Plan) -> None:
    """Check that values which cross between meshes are needed only from ranks that send to each other.

    Peers (:meth:`Plan.peers`) of stages with equal data degrees are the ranks of the same replica. Where each replica
    has its own samples, only that replica has what it needs. Where replicas split the operators, each has the part that
    its coordinate on the axis "data" gives it: a value's placement along "data" must then be the same on both stages,
    although their layouts are chosen independently.

    Raises:
        RuntimeError: a value's placement along "data" differs between two stages.
    """
    for crossing in partition.crossings:
        start = crossing.producer
        for end in crossing.consumers:
            if plan.have_same_mesh(start, end) or plan.degree("data", start) != plan.degree("data", end):
                continue
            pair = [_replica_placement(layouts[stage], crossing.value) for stage in (start, end)]
            if pair[0] != pair[1]:
                raise RuntimeError(
                    f"over the replicas, {crossing.value} is {pair[0]} on stage {start} and {pair[1]} on stage {end}: "
                    "a replica would need what no rank that sends to it has"
                )


def _replica_placement(layout: Layout | None, value: str) -> Placement:
    """Return a value's placement over replicas that split the operators; otherwise each replica has its own value."""
    if layout is None or "data" not in layout.splits:
        return REPLICATE
    return layout.state(value, layout.samples)[list(layout.splits).index("data")]


def values_between_meshes(partition: Partition, plan: Plan) -> frozenset[str]:
    """Return the values that cross between stages with different meshes."""
    return frozenset(
        c.value for c in partition.crossings for stage in c.consumers if not plan.have_same_mesh(c.producer, stage)
    )


def tensors_on_unequal_meshes(partitions: Iterable[Partition], plan: Plan) -> set[str]:
    """Return the parameters and buffers held by stages with different meshes, in any of a model's graphs."""
    holders: dict[str, list[int]] = {}
    for partition in partitions:
        for stage in range(partition.stages):
            for name in (*partition.parameters(stage), *partition.buffers(stage)):
                holders.setdefault(name, []).append(stage)
    return {name for name, stages in holders.items() if not all(plan.have_same_mesh(stages[0], s) for s in stages)}
