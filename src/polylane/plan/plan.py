"""Plan: a complete parallelization strategy (stages, meshes, schedule, sync) as a YAML file to read and edit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from html import escape
from typing import Any, Literal

import pydantic

from polylane.errors import PolylaneError
from polylane.plan import schedule_checks as checks
from polylane.plan.options import ROUND_ROBIN, PlanOptions, explain_shares
from polylane.plan.order import check_order, has_halves
from polylane.plan.pinned_placements import check_axes
from polylane.plan.recompute import RecomputeRule
from polylane.plan.spec import Degrees, Spec, check_workers, format_degrees, format_options
from polylane.plan.stage import MESH, OPERATOR_AXES, Fingerprint, Stage, StageIndex, check_devices, index_stages
from polylane.schedule.schedules import ASYNCHRONOUS, FOUND, WITH_CHUNKS, splits_backward
from polylane.yaml_file import Count, StrictMapping


class Plan(StrictMapping, PlanOptions):  # type: ignore[misc]  # pydantic freezes it
    """How the training of one graph is parallelized; refused with a PolylaneError where it contradicts itself.

    Attributes:
        polylane: version of the file format.
        graph: fingerprint of the graph that it is for; a plan written by hand may leave it out. Names of nodes and
            parameters that the model does not have are refused either way.
        stages: the pipeline stages, in the order of their numbers.
        microbatches: number of microbatches of a step; here it is decided.

    Examples:
        >>> from polylane.plan import plan_file
        >>> plan = plan_file.parse_plan("stages: [{nodes: [body, loss], devices: [0, 1], mesh: {data: 2}}]", "of two")
        >>> plan.workers, plan.changed(microbatches=8).spec
        (2, 'data=2,pipeline=1,schedule=1f1b,microbatches=8')
    """

    polylane: Literal[1] = 1
    graph: Fingerprint | None = None
    stages: tuple[Stage, ...]
    microbatches: Count = 1
    _file: str = pydantic.PrivateAttr("")
    # Computed once for the stages: plans may have a million ranks.
    _found: StageIndex | None = pydantic.PrivateAttr(None)

    @pydantic.model_validator(mode="after")
    def _checked(self, info: pydantic.ValidationInfo) -> Plan:
        self._file = (info.context or {}).get("file", "")
        check(self)
        return self

    def __eq__(self, other: object) -> bool:
        # Where two plans were read from does not matter.
        return isinstance(other, Plan) and self.model_dump() == other.model_dump()

    def changed(self, **values: Any) -> Plan:
        """Return the plan with other values of some keys.

        Raises:
            PolylaneError: the plan then contradicts itself.
        """
        plan = self.model_copy(update=values)
        check(plan)  # pydantic does not validate a copy with changes
        return plan

    @property
    def title(self) -> str:
        """What errors call the plan: "plan run/plan.yaml", or "plan" for one that is in no file."""
        return f"plan {self._file}" if self._file else "plan"

    @property
    def data(self) -> int:
        """Number of replicas: the most that a stage has."""
        return self.degree("data")

    @property
    def sequence(self) -> int:
        """Ranks that shard activations along the sequence, each with all parameters: the most that a stage has."""
        return self.degree("sequence")

    @property
    def tensor(self) -> int:
        """Ranks that shard operators together with their parameters: the most that a stage has."""
        return self.degree("tensor")

    @property
    def pipeline(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def workers(self) -> int:
        """Number of workers that train."""
        return sum(len(self.stages[stage].devices) for stage in self.first_chunks)

    @property
    def first_chunks(self) -> tuple[int, ...]:
        """The first stage of every group of workers, ascending; without chunks these are all stages."""
        return tuple(stage for stage in range(self.pipeline) if self.first_chunk(stage) == stage)

    @property
    def stage_groups(self) -> tuple[int, ...]:
        """For every stage, the number of the group of workers that has it; groups are in the order of first stages."""
        numbers = {stage: number for number, stage in enumerate(self.first_chunks)}
        return tuple(numbers[self.first_chunk(stage)] for stage in range(self.pipeline))

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes are in two halves: gradients of inputs first, gradients of weights later."""
        if self.schedule == FOUND:
            return has_halves(self.order)
        return splits_backward(self.schedule)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the pipeline is not emptied between steps: weights are updated while batches are under way."""
        return self.schedule in ASYNCHRONOUS

    @property
    def most_chunks(self) -> int:
        """Number of stages of a worker, of the one that has most."""
        return max(map(len, self._index.chunks.values()))

    @property
    def group_meshes(self) -> tuple[Degrees, ...]:
        """The mesh of every group of workers."""
        return tuple(self.degrees(stage) for stage in self.first_chunks)

    @property
    def processes(self) -> int:
        """Number of processes: workers that train, and behind them those that only serve parameters."""
        return self.workers + (self.sync.server_count if self.sync.dedicated else 0)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which operators are sharded: of "sequence" and "tensor" those with more than one rank."""
        return tuple(axis for axis in OPERATOR_AXES if self.degree(axis) > 1)

    def axes_of(self, stage: int) -> tuple[str, ...]:
        """Return the axes along which the operators of one stage are sharded; see :attr:`axes`."""
        return tuple(axis for axis in OPERATOR_AXES if self.degree(axis, stage) > 1)

    def degree(self, axis: str, stage: int | None = None) -> int:
        """Return the number of ranks along an axis ("data", "sequence", "tensor") of a stage; None: of the largest."""
        if stage is not None:
            return self.stages[stage].degree(axis)
        return max((pipeline_stage.degree(axis) for pipeline_stage in self.stages), default=1)

    def degrees(self, stage: int) -> Degrees:
        """Return the mesh of a stage."""
        return Degrees(*(self.degree(axis, stage) for axis in MESH))

    @property
    def meshes(self) -> tuple[Degrees, ...]:
        """The mesh of every stage."""
        return tuple(self.degrees(stage) for stage in range(self.pipeline))

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have the same mesh."""
        return all(self.have_same_mesh(0, stage) for stage in range(self.pipeline))

    @property
    def has_uneven_replicas(self) -> bool:
        """Whether stages have different numbers of replicas."""
        return len({degrees.data for degrees in self.meshes}) > 1

    @property
    def resplits_batch(self) -> bool:
        """Whether stages divide a microbatch over different numbers of replicas: it is resplit between them."""
        return self.has_uneven_replicas and not self.takes_turns

    @property
    def takes_turns(self) -> bool:
        """Whether the replicas of a stage compute whole microbatches in turn."""
        return self.replicas == ROUND_ROBIN

    @property
    def most_turns(self) -> int:
        """Number of microbatches of a step that a worker computes on, of the one that has most."""
        return max(self.turns(stage) for stage in range(self.pipeline))

    def turns(self, stage: int) -> int:
        """Return the number of microbatches of a step that the first replica of a stage computes on."""
        return -(-self.microbatches // (self.degree("data", stage) if self.takes_turns else 1))

    def exchanges_shards(self, a: int, b: int) -> bool:
        """Return whether a rank of one stage sends its whole shard of a value to one counterpart on the other.

        Stages with the same mesh do, and those that differ only in how many replicas compute microbatches in turn.
        """
        axes = OPERATOR_AXES if self.takes_turns else MESH
        return all(self.degree(axis, a) == self.degree(axis, b) for axis in axes)

    def recompute_of(self, stage: int) -> RecomputeRule:
        """Return what a stage recomputes."""
        return self.stages[stage].recompute or self.recompute

    def have_same_mesh(self, a: int, b: int) -> bool:
        """Return whether two stages have the same mesh: each rank of the one then has a counterpart on the other."""
        return tuple(self.degrees(a)) == tuple(self.degrees(b))

    def first_chunk(self, stage: int) -> int:
        """Return the first stage on the workers of a stage: the number by which these workers are known."""
        return self._index.first_chunk[stage]

    def chunks(self, stage: int) -> tuple[int, ...]:
        """Return all stages on the workers of a stage, ascending."""
        return self._index.chunks[self._index.first_chunk[stage]]

    def group_of(self, rank: int) -> int:
        """Return the number of a rank's group of workers."""
        return self.stage_groups[self.stage_and_replica(rank)[0]]

    def stage_and_replica(self, rank: int) -> tuple[int, int]:
        """Return stage and replica of a rank; of several stages the first one (:meth:`first_chunk`)."""
        stage, at = self._stage_and_indices(rank)
        return stage, at["data"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's index on each of its stage's axes (:meth:`axes_of`)."""
        stage, at = self._stage_and_indices(rank)
        return {axis: at[axis] for axis in self.axes_of(stage)}

    def indices(self, rank: int) -> dict[str, int]:
        """Return a rank's index on every axis of the mesh, "data" among them."""
        return self._stage_and_indices(rank)[1]

    def rank_at(self, stage: int, replica: int, coordinates: Mapping[str, int]) -> int:
        """Return the rank at a replica of a stage and an index on each of its axes."""
        position = replica  # row-major: data outermost, tensor innermost
        for axis in OPERATOR_AXES:
            degree = self.degree(axis, stage)
            position = position * degree + (coordinates[axis] if degree > 1 else 0)
        return self.stages[stage].devices[position]

    def group(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Return the process group of a rank along axes: ranks of its stage that differ only along these, ascending."""
        stage, at = self._stage_and_indices(rank)
        index_ranges = [range(self.degree(axis, stage)) if axis in axes else (at[axis],) for axis in MESH]
        mesh_indices = (dict(zip(MESH, indices, strict=True)) for indices in itertools.product(*index_ranges))
        return tuple(sorted(self.rank_at(stage, indices["data"], indices) for indices in mesh_indices))

    def ranks_along(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks of the same stage that differ from ``rank`` only on one axis, by their index on it."""
        stage, indices = self._stage_and_indices(rank)
        mesh_indices = ({**indices, axis: index} for index in range(self.degree(axis, stage)))
        return tuple(self.rank_at(stage, at["data"], at) for at in mesh_indices)

    def peers(self, rank: int, stage: int, microbatch: int | None = None) -> tuple[int, ...]:
        """Return the ranks of another stage with which this one may exchange values.

        On a stage with the same mesh it is the counterpart alone; with as many replicas, all ranks of the same replica;
        else all ranks of the stage. Where replicas take turns, it is the replica that has the same microbatch.

        Args:
            rank: the rank that is asked for.
            stage: number of the other stage.
            microbatch: number of the microbatch whose values are exchanged; None: any that the rank may have.
        """
        own_stage, (_, replica) = self._stage_and_indices(rank)[0], self.stage_and_replica(rank)
        devices = self.stages[stage].devices
        if self.takes_turns:
            degree = self.degree("data", stage)
            # Microbatches r, r + d, ... meet all replicas whose number is r modulo the common divisor of both degrees.
            step = math.gcd(self.degree("data", own_stage), degree)
            met = range(replica % step, degree, step) if microbatch is None else (microbatch % degree,)
            groups = [self._replica_ranks(stage, peer_replica) for peer_replica in met]
            if self.exchanges_shards(own_stage, stage):
                at = self._replica_ranks(own_stage, replica).index(rank)
                groups = [ranks[at : at + 1] for ranks in groups]
            return tuple(itertools.chain(*groups))
        if self.have_same_mesh(own_stage, stage):
            return (devices[self._index.places[rank][1]],)
        if self.degree("data", own_stage) != self.degree("data", stage):
            return devices
        return self._replica_ranks(stage, replica)

    def _replica_ranks(self, stage: int, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica of a stage."""
        # Data is the outermost axis of the mesh, so a replica's ranks are consecutive in the list of devices.
        size = len(self.stages[stage].devices) // self.degree("data", stage)
        return self.stages[stage].devices[replica * size : (replica + 1) * size]

    def pins(self, axis: str, stages: Collection[int] | None = None) -> dict[str, str]:
        """Return the placements that stages (default: all) pin on one axis, by name of a parameter or node."""
        return {
            name: pattern
            for stage in (self.stages if stages is None else [self.stages[s] for s in stages])
            for name, on_axes in stage.placements.items()
            for pinned_axis, pattern in on_axes.items()
            if pinned_axis == axis
        }

    def _stage_and_indices(self, rank: int) -> tuple[int, dict[str, int]]:
        """Return the stage of a rank, and its index along each axis of the mesh."""
        index = self._index
        if rank not in index.places:
            raise PolylaneError(f"rank {rank} is on none of the plan's stages")
        (number, position), at = index.places[rank], dict[str, int]()
        for axis in reversed(MESH):
            position, at[axis] = divmod(position, index.meshes[number][axis])
        return number, at

    @property
    def _index(self) -> StageIndex:
        # A copy of the plan with other stages takes this table along: compare whose it is.
        if self._found is None or self._found.stages is not self.stages:
            self._found = index_stages(self.stages)
        return self._found

    def __repr__(self) -> str:
        return f"<Plan: {self.spec}, {self.workers} workers>"

    def _repr_html_(self) -> str:
        """Return the plan's line and its stages on their ranks, for a notebook's cell."""
        heads = "".join(f"<th>{name}</th>" for name in ("stage", "ranks", "mesh"))
        rows = "".join(
            f"<tr><td>{stage}</td><td>{', '.join(map(str, spec.devices))}</td><td>{self.degrees(stage)}</td></tr>"
            for stage, spec in enumerate(self.stages)
        )
        return f"<p><code>{escape(self.spec)}</code></p><table><tr>{heads}</tr>{rows}</table>"

    @property
    def spec(self) -> str:
        """The plan in one line, as :func:`.spec.parse` reads it; bounds and placements of the stages are left out."""
        return ",".join([*format_degrees(self.group_meshes), *format_options(self, self.most_chunks)])


# A plan in one line, or a complete one.
AnyPlan = Spec | Plan


def check(plan: Plan) -> None:
    """Refuse a plan that contradicts itself, whatever the model.

    Raises:
        PolylaneError: devices, meshes, chunks, placements and sync do not fit each other; it names the plan's key.
    """
    _check_meshes(plan)
    check_devices(plan.stages, plan.title, plan.schedule in WITH_CHUNKS)
    _check_chunks(plan)
    _check_sync(plan)
    replicas = [degrees.data for degrees in plan.meshes]
    if plan.takes_turns:
        checks.check_turns(plan.title, replicas, plan.schedule, plan.microbatches, plan.sync)
    if (reason := explain_shares(plan.shares, replicas) or plan.find_conflict()) is not None:
        raise PolylaneError(f"{plan.title}: {reason}")
    checks.check_asynchronous(plan.title, plan.schedule, plan.sync)
    if plan.sync.shard == "parameters" and plan.splits_backward:
        raise PolylaneError(
            f"{plan.title}: schedule: {plan.schedule} and shard: parameters exclude each other, since weights are "
            "released between the two halves of a backward pass: take shard: gradients, or another schedule"
        )
    if plan.schedule == "pipedream-2bw":
        checks.check_accumulation(plan.title, plan.pipeline, plan.microbatches, plan.most_turns)


def _check_meshes(plan: Plan) -> None:
    if not plan.stages:
        raise PolylaneError(f"{plan.title}: stages: there must be at least one")
    for index, stage in enumerate(plan.stages):
        if len(stage.devices) != math.prod(stage.mesh.values()):
            mesh = ", ".join(f"{axis}={stage.degree(axis)}" for axis in MESH if axis in stage.mesh) or "data=1"
            raise PolylaneError(f"{plan.title}: stages.{index}: {len(stage.devices)} devices for a mesh of {mesh}")
    check_workers(plan.workers, format_degrees(plan.group_meshes))
    check_axes([stage.placements for stage in plan.stages], [plan.axes_of(s) for s in range(plan.pipeline)], plan.title)


def _check_chunks(plan: Plan) -> None:
    """Refuse stages on other workers than the schedule gives them to."""
    if plan.order and plan.schedule != FOUND:
        raise PolylaneError(f"{plan.title}: order is for schedule: auto, and this plan has schedule: {plan.schedule}")
    if plan.schedule == FOUND:  # any stages on any workers
        try:
            check_order(plan.order, plan.stage_groups, plan.microbatches) if plan.order else None
        except PolylaneError as error:
            raise PolylaneError(f"{plan.title}: {error}") from None
        return
    checks.check_chunks(plan.title, plan.schedule, plan.stage_groups, plan.first_chunks)


def _check_sync(plan: Plan) -> None:
    """Refuse sync options that the meshes do not allow."""
    sync = plan.sync
    # A replica that takes steps of its own, or that servers count, must be one replica of every stage.
    if plan.has_uneven_replicas and (sync.is_replica_local or sync.has_servers):
        key = "kind: parameter_server" if sync.has_servers else f"every: {sync.every}"
        raise PolylaneError(f"{plan.title}: sync.{key} needs as many replicas of every stage: give all the same data")
    for stage in range(plan.pipeline):
        if sync.within is not None and plan.degree("data", stage) % sync.within:
            raise PolylaneError(
                f"{plan.title}: sync.within: {plan.degree('data', stage)} replicas of stage {stage} cannot be divided "
                f"into groups of {sync.within}"
            )
