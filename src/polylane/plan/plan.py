"""Plan: stages, devices, schedule and synchronization as a YAML file that a person can read, edit and commit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph, Node
from polylane.graph.partition import Partition, cut_positions
from polylane.plan.pins import check_pins, read_pattern
from polylane.plan.spec import Degrees, Spec

# The axes of a stage's mesh, the outermost first: its devices are listed in this order.
_MESH = ("data", "sequence", "tensor")
_OPERATOR_AXES = ("sequence", "tensor")


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class Fingerprint(_Strict):
    """Which graph a plan is for, with enough of it to say what differs from another."""

    id: str
    nodes: int
    parameters: int


class Stage(_Strict):
    """Some of the graph on some of the devices.

    ``nodes`` are the first and the last node, by the user's module path ("layer2.3": all of that module) or by a node's
    own name ("layer2.3.conv1/conv2d"). ``devices`` are ranks: the mesh of data x sequence x tensor in row-major order.
    ``placements`` fixes how a parameter, or what a node gives, lies along an axis ("replicate", "shard(1)", "partial");
    what it does not name is chosen.
    """

    nodes: tuple[str, str]
    devices: tuple[int, ...]
    mesh: dict[Literal["data", "sequence", "tensor"], pydantic.PositiveInt] = {"data": 1}
    placements: dict[
        str, dict[Literal["sequence", "tensor"], Annotated[str, pydantic.BeforeValidator(read_pattern)]]
    ] = {}

    def degree(self, axis: str) -> int:
        """How many ranks there are along an axis of the mesh."""
        return next((degree for name, degree in self.mesh.items() if name == axis), 1)


class Sync(_Strict):
    """How replicas agree."""

    kind: Literal["all_reduce"] = "all_reduce"
    every: Literal[1] = 1


class Plan(_Strict):
    """A way to split the training of one graph."""

    polylane: Literal[1] = 1
    graph: Fingerprint
    stages: tuple[Stage, ...]
    schedule: Literal["naive", "afab", "1f1b"] = "1f1b"
    microbatches: pydantic.PositiveInt = 1
    sync: Sync = Sync()
    precision: Literal["float32", "bfloat16"] = "float32"

    @property
    def data(self) -> int:
        """Replicas of every stage; the most that one has."""
        return self.degree("data")

    @property
    def sequence(self) -> int:
        """Ranks over which the operators are split while each holds all parameters."""
        return self.degree("sequence")

    @property
    def tensor(self) -> int:
        """Ranks over which the operators are split so that each holds a part of the parameters."""
        return self.degree("tensor")

    @property
    def pipeline(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def workers(self) -> int:
        """How many workers the plan takes."""
        return sum(len(stage.devices) for stage in self.stages)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which operators are split: "sequence", "tensor", as far as they have more than one rank."""
        return tuple(axis for axis in _OPERATOR_AXES if self.degree(axis) > 1)

    def axes_of(self, stage: int) -> tuple[str, ...]:
        """As :attr:`axes`, of one stage."""
        return tuple(axis for axis in _OPERATOR_AXES if self.degree(axis, stage) > 1)

    def degree(self, axis: str, stage: int | None = None) -> int:
        """How many ranks there are along an axis of a stage's mesh ("data", "sequence", "tensor"); or the most."""
        return max(each.degree(axis) for each in (self.stages if stage is None else self.stages[stage : stage + 1]))

    def degrees(self, stage: int) -> Degrees:
        """The mesh of a stage."""
        return Degrees(*(self.degree(axis, stage) for axis in _MESH))

    @property
    def uniform(self) -> bool:
        """Whether all stages have the same mesh."""
        return all(self.aligned(0, stage) for stage in range(self.pipeline))

    def aligned(self, a: int, b: int) -> bool:
        """Whether two stages have the same mesh: each rank of the one then has its counterpart on the other."""
        return tuple(self.degrees(a)) == tuple(self.degrees(b))

    def place(self, rank: int) -> tuple[int, int]:
        """Stage and replica of a rank."""
        stage, at = self._where(rank)
        return stage, at["data"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's index on each of its stage's axes (:meth:`axes_of`)."""
        stage, at = self._where(rank)
        return {axis: at[axis] for axis in self.axes_of(stage)}

    def indices(self, rank: int) -> dict[str, int]:
        """A rank's index on every axis of the mesh, "data" among them."""
        return self._where(rank)[1]

    def rank_at(self, stage: int, replica: int, coordinates: Mapping[str, int]) -> int:
        """The rank of a replica of a stage with an index on each of its axes."""
        position = replica
        for axis in _OPERATOR_AXES:
            degree = self.degree(axis, stage)
            position = position * degree + (coordinates[axis] if degree > 1 else 0)
        return self.stages[stage].devices[position]

    def group(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """The ranks of the same stage that differ from ``rank`` only along these axes of the mesh, ascending."""
        stage, at = self._where(rank)
        ways = [range(self.degree(axis, stage)) if axis in axes else (at[axis],) for axis in _MESH]
        every = (dict(zip(_MESH, indices, strict=True)) for indices in itertools.product(*ways))
        return tuple(sorted(self.rank_at(stage, each["data"], each) for each in every))

    def along(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks of the same stage that differ from ``rank`` only on one axis of the mesh, by their index on it."""
        stage, here = self._where(rank)
        every = ({**here, axis: index} for index in range(self.degree(axis, stage)))
        return tuple(self.rank_at(stage, at["data"], at) for at in every)

    def peers(self, rank: int, stage: int) -> tuple[int, ...]:
        """The ranks of another stage with which this one may exchange values.

        Of a stage with the same mesh that is its counterpart there; else all of the same replica if there are as many
        replicas, or else all of the stage.
        """
        own, (_, replica) = self._where(rank)[0], self.place(rank)
        devices = self.stages[stage].devices
        if self.aligned(own, stage):
            return (devices[self.stages[own].devices.index(rank)],)
        if self.degree("data", own) != self.degree("data", stage):
            return devices
        size = len(devices) // self.degree("data", stage)
        return devices[replica * size : (replica + 1) * size]

    def pins(self, axis: str, stages: Collection[int] | None = None) -> dict[str, str]:
        """The placements that stages (default: all) ask for on one axis, by the name of a parameter or node."""
        return {
            name: pattern
            for stage in (self.stages if stages is None else [self.stages[s] for s in stages])
            for name, on_axes in stage.placements.items()
            for own, pattern in on_axes.items()
            if own == axis
        }

    def _where(self, rank: int) -> tuple[int, dict[str, int]]:
        """The stage of a rank, and its index along each axis of the mesh."""
        for number, stage in enumerate(self.stages):
            if rank in stage.devices:
                position, at = stage.devices.index(rank), dict[str, int]()
                for axis in reversed(_MESH):
                    position, at[axis] = divmod(position, self.degree(axis, number))
                return number, at
        raise PolylaneError(f"rank {rank} is on none of the plan's stages")

    @property
    def spec(self) -> str:
        """The plan in one line; the stages' bounds and their placements are left out."""
        degrees = [f"data={self.data}", f"pipeline={self.pipeline}", *(f"{a}={self.degree(a)}" for a in self.axes)]
        if not self.uniform:
            degrees = [f"[{' | '.join(str(self.degrees(stage)) for stage in range(self.pipeline))}]"]
        line = ",".join([*degrees, f"schedule={self.schedule}", f"microbatches={self.microbatches}"])
        return line if self.precision == "float32" else f"{line},precision={self.precision}"


def fingerprint(graph: Graph) -> Fingerprint:
    """What a plan for ``graph`` carries of it."""
    return Fingerprint(id=graph.fingerprint, nodes=len(graph.nodes), parameters=len(graph.parameters))


def from_partition(partition: Partition, spec: Spec, microbatches: int) -> Plan:
    """The plan that puts each stage of ``partition`` on a mesh of data x sequence x tensor ranks.

    Replicas are outermost, then stages, and ranks that split an operator are neighbours: they talk the most, and a
    host is filled with them first. Stages with meshes of their own follow each other.
    """
    ends = [0, *partition.cuts, len(partition.graph.nodes)]
    nodes = partition.graph.nodes
    stages = tuple(
        Stage(
            nodes=(nodes[ends[s]].name, nodes[ends[s + 1] - 1].name),
            devices=devices,
            mesh={axis: n for axis, n in zip(_MESH, degrees, strict=True) if n > 1 or axis == "data"},  # type: ignore[misc]
        )
        for s, (degrees, devices) in enumerate(zip(spec.meshes, _devices(spec), strict=True))
    )
    return Plan(
        graph=fingerprint(partition.graph),
        stages=stages,
        schedule=spec.schedule,  # type: ignore[arg-type]
        microbatches=microbatches,
        precision=spec.precision,  # type: ignore[arg-type]
    )


def _devices(spec: Spec) -> list[tuple[int, ...]]:
    """The ranks of every stage, in the order of its mesh."""
    if spec.stages:
        ends = list(itertools.accumulate((degrees.workers for degrees in spec.stages), initial=0))
        return [tuple(range(first, end)) for first, end in itertools.pairwise(ends)]
    inner = spec.sequence * spec.tensor
    return [
        tuple((replica * spec.pipeline + s) * inner + index for replica in range(spec.data) for index in range(inner))
        for s in range(spec.pipeline)
    ]


def default_microbatches(spec: Spec, batch: int) -> int:
    """Four for every stage, as GPipe advises (Huang et al., section 2.3), as far as the batch has samples for them."""
    if spec.microbatches is not None:
        return spec.microbatches
    return 1 if spec.pipeline == 1 else max(1, min(4 * spec.pipeline, batch // spec.data))


def dump(plan: Plan) -> str:
    """The plan as YAML."""
    data = plan.model_dump(mode="json")
    for stage in data["stages"]:
        if not stage["placements"]:
            del stage["placements"]
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)


def load(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PolylaneError: the file cannot be read, or a key is missing, unknown or wrong; one sentence that names it.
    """
    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise PolylaneError(f"plan {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PolylaneError(f"plan {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise PolylaneError(f"plan {path} is not a mapping with the keys polylane, graph and stages")
    try:
        plan = Plan.model_validate(data)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        if key == "polylane":
            raise PolylaneError(
                f"plan {path}: polylane: {first['input']!r} is a form that this version cannot read"
            ) from error
        raise PolylaneError(f"plan {path}: {key}: {first['msg']}") from error
    _check_devices(plan, path)
    return plan


def _check_devices(plan: Plan, path: str | Path) -> None:
    if not plan.stages:
        raise PolylaneError(f"plan {path}: stages: there must be at least one")
    seen: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        if len(stage.devices) != math.prod(stage.mesh.values()):
            mesh = ", ".join(f"{axis}={stage.degree(axis)}" for axis in _MESH if axis in stage.mesh)
            raise PolylaneError(f"plan {path}: stages.{index}: {len(stage.devices)} devices for a mesh of {mesh}")
        for device in stage.devices:
            if device in seen:
                raise PolylaneError(
                    f"plan {path}: device {device} is on stages {seen[device]} and {index}: each can have one"
                )
            seen[device] = index
    if sorted(seen) != list(range(len(seen))):
        raise PolylaneError(f"plan {path}: devices must be numbered 0 to {len(seen) - 1}, they are {sorted(seen)}")


def partition_for(plan: Plan, graph: Graph) -> Partition:
    """Cut ``graph`` as ``plan`` says.

    Raises:
        PolylaneError: the plan is for another model (with the difference), or its stages do not cover the graph in
        order.
    """
    own = fingerprint(graph)
    if plan.graph.id != own.id:
        raise PolylaneError(f"the plan is for another model: {_difference(plan, graph, own)}")
    starts = [_position(plan, graph.nodes, index) for index in range(plan.pipeline)]
    cuts = tuple(first for first, _ in starts[1:])
    for index, (first, last) in enumerate(starts):
        expected = 0 if index == 0 else starts[index - 1][1] + 1
        end_expected = len(graph.nodes) - 1 if index == plan.pipeline - 1 else last
        if first != expected or last != end_expected or last < first:
            raise PolylaneError(
                f"plan: stages.{index}.nodes: stages must follow each other and cover the graph; this one starts at "
                f"{graph.nodes[first].name} where {graph.nodes[min(expected, len(graph.nodes) - 1)].name} comes next"
                if first != expected
                else f"plan: stages.{index}.nodes: the last stage must end at {graph.nodes[-1].name}"
            )
    allowed = set(cut_positions(graph))
    for index, cut in enumerate(cuts, start=1):
        if cut not in allowed:
            raise PolylaneError(
                f"plan: stages.{index}.nodes: the graph cannot be cut before {graph.nodes[cut].name}: it shares memory "
                "that is written in place, or reads a value whose size depends on data"
            )
    partition = Partition(graph, cuts)
    check_pins([stage.placements for stage in plan.stages], partition)
    return partition


def _position(plan: Plan, nodes: tuple[Node, ...], index: int) -> tuple[int, int]:
    first = _find(nodes, plan.stages[index].nodes[0], index)
    last = _find(nodes, plan.stages[index].nodes[1], index)
    return first[0], last[-1]


def _find(nodes: tuple[Node, ...], name: str, index: int) -> list[int]:
    exact = [i for i, node in enumerate(nodes) if node.name == name]
    inside = [i for i, node in enumerate(nodes) if node.module == name or node.module.startswith(f"{name}.")]
    if not exact and not inside:
        raise PolylaneError(f"plan: stages.{index}.nodes: the model has no node and no module {name!r}")
    return exact or inside


def _difference(plan: Plan, graph: Graph, own: Fingerprint) -> str:
    known = {node.name for node in graph.nodes} | {node.module for node in graph.nodes}
    missing = [name for stage in plan.stages for name in stage.nodes if name not in known]
    if missing:
        return f"it names {missing[0]!r}, which this model does not have"
    if plan.graph.parameters != own.parameters:
        return f"it has {plan.graph.parameters} parameter tensors, this model {own.parameters}"
    if plan.graph.nodes != own.nodes:
        return f"it has {plan.graph.nodes} nodes, this model {own.nodes}"
    return f"the shapes or the wiring differ (fingerprint {plan.graph.id}, this model's is {own.id})"


def summary(plan: Plan) -> dict[str, Any]:
    """A plan as plain data for reports."""
    return {"workers": plan.workers, "spec": plan.spec, **plan.model_dump(mode="json")}
