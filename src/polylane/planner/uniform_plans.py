"""Candidates: plans with the same mesh for all stages, their cuts, time and memory by formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polylane.cluster.cluster import ranks_along
from polylane.cost.memory.search_bound import Footprint
from polylane.cost.network import collectives as network
from polylane.cost.operators.training_options import TrainingOptions
from polylane.plan.spec import Degrees
from polylane.planner.balance import Array, BalancedCuts
from polylane.planner.stage_curves import CurveCache, StageCurves


@dataclass(frozen=True)
class RatedPlan:
    """A way to train, by estimate.

    Attributes:
        meshes: of every stage.
        cuts: positions of the graph at which stages begin, but the first.
        stage_of_piece: the stage of every piece, where stages have several (see
            :class:`polylane.graph.partition.Partition`).
        schedule, microbatches: in which order.
        method: how.
        seconds: of a step.
        peak_bytes: of memory on the worker that needs the most.
        memory_limit: bytes that it may have.
    """

    meshes: tuple[Degrees, ...]
    cuts: tuple[int, ...]
    schedule: str
    microbatches: int
    method: TrainingOptions
    seconds: float
    peak_bytes: float
    memory_limit: float
    stage_of_piece: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        """How many it takes."""
        return sum(mesh.workers for mesh in self.meshes)

    @property
    def fits(self) -> bool:
        """Whether every worker's memory is enough."""
        return self.peak_bytes <= self.memory_limit


@dataclass(frozen=True)
class UniformPlan:
    """Equal meshes: data replicas of a pipeline of stages, each on sequence x tensor ranks.

    Attributes:
        data, stages, sequence, tensor: the degrees.
        microbatches, schedule, method: of the plan.
    """

    data: int
    stages: int
    sequence: int
    tensor: int
    microbatches: int
    schedule: str
    method: TrainingOptions

    @property
    def mesh(self) -> Degrees:
        """Of every stage."""
        return Degrees(self.data, self.sequence, self.tensor)

    def ranks(self, axis: str) -> range:
        """The first group of ranks along an axis."""
        degrees = {"data": self.data, "pipeline": self.stages, "sequence": self.sequence, "tensor": self.tensor}
        return ranks_along(degrees, axis)


def rate_uniform_plan(
    estimates: CurveCache, footprint: Footprint, uniform: UniformPlan, limit: float
) -> RatedPlan | None:
    """The best cuts of a uniform plan, and what it then takes; None where the graph has too few places to cut.

    Stages are cut so that every one fits in memory, if they can be, and the slowest is as fast as can be.
    """
    curves = stage_curves_of(estimates, uniform)
    if curves is None:
        return None
    ends = _stage_bounds(estimates, footprint, uniform, limit)
    if ends is None:  # as balanced as can be, to say by how much it does not fit
        ends = _stage_bounds(estimates, footprint, uniform, math.inf)
        if ends is None:
            return None
    most = _max_stage_bytes(footprint, uniform, curves, ends)
    seconds = _step_seconds(estimates, uniform, curves, ends)
    cuts = tuple(int(estimates.positions[i]) for i in ends[1:-1])
    meshes = (uniform.mesh,) * uniform.stages
    return RatedPlan(meshes, cuts, uniform.schedule, uniform.microbatches, uniform.method, seconds, most, limit)


def stage_curves_of(estimates: CurveCache, uniform: UniformPlan) -> StageCurves | None:
    """What the stages of a uniform plan take; None where the graph has too few places to cut."""
    if uniform.stages > estimates.max_stages:
        return None
    samples = -(-estimates.batch // (uniform.microbatches * uniform.data))
    return estimates.curves(uniform.mesh, samples, uniform.method, uniform.ranks("data"))


def min_step_seconds(estimates: CurveCache, uniform: UniformPlan) -> float:
    """Seconds that a step takes at least, however it is cut: as if all stages were alike and nothing sent."""
    curves = stage_curves_of(estimates, uniform)
    if curves is None:
        return math.inf
    passes = float(curves.pass_seconds[-1] - curves.pass_seconds[0])
    beside = float(2 * curves.gather_seconds[-1] + curves.scatter_seconds[-1])
    each = max(passes / uniform.stages + 2 * curves.host_overhead, beside / uniform.stages)
    return (uniform.stages + uniform.microbatches - 1) * each


def _stage_bounds(estimates: CurveCache, footprint: Footprint, uniform: UniformPlan, limit: float) -> list[int] | None:
    """Where stages begin and end, as indices into the positions."""
    curves = stage_curves_of(estimates, uniform)
    assert curves is not None
    weight = sum(footprint.bytes_per_element(uniform.data, uniform.method))
    # Pipelines with at least as many microbatches as stages differ in nothing that counts here.
    filled = uniform.schedule == "1f1b" and uniform.microbatches >= uniform.stages

    def memory(last: int) -> Array:
        live = last if filled else _live_microbatches(uniform, uniform.stages - last)
        return curves.elements * weight + curves.activation_bytes * live

    room = footprint.available_bytes(limit)
    # The curves live as long as these estimates: no others will have their identity.
    key = (id(curves), weight, room, uniform.schedule, None if filled else uniform.microbatches)
    found = estimates.cuts_cache.get(key)
    if found is None:
        found = estimates.cuts_cache[key] = BalancedCuts(curves.pass_seconds, memory, room)
    return found.cut_into(uniform.stages)


def _live_microbatches(uniform: UniformPlan, stage: int) -> int:
    """Microbatches that a stage holds at a time."""
    if uniform.schedule == "1f1b":
        return min(uniform.microbatches, uniform.stages - stage)
    return uniform.microbatches


def _max_stage_bytes(footprint: Footprint, uniform: UniformPlan, curves: StageCurves, ends: Sequence[int]) -> float:
    """Bytes of a rank of the stage that needs the most."""
    elements, held = (np.diff(curve[list(ends)]) for curve in (curves.elements, curves.activation_bytes))
    live = np.array([_live_microbatches(uniform, stage) for stage in range(uniform.stages)])
    return float(footprint(elements, held * live, uniform.data, uniform.method).max())


def _step_seconds(estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, ends: Sequence[int]) -> float:
    """Of a step: the pipeline's fill and drain, its slowest stage, messages, gradients that are summed, the update.

    For one forward, one backward and for all forward, all backward alike: sum of all stages + (m - 1) times the slowest
    (Huang et al., GPipe, 2019, section 2.3, with unequal stages).
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
    # A worker sends while it computes, but 1F1B's turns wait for the answer.
    slowest = float(passes.max()) + (hops / (uniform.stages - 1) if uniform.stages > 1 else 0.0)
    pipeline = float(passes.sum()) + hops + (uniform.microbatches - 1) * slowest
    return pipeline + _closing_seconds(estimates, uniform, curves, ends, backward - curves.host_overhead)


def _closing_seconds(
    estimates: CurveCache, uniform: UniformPlan, curves: StageCurves, ends: Sequence[int], backward: Array
) -> float:
    """Seconds after the last backward pass: what is left of the reductions, the optimizer's step, handing it out."""
    basis, method, most = estimates.basis, uniform.method, 0.0
    device = basis.cluster.device(0)
    elements = np.diff(curves.elements[list(ends)])
    # Most stages are alike: they are priced once.
    for own, passed, pieces in set(zip(elements.tolist(), backward.tolist(), np.diff(ends).tolist(), strict=True)):
        whole, handed = estimates.closing_seconds(method, own, uniform.ranks("data"))
        left = whole
        if method.overlap:  # all but the last of it may go on during the backward pass
            left = max(whole - passed, whole / max(1, pieces))
        most = max(most, left + basis.update_seconds(device, method.count_updated(int(own), uniform.data), 1) + handed)
    return most


def enumerate_uniform_plans(
    workers: int, inner: int, batch: int, pieces: int, methods: Sequence[TrainingOptions]
) -> Iterator[UniformPlan]:
    """Every uniform plan worth looking at on so many workers.

    Args:
        workers: all of them are used.
        inner: the most ranks that may share an operator (a host's devices).
        batch: samples of a step.
        pieces: the most stages.
        methods: to choose from.
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
                    plain = UniformPlan(data, stages, sequence, tensor, microbatches, "1f1b", methods[0])
                    for method in methods:
                        yield replace(plain, method=method)


def _microbatch_counts(samples: int, stages: int) -> list[int]:
    """Into how many parts a replica's samples may be divided: those that make parts of 1, 2, 4, 8... samples."""
    found = {max(1, samples // size) for size in _powers_of_two(samples)}
    return sorted(m for m in found if m <= samples and (stages == 1 or m >= 2 or samples == 1))


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(max(most, 1).bit_length())]


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
