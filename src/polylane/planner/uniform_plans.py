"""Uniform plans: candidates with the same mesh for all stages, with cuts, time and memory by formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polylane.cluster.cluster import ranks_along
from polylane.cost.network import collectives as network
from polylane.plan.spec import Degrees
from polylane.plan.sync import SUM, SyncOptions
from polylane.planner.balance import Array, BalancedCuts
from polylane.planner.stage_curves import CurveCache, StageCurves


@dataclass(frozen=True)
class RatedPlan:
    """A candidate plan with its estimated time and memory.

    Attributes:
        meshes: degrees of the mesh of every stage.
        cuts: positions of the graph at which all stages but the first begin.
        stage_of_piece: stage of every piece of the graph, if stages have several pieces; else empty (see
            :class:`polylane.graph.partition.Partition`).
        microbatches: number of microbatches, which 1F1B schedules.
        seconds: estimated seconds of a step.
        peak_bytes: bytes of the worker that needs the most memory.
        memory_limit: bytes that a worker may have.
        sync: how replicas synchronize, and what they share out; the plain sum where there are none.
    """

    meshes: tuple[Degrees, ...]
    cuts: tuple[int, ...]
    microbatches: int
    seconds: float
    peak_bytes: float
    memory_limit: float
    stage_of_piece: tuple[int, ...] = ()
    sync: SyncOptions = SUM

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
        microbatches: number of microbatches, which 1F1B schedules.
    """

    data: int
    stages: int
    sequence: int
    tensor: int
    microbatches: int

    @property
    def mesh(self) -> Degrees:
        """Mesh of every stage."""
        return Degrees(self.data, self.sequence, self.tensor)

    def ranks(self, axis: str) -> range:
        """Return the first group of ranks along an axis."""
        degrees = {"data": self.data, "pipeline": self.stages, "sequence": self.sequence, "tensor": self.tensor}
        return ranks_along(degrees, axis)


def rate_uniform_plan(estimates: CurveCache, uniform: UniformPlan, limit: float) -> RatedPlan | None:
    """Find the best cuts of a uniform plan and rate it; None if the graph has too few cut positions.

    Stages are cut so that each fits in memory, if possible, and the slowest is as fast as possible.
    """
    curves = stage_curves_of(estimates, uniform)
    if curves is None:
        return None
    # If nothing fits it is cut without limit, to report how much memory is missing.
    ends = _stage_bounds(estimates, uniform, curves, limit) or _stage_bounds(estimates, uniform, curves, math.inf)
    if ends is None:
        return None
    most = _max_stage_bytes(estimates, uniform, curves, ends)
    seconds = _step_seconds(estimates, uniform, curves, ends)
    cuts = tuple(int(estimates.positions[i]) for i in ends[1:-1])
    meshes = (uniform.mesh,) * uniform.stages
    sync = estimates.sync if uniform.data > 1 else SUM
    return RatedPlan(meshes, cuts, uniform.microbatches, seconds, most, limit, sync=sync)


def stage_curves_of(estimates: CurveCache, uniform: UniformPlan) -> StageCurves | None:
    """Return the curves of a uniform plan's stages; None if the graph has too few cut positions."""
    if uniform.stages > estimates.max_stages:
        return None
    samples = -(-estimates.batch // (uniform.microbatches * uniform.data))
    return estimates.curves(uniform.mesh, samples, uniform.ranks("data"), uniform.microbatches)


def min_step_seconds(estimates: CurveCache, uniform: UniformPlan) -> float:
    """Return a lower bound of a step's seconds: perfectly balanced stages, no messages, no reductions."""
    curves = stage_curves_of(estimates, uniform)
    if curves is None:
        return math.inf
    passes = float(curves.pass_seconds[-1] - curves.pass_seconds[0])
    beside = float(2 * curves.gather_seconds[-1] + curves.scatter_seconds[-1])
    each = max(passes / uniform.stages + 2 * curves.host_overhead, beside / uniform.stages)
    return (uniform.stages + uniform.microbatches - 1) * each


def _stage_bounds(estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, limit: float) -> list[int] | None:
    """Return the stage boundaries as indices into the positions; None if nothing fits."""
    # Parameters, gradients and states per trained element.
    weight = estimates.footprint.bytes_per_element(uniform.data)
    # With at least as many microbatches as stages, 1F1B's memory does not depend on their number: cuts are shared.
    filled = uniform.microbatches >= uniform.stages

    def memory(last: int) -> Array:
        live = min(uniform.microbatches, last)
        return curves.elements * weight + curves.frozen_bytes + curves.activation_bytes * live

    room = estimates.footprint.available_bytes(limit) - estimates.gathered_bytes(uniform.mesh)
    # The cache keeps the curves alive, so that their id() is not reused.
    key = (id(curves), weight, room, None if filled else uniform.microbatches)
    found = estimates.cuts_cache.get(key)
    if found is None:
        found = estimates.cuts_cache[key] = BalancedCuts(curves.pass_seconds, memory, room)
    return found.cut_into(uniform.stages)


def _max_stage_bytes(estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, ends: Sequence[int]) -> float:
    """Return the bytes of a rank of the stage that needs the most memory."""
    elements, held = (np.diff(curve[list(ends)]) for curve in (curves.elements, curves.activation_bytes))
    live = np.minimum(uniform.microbatches, uniform.stages - np.arange(uniform.stages))
    held = held * live + np.diff(curves.frozen_bytes[list(ends)]) + estimates.gathered_bytes(uniform.mesh)
    return float(estimates.footprint(elements, held, uniform.data).max())


def _step_seconds(estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, ends: Sequence[int]) -> float:
    """Return the seconds of a step: pipeline fill and drain, slowest stage, messages, reductions, optimizer.

    1F1B and GPipe take the same time: sum of all stages + (m - 1) times the slowest (Huang et al., GPipe, 2019, section
    2.3, for unequal stages).
    """
    cluster = estimates.basis.cluster
    forward, backward = curves.stage_seconds(np.array(ends[:-1]), np.array(ends[1:]))
    hops = 0.0
    if uniform.stages > 1:
        ranks = uniform.ranks("pipeline")
        inner = uniform.sequence * uniform.tensor
        for bytes_, count in Counter(float(curves.cut_bytes[i]) for i in ends[1:-1]).items():
            hops += 2 * count * network.message_seconds(cluster, bytes_, ranks[0], ranks[1], inner)
    passes = forward + backward
    # Sends overlap with computation, but in 1F1B's steady state a forward waits for the backward that answers it.
    slowest = float(passes.max()) + (hops / (uniform.stages - 1) if uniform.stages > 1 else 0.0)
    pipeline = float(passes.sum()) + hops + (uniform.microbatches - 1) * slowest
    return pipeline + _closing_seconds(estimates, uniform, curves, ends, backward - curves.host_overhead)


def _closing_seconds(
    estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, ends: Sequence[int], backward: Array
) -> float:
    """Return the seconds after the last backward pass: exposed reductions, optimizer step, parameter all-gather."""
    basis, most, sharding = estimates.basis, 0.0, estimates.sharding(uniform.data, uniform.microbatches)
    device = basis.cluster.device(0)
    elements = np.diff(curves.elements[list(ends)])
    # Equal stages are priced once.
    # ``passed``: seconds of the last backward pass, behind which reductions can hide.
    for own, passed, pieces in set(zip(elements.tolist(), backward.tolist(), np.diff(ends).tolist(), strict=True)):
        whole, handed = estimates.closing_seconds(own, uniform.ranks("data"), uniform.microbatches)
        left = whole
        if basis.method.overlap:  # all but the last bucket may overlap with the backward pass
            left = max(whole - passed, whole / max(1, pieces))
        most = max(most, left + basis.update_seconds(device, sharding.count_updated(int(own))) + handed)
    return most


def enumerate_uniform_plans(workers: int, inner: int, batch: int, pieces: int) -> Iterator[UniformPlan]:
    """Yield every uniform plan worth rating on ``workers`` workers.

    Args:
        workers: number of workers, all of which are used.
        inner: most ranks over which an operator may be sharded.
        batch: samples of a step over all replicas.
        pieces: most stages into which the graph can be cut.
    """
    for sequence in _powers_of_two(inner):
        for tensor in _powers_of_two(inner // sequence):
            if workers % (sequence * tensor):
                continue
            rest = workers // (sequence * tensor)
            for stages in _divisors(rest, pieces):
                data = rest // stages
                if data > batch:
                    continue
                for microbatches in _microbatch_counts(batch // data, stages):
                    yield UniformPlan(data, stages, sequence, tensor, microbatches)


def _microbatch_counts(samples: int, stages: int) -> list[int]:
    """Return the numbers of microbatches that make parts of about 1, 2, 4, 8... samples."""
    found = {max(1, samples // size) for size in _powers_of_two(samples)}
    return sorted(m for m in found if m <= samples and (stages == 1 or m >= 2 or samples == 1))


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(max(most, 1).bit_length())]


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
