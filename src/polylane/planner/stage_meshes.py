"""Unequal meshes: boundaries and devices of pipeline stages, by dynamic programming (Alpa's inter-operator pass).

Zheng et al., Alpa, OSDI 2022, section 5.2: for every bound on the slowest stage, find the stages with the least sum of
times; a pipeline takes that sum plus (m - 1) times the slowest. Here stages also keep within memory, which is why they
are added from the last one back: in 1F1B a stage holds as many microbatches as there are stages from it to the end.

Replicas of a stage either split every microbatch, or compute whole ones in turn (`polylane.schedule.round_robin`): of d
replicas each then has a d-th of the microbatches, and m / d takes the place of m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polylane.cost.network import collectives as network
from polylane.plan.spec import Degrees
from polylane.plan.sync import SUM
from polylane.planner.balance import Array
from polylane.planner.stage_curves import CurveCache
from polylane.planner.uniform_plans import RatedPlan

# With more workers only uniform meshes are searched.
MOST_WORKERS = 16
# Bounds of the dynamic program: a round for each stage, over all pairs of places at which the graph may be cut.
MOST_STAGES = 6
MOST_PLACES = 48
# How many bounds on the slowest stage are tried; numbers of microbatches; degrees of operator axes.
BOUNDS = 12
MICROBATCHES = (2, 4, 8, 16, 32)
DEGREES = (2, 4, 8)
# Elements for which collectives are priced; other sizes count in proportion.
SAMPLE = 1e6


@dataclass(frozen=True)
class MeshOption:
    """A mesh, with the cost of a stage on it for every first (row) and last (column) position.

    Attributes:
        mesh: degrees of the stage's data, sequence and tensor axes.
        turns: number of replicas that compute whole microbatches in turn; 1 where they split every one.
        seconds: seconds of a microbatch's two passes and of the messages before them.
        closing_seconds: seconds of a step after the last backward pass.
        elements: trained elements of one rank.
        activation_bytes: bytes that a microbatch holds between its passes.
        frozen_bytes: bytes of a rank's parameters that are not trained.
    """

    mesh: Degrees
    turns: int
    seconds: Array
    closing_seconds: Array
    elements: Array
    activation_bytes: Array
    frozen_bytes: Array

    @property
    def period(self) -> Array:
        """Seconds between two microbatches of a stage: replicas in turn are at several at once."""
        return self.seconds / self.turns


# Stages: first position, end position and mesh of each, as indices into the chosen positions.
Chosen = list[tuple[int, int, MeshOption]]


def search_unequal_meshes(
    estimates: CurveCache,
    workers: int,
    limit: float,
    microbatches: Sequence[int] = MICROBATCHES,
    in_turn: bool = False,
) -> list[RatedPlan]:
    """Return the best plan with unequal meshes for each number of microbatches.

    Args:
        estimates: cost curves and memory bound on the cluster.
        workers: number of workers over all stages.
        limit: bytes that a worker may have.
        microbatches: numbers of microbatches of a step that are tried.
        in_turn: whether replicas compute whole microbatches in turn, and do not split every one.
    """
    if workers > MOST_WORKERS or workers < 3 or estimates.max_stages < 2:
        return []
    plans = []
    for count in (m for m in microbatches if m <= estimates.batch):
        plans += StageMeshSearch(estimates, workers, count, limit, in_turn).find_best()
    return plans


class StageMeshSearch:
    """Finds the best unequal stages for one number of microbatches.

    Args:
        estimates: cost curves and memory bound on the cluster.
        workers: number of workers over all stages.
        microbatches: number of microbatches of a step.
        limit: bytes that a worker may have.
        in_turn: whether replicas compute whole microbatches in turn, and do not split every one.
    """

    def __init__(
        self, estimates: CurveCache, workers: int, microbatches: int, limit: float, in_turn: bool = False
    ) -> None:
        self.estimates, self.workers, self.microbatches, self.limit = estimates, workers, microbatches, limit
        self.in_turn = in_turn
        self.places = choose_positions(estimates)
        self._bytes: dict[tuple[int, int], Array] = {}

    def find_best(self) -> list[RatedPlan]:
        """Return the best candidate in a list; an empty list if equal meshes are better."""
        max_bound = min((float(option.seconds[0, -1]) for option in self.options), default=0.0)
        best: tuple[float, Chosen] | None = None
        # Bounds from the fastest single stage down to its perfect split over all workers. Where no stages keep within
        # one, none keep within a lower one: where nothing fits in memory, a single bound is tried.
        for bound in reversed(np.geomspace(max_bound / self.workers, max_bound, BOUNDS)) if max_bound else ():
            chosen = self.choose_stages(float(bound))
            if chosen is None:
                break
            if best is None or self.step_seconds(chosen) <= best[0]:
                best = self.step_seconds(chosen), chosen
        # Equal meshes are left to the uniform plans, which price their cuts more closely.
        if best is None or len({option.mesh for _, _, option in best[1]}) < 2:
            return []
        meshes = tuple(option.mesh for _, _, option in best[1])
        replicated = any(mesh.data > 1 for mesh in meshes)
        # Without replicas there are no turns: it is the plan that the other search finds.
        if self.in_turn and not replicated:
            return []
        seconds, chosen = best
        positions = self.estimates.positions
        cuts = tuple(int(positions[self.places[a]]) for a, _, _ in chosen[1:])
        return [
            RatedPlan(
                meshes=meshes,
                cuts=cuts,
                microbatches=self.microbatches,
                seconds=seconds,
                peak_bytes=self._max_stage_bytes(chosen),
                memory_limit=self.limit,
                sync=self.estimates.sync if replicated else SUM,
                takes_turns=self.in_turn,
            )
        ]

    def _max_stage_bytes(self, chosen: Chosen) -> float:
        """Return the bytes of a rank of the stage that needs the most memory."""
        max_bytes, used = 0.0, 0
        for number, (a, b, option) in enumerate(reversed(chosen), 1):
            used += option.mesh.workers
            live = self.count_live(option, number, used)
            max_bytes = max(max_bytes, float(self.stage_bytes(self.options.index(option), live)[a, b]))
        return max_bytes

    def count_live(self, option: MeshOption, stages: int, workers: int) -> int:
        """Return the microbatches that a rank of a stage holds at once under 1F1B, at most.

        Args:
            option: the mesh of the stage, with what it takes there.
            stages: number of stages from this one to the end.
            workers: number of workers on these stages.
        """
        if not self.in_turn:
            return min(self.microbatches, stages)
        # `round_robin.WARM_UPS`: replicas from here to the end over the stage's own. Ranks that share operators behind
        # this stage count as replicas, of which there are fewer: a bound.
        ahead = option.turns + workers - option.mesh.workers
        return min(-(-self.microbatches // option.turns), -(-ahead // option.turns))

    def step_seconds(self, chosen: Chosen) -> float:
        """Return the seconds of a step: sum of the stages, the slowest for all further microbatches, and the end."""
        stage_seconds = [float(option.seconds[a, b]) for a, b, option in chosen]
        repeats = (-(-self.microbatches // option.turns) - 1 for _, _, option in chosen)
        slowest = max(count * seconds for count, seconds in zip(repeats, stage_seconds, strict=True))
        return sum(stage_seconds) + slowest + max(float(option.closing_seconds[a, b]) for a, b, option in chosen)

    @cached_property
    def options(self) -> list[MeshOption]:
        """Every mesh of a stage that leaves workers for other stages."""
        splits = [(1, 1), *((1, n) for n in DEGREES), *((n, 1) for n in DEGREES)]
        # Each replica needs a sample of every microbatch, or in turn a microbatch.
        parts = self.microbatches if self.in_turn else self.estimates.batch // self.microbatches
        max_data = min(self.workers - 1, parts)
        meshes = [Degrees(data, sequence, tensor) for data in range(1, max_data + 1) for sequence, tensor in splits]
        return [self._build_option(mesh) for mesh in meshes if mesh.workers < self.workers]

    def _build_option(self, mesh: Degrees) -> MeshOption:
        basis, at, m = self.estimates.basis, np.array(self.places), self.microbatches
        replicas = range(0, mesh.workers, mesh.sequence * mesh.tensor)
        turns = mesh.data if self.in_turn else 1
        samples = -(-self.estimates.batch // (self.microbatches * mesh.data // turns))
        # Replicas in turn sum no statistics inside their passes.
        curves = self.estimates.curves(mesh._replace(data=mesh.data // turns), samples, replicas, m)
        times = curves.stage_seconds(at[:, None], at[None, :])
        elements, memory = curves.elements[at], curves.activation_bytes[at]
        inward = np.array(
            [network.message_seconds(basis.cluster, float(b), 0, 1) if b else 0.0 for b in curves.cut_bytes[at]]
        )
        # The first stage receives no messages; elsewhere values come in and gradients of the same size go
        # back (2 * inward).
        inward[0] = 0.0
        counts = np.maximum(elements[None, :] - elements[:, None], 0.0)
        device, sharding = basis.cluster.device(0), self.estimates.sharding(mesh.data, m)
        distinct, number = np.unique(counts, return_inverse=True)
        updates = [basis.update_seconds(device, sharding.count_updated(int(n))) for n in distinct]
        ending = np.array(updates)[number].reshape(counts.shape)
        summed, handed = self.estimates.closing_seconds(SAMPLE, replicas, m)
        # About 70% of the gradient reduction overlaps with the last backward pass.
        ending = ending + counts / SAMPLE * (summed * (0.3 if basis.method.overlap else 1.0) + handed)
        seconds = times.forward + times.backward + 2 * inward[:, None]
        frozen = curves.frozen_bytes[at]
        return MeshOption(
            mesh, turns, seconds, ending, counts, memory[None, :] - memory[:, None], frozen[None, :] - frozen[:, None]
        )

    def stage_bytes(self, number: int, live: int) -> Array:
        """Return the bytes of a rank of every stage on one option, with ``live`` microbatches in flight."""
        if (number, live) not in self._bytes:
            option = self.options[number]
            memory = option.activation_bytes * live + option.frozen_bytes + self.estimates.gathered_bytes(option.mesh)
            self._bytes[number, live] = self.estimates.footprint(option.elements, memory, option.mesh.data)
        return self._bytes[number, live]

    def choose_stages(self, bound: float) -> Chosen | None:
        """Return the stages with the least sum of times, none above ``bound``; None if there are none."""
        count, rounds = len(self.places), list[_SearchRound]()
        times = np.full((self.workers + 1, count), np.inf)  # [workers, first position]: least time to the end
        times[0, -1] = 0.0
        best = np.inf
        stages = 0
        for number in range(1, min(MOST_STAGES, self.workers, count - 1) + 1):
            rounds.append(self._add_stage(times, bound, number))
            times = rounds[-1].least
            if times[self.workers, 0] < best:
                best, stages = float(times[self.workers, 0]), number
        if not stages:
            return None
        # Follow the choices from the first stage, which was added last.
        result, at, workers = Chosen(), 0, self.workers
        for search_round in reversed(rounds[:stages]):
            option, end = self.options[int(search_round.option[workers, at])], int(search_round.end[workers, at])
            result.append((at, end, option))
            at, workers = end, workers - option.mesh.workers
        return result

    def _add_stage(self, tails: Array, bound: float, stages: int) -> _SearchRound:
        """Prepend one stage to the best stages so far, of which there are then so many; ``tails`` has their times."""
        count = len(self.places)
        times = np.full_like(tails, np.inf)
        choice, ends = (np.full(tails.shape, -1, dtype=np.int64) for _ in "12")
        upper = np.triu(np.ones((count, count), dtype=bool), 1)
        # Numbers of workers on which there are stages to the end.
        reachable = np.isfinite(tails.min(axis=1))
        for number, option in enumerate(self.options):
            quick = upper & (option.period <= bound)
            if not quick.any():
                continue
            # The end of the step happens once, not per microbatch: only the slowest counts, spread here
            # so that sums stay additive.
            full_cost = option.seconds + option.closing_seconds / self.microbatches
            live, cost = 0, full_cost
            for used in range(option.mesh.workers, self.workers + 1):
                if not reachable[used - option.mesh.workers]:
                    continue
                if live != (live := self.count_live(option, stages, used)):
                    cost = np.where(quick & (self.stage_bytes(number, live) <= self.limit), full_cost, np.inf)
                total = cost + tails[used - option.mesh.workers]
                value = total.min(axis=1)
                if (better := value < times[used]).any():
                    times[used][better], choice[used][better] = value[better], number
                    ends[used][better] = np.argmin(total[better], axis=1)
        return _SearchRound(times, choice, ends)


@dataclass(frozen=True)
class _SearchRound:
    """By workers and first position: least time to the end, and option and end of the first stage."""

    least: Array
    option: NDArray[np.int64]
    end: NDArray[np.int64]


def choose_positions(estimates: CurveCache) -> list[int]:
    """Return indices of positions to cut at: all, or the one with the fewest bytes in each interval of work."""
    count = len(estimates.positions)
    if count <= MOST_PLACES:
        return list(range(count))
    entering = estimates.basis.stages.cut_bytes(Degrees())[estimates.positions]
    table = estimates.table(Degrees(), 1)
    seconds = ((table.forward + table.waits) + (table.backward + table.backward_waits))[estimates.positions]
    groups = np.searchsorted(np.linspace(seconds[0], seconds[-1], MOST_PLACES - 1), seconds[1:-1], side="right")
    indices = {0, count - 1}
    for group in np.unique(groups):
        members = 1 + np.flatnonzero(groups == group)
        indices.add(int(members[np.argmin(entering[members])]))
    return sorted(indices)
