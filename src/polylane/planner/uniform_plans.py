"""Uniform plans: candidates with the same mesh for all stages, with cuts, time and memory by formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polylane.cluster.cluster import ranks_along
from polylane.cost.network import collectives as network
from polylane.plan.fixed_keys import ScheduleOption
from polylane.plan.spec import Degrees
from polylane.plan.sync import SUM, SyncOptions
from polylane.planner.balance import Array, BalancedCuts
from polylane.planner.schedule_options import (
    PLAIN_SCHEDULE,
    live_microbatches,
    penalize,
    pipeline_seconds,
    usable_options,
)
from polylane.planner.stage_curves import CurveCache, StageCurves
from polylane.schedule.estimates import StageSeconds


@dataclass(frozen=True)
class RatedPlan:
    """A candidate plan with its estimated time and memory.

    Attributes:
        meshes: degrees of the mesh of every stage; with chunks, of every group of workers.
        cuts: positions of the graph at which all stages but the first begin, of all chunks.
        stage_of_piece: stage of every piece of the graph, if stages have several pieces; else empty (see
            :class:`polylane.graph.partition.Partition`).
        microbatches: number of microbatches of a step.
        seconds: estimated seconds of a step.
        peak_bytes: bytes of the worker that needs the most memory.
        memory_limit: bytes that a worker may have.
        sync: how replicas synchronize, and what they share out; the plain sum where there are none.
        option: the schedule, and the stages of every worker.
        takes_turns: whether replicas compute whole microbatches in turn, and do not split every one.
    """

    meshes: tuple[Degrees, ...]
    cuts: tuple[int, ...]
    microbatches: int
    seconds: float
    peak_bytes: float
    memory_limit: float
    stage_of_piece: tuple[int, ...] = ()
    sync: SyncOptions = SUM
    option: ScheduleOption = PLAIN_SCHEDULE
    takes_turns: bool = False

    @property
    def turns(self) -> tuple[int, ...]:
        """Number of replicas of every stage, where they take turns; else empty."""
        return tuple(mesh.data for mesh in self.meshes) if self.takes_turns else ()

    @property
    def division(self) -> tuple[Hashable, ...]:
        """How the plan divides the model and the workers; plans that have the same differ in microbatches alone."""
        return self.meshes, self.stage_of_piece, self.sync.shard, self.takes_turns

    @property
    def workers(self) -> int:
        """Number of workers over all stages."""
        return sum(mesh.workers for mesh in self.meshes)

    @property
    def fits(self) -> bool:
        """Whether every worker stays within its memory."""
        return self.peak_bytes <= self.memory_limit


@dataclass(frozen=True)
class UniformPlan:
    """Degrees of a uniform plan: data replicas of a pipeline, each stage on sequence x tensor ranks.

    Attributes:
        data, stages, sequence, tensor: number of ranks along each axis.
        microbatches: number of microbatches of a step.
        takes_turns: whether replicas compute whole microbatches in turn, and do not split every one.
    """

    data: int
    stages: int
    sequence: int
    tensor: int
    microbatches: int
    takes_turns: bool = False

    @classmethod
    def of(cls, candidate: RatedPlan) -> UniformPlan:
        """Return the degrees of a candidate whose stages all have the same mesh."""
        mesh, stages = candidate.meshes[0], len(candidate.meshes)
        return cls(mesh.data, stages, mesh.sequence, mesh.tensor, candidate.microbatches, candidate.takes_turns)

    def in_turn(self) -> UniformPlan:
        """Return the same replicas in turn: each has the same samples in as many passes, as microbatches of its own."""
        return replace(self, microbatches=self.microbatches * self.data, takes_turns=True)

    def divides(self, batch: int) -> bool:
        """Return whether each replica has a sample of every microbatch, or in turn a microbatch of its own."""
        if self.takes_turns:
            return self.data <= self.microbatches <= batch
        return self.data * self.microbatches <= batch

    @property
    def sharing(self) -> int:
        """Number of replicas that compute on one microbatch together."""
        return 1 if self.takes_turns else self.data

    @property
    def turns(self) -> tuple[int, ...]:
        """Number of replicas of every stage, where they take turns; else empty."""
        return (self.data,) * self.stages if self.takes_turns else ()

    @property
    def own_microbatches(self) -> int:
        """Number of microbatches that a replica computes on, of the one that has most."""
        return -(-self.microbatches // (self.data if self.takes_turns else 1))

    @property
    def mesh(self) -> Degrees:
        """Mesh of every stage."""
        return Degrees(self.data, self.sequence, self.tensor)

    def ranks(self, axis: str) -> range:
        """Return the first group of ranks along an axis."""
        degrees = {"data": self.data, "pipeline": self.stages, "sequence": self.sequence, "tensor": self.tensor}
        return ranks_along(degrees, axis)


def rate_uniform_plan(
    estimates: CurveCache, uniform: UniformPlan, limit: float, options: Sequence[ScheduleOption] = (PLAIN_SCHEDULE,)
) -> RatedPlan | None:
    """Find the best cuts and the best schedule of a uniform plan, and rate it; None if there are no such cuts.

    Stages are cut so that each fits in memory, if possible, and the slowest is as fast as possible.

    Args:
        estimates: cost curves and memory bound on the cluster.
        uniform: degrees and number of microbatches.
        limit: bytes that a worker may have.
        options: the schedules that it may have.
    """
    curves = stage_curves_of(estimates, uniform)
    sync = estimates.sync if uniform.data > 1 else SUM
    options = _usable_options(estimates, uniform, sync, options)
    if curves is None or not options:
        return None
    # If nothing fits it is cut without limit, to report how much memory is missing.
    ends = _stage_bounds(estimates, uniform, curves, limit) or _stage_bounds(estimates, uniform, curves, math.inf)
    if ends is None:
        return None
    times = _stage_seconds(estimates, uniform, curves, ends)
    closing = _closing_seconds(estimates, uniform, curves, ends, times)
    own_microbatches = uniform.own_microbatches
    seconds = {option: pipeline_seconds(option, times, own_microbatches) + closing for option in options}
    sizes: dict[ScheduleOption, float] = {}
    # The first that fits is the best one; where none does, that which needs the least is reported.
    for option in sorted(options, key=lambda option: penalize(seconds[option], option)):
        live = live_microbatches(option, uniform.stages, own_microbatches)
        sizes[option] = _max_stage_bytes(estimates, uniform, curves, ends, live)
        if sizes[option] <= limit:
            break
    else:
        option = min(options, key=sizes.__getitem__)
    candidate = RatedPlan(
        meshes=(uniform.mesh,) * uniform.stages,
        cuts=_cut_positions(estimates, ends),
        microbatches=uniform.microbatches,
        seconds=seconds[option],
        peak_bytes=sizes[option],
        memory_limit=limit,
        sync=sync,
        takes_turns=uniform.takes_turns,
    )
    return change_schedule(estimates, candidate, option) if option != PLAIN_SCHEDULE else candidate


def change_schedule(estimates: CurveCache, candidate: RatedPlan, option: ScheduleOption) -> RatedPlan | None:
    """Return a candidate of 1F1B with another schedule, cut into its chunks; None if there are no such cuts.

    Time and memory are those of the candidate.
    """
    chunks = option[1]
    if chunks == 1:
        return replace(candidate, option=option)
    uniform = UniformPlan.of(candidate)
    curves = stage_curves_of(estimates, uniform)
    ends = None if curves is None else _stage_bounds(estimates, uniform, curves, math.inf, chunks)
    return None if ends is None else replace(candidate, option=option, cuts=_cut_positions(estimates, ends))


def cut_for_plain_schedule(estimates: CurveCache, candidate: RatedPlan) -> RatedPlan | None:
    """Return a uniform candidate as 1F1B would have it, with one stage on every worker; None if nothing is cut so."""
    if candidate.option[1] == 1:
        return replace(candidate, option=PLAIN_SCHEDULE)
    uniform = UniformPlan.of(candidate)
    variant = estimates.with_sync(candidate.sync) if uniform.data > 1 else estimates
    return rate_uniform_plan(variant, uniform, candidate.memory_limit)


def _cut_positions(estimates: CurveCache, ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(estimates.positions[i]) for i in ends[1:-1])


def stage_curves_of(estimates: CurveCache, uniform: UniformPlan) -> StageCurves | None:
    """Return the curves of a uniform plan's stages; None if the graph has too few cut positions."""
    if uniform.stages > estimates.max_stages:
        return None
    samples = -(-estimates.batch // (uniform.microbatches * uniform.sharing))
    # Replicas that take turns sum nothing inside their passes.
    mesh = uniform.mesh._replace(data=uniform.sharing)
    return estimates.curves(mesh, samples, uniform.ranks("data"), uniform.microbatches)


def min_step_seconds(
    estimates: CurveCache, uniform: UniformPlan, options: Sequence[ScheduleOption] = (PLAIN_SCHEDULE,)
) -> float:
    """Return a lower bound of a step's seconds: perfectly balanced stages, no messages, no reductions."""
    curves = stage_curves_of(estimates, uniform)
    sync = estimates.sync if uniform.data > 1 else SUM
    options = _usable_options(estimates, uniform, sync, options)
    if curves is None or not options:
        return math.inf
    times = curves.balanced_seconds(uniform.stages)
    return min(pipeline_seconds(option, times, uniform.own_microbatches) for option in options)


def _usable_options(
    estimates: CurveCache, uniform: UniformPlan, sync: SyncOptions, options: Sequence[ScheduleOption]
) -> list[ScheduleOption]:
    return usable_options(
        options, uniform.stages, uniform.microbatches, estimates.max_stages, sync, turns=uniform.turns
    )


def _stage_bounds(
    estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, limit: float, chunks: int = 1
) -> list[int] | None:
    """Return the boundaries of all stages as indices into the positions; None if nothing fits."""
    room = estimates.footprint.available_bytes(limit) - estimates.gathered_bytes(uniform.mesh)
    if math.isinf(room):
        return curves.balanced_cuts.cut_into(uniform.stages * chunks)
    # Parameters, gradients and states per trained element.
    weight = estimates.footprint.bytes_per_element(uniform.data)
    # With at least as many microbatches as stages, 1F1B's memory does not depend on their number: cuts are shared.
    own_microbatches = uniform.own_microbatches
    filled = own_microbatches >= uniform.stages

    def memory(stages: int) -> Array:
        live = min(own_microbatches, stages)
        return curves.elements * weight + curves.frozen_bytes + curves.activation_bytes * live

    # The cache keeps the curves alive, so that their id() is not reused.
    key = (id(curves), weight, room, None if filled else own_microbatches)
    cuts = estimates.cuts_cache.get(key)
    if cuts is None:
        cuts = BalancedCuts(curves.pass_seconds, memory, room, curves.balanced_cuts)
        estimates.cuts_cache[key] = cuts
    return cuts.cut_into(uniform.stages * chunks)


def _max_stage_bytes(
    estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, ends: Sequence[int], live: Array
) -> float:
    """Return the bytes of a rank of the stage that needs the most memory, with so many live microbatches on each."""
    elements, memory = (np.diff(curve[list(ends)]) for curve in (curves.elements, curves.activation_bytes))
    memory = memory * live + np.diff(curves.frozen_bytes[list(ends)]) + estimates.gathered_bytes(uniform.mesh)
    return float(estimates.footprint(elements, memory, uniform.data).max())


def _stage_seconds(
    estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, ends: Sequence[int]
) -> StageSeconds:
    """Return the seconds of a microbatch on every stage, and of its messages between them."""
    cluster = estimates.basis.cluster
    times = curves.stage_seconds(np.array(ends[:-1]), np.array(ends[1:]))
    hops = 0.0
    if uniform.stages > 1:
        ranks = uniform.ranks("pipeline")
        inner = uniform.sequence * uniform.tensor
        for bytes_, count in Counter(float(curves.cut_bytes[i]) for i in ends[1:-1]).items():
            hops += 2 * count * network.message_seconds(cluster, bytes_, ranks[0], ranks[1], inner)
    return replace(times, hops=hops)


def _closing_seconds(
    estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, ends: Sequence[int], times: StageSeconds
) -> float:
    """Return the seconds after the last backward pass: exposed reductions, optimizer step, parameter all-gather."""
    backward = times.backward - times.overhead
    basis, slowest, sharding = estimates.basis, 0.0, estimates.sharding(uniform.data, uniform.microbatches)
    device = basis.cluster.device(0)
    elements = np.diff(curves.elements[list(ends)])
    # Equal stages are priced once.
    # ``passed``: seconds of the last backward pass, behind which reductions can hide.
    for count, passed, pieces in set(zip(elements.tolist(), backward.tolist(), np.diff(ends).tolist(), strict=True)):
        reduction, handed = estimates.closing_seconds(count, uniform.ranks("data"), uniform.microbatches)
        remainder = reduction
        if basis.method.overlap:  # all but the last bucket may overlap with the backward pass
            remainder = max(reduction - passed, reduction / max(1, pieces))
        slowest = max(slowest, remainder + basis.update_seconds(device, sharding.count_updated(int(count))) + handed)
    return slowest


def enumerate_uniform_plans(
    workers: int, inner: int, batch: int, pieces: int, microbatches: int | None = None, fewest: int = 2
) -> Iterator[UniformPlan]:
    """Yield every uniform plan worth rating on ``workers`` workers.

    Args:
        workers: number of workers, all of which are used.
        inner: most ranks over which an operator may be sharded.
        batch: samples of a step over all replicas.
        pieces: most stages into which the graph can be cut.
        microbatches: the number that plans must have; None: those that may be worth it.
        fewest: fewest microbatches of a pipeline: two, or one where further steps fill it.
    """
    for sequence in _powers_of_two(inner):
        for tensor in _powers_of_two(inner // sequence):
            if workers % (sequence * tensor):
                continue
            groups = workers // (sequence * tensor)
            for stages in _divisors(groups, pieces):
                data = groups // stages
                if data > batch:
                    continue
                min_count = fewest if stages > 1 else 1
                for count in _microbatch_counts(batch // data, min_count) if microbatches is None else [microbatches]:
                    yield UniformPlan(data, stages, sequence, tensor, count)


def _microbatch_counts(samples: int, fewest: int) -> list[int]:
    """Return the numbers of microbatches, ``fewest`` or more, that make parts of about 1, 2, 4, 8... samples."""
    counts = {max(1, samples // size) for size in _powers_of_two(samples)}
    return sorted(m for m in counts if m <= samples and (m >= fewest or samples == 1))


def _powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(max(limit, 1).bit_length())]


def _divisors(number: int, limit: int) -> list[int]:
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]
