"""Plan: stages, devices, schedule and synchronization as a YAML file that a person can read, edit and commit."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph, Node
from polylane.graph.partition import Partition, cut_positions
from polylane.plan import reading
from polylane.plan.pins import check_axes, check_pins, read_pattern
from polylane.plan.spec import Spec, check_workers

# What counts something; true is no number here, nor is "2".
_Count = Annotated[int, pydantic.Field(strict=True, gt=0)]

# The axes of a stage's mesh, the outermost first: its devices are listed in this order.
_MESH = ("data", "sequence", "tensor")
_OPERATOR_AXES = ("sequence", "tensor")


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class Fingerprint(_Strict):
    """Which graph a plan is for, with enough of it to say what differs from another."""

    id: str
    nodes: pydantic.StrictInt
    parameters: pydantic.StrictInt


class Stage(_Strict):
    """Some of the graph on some of the devices.

    ``nodes`` are the first and the last node, by the user's module path ("layer2.3": all of that module) or by a node's
    own name ("layer2.3.conv1/conv2d"). ``devices`` are ranks: the mesh of data x sequence x tensor in row-major order.
    ``placements`` fixes how a parameter, or what a node gives, lies along an axis ("replicate", "shard(1)", "partial");
    what it does not name is chosen.
    """

    nodes: tuple[str, str]
    devices: tuple[pydantic.StrictInt, ...]
    mesh: dict[Literal["data", "sequence", "tensor"], _Count] = {"data": 1}
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
    """A way to split the training of one graph.

    ``graph`` says which one; a plan that a person writes may leave it out. Names of nodes and parameters that the model
    does not have are refused either way.
    """

    polylane: Literal[1] = 1
    graph: Fingerprint | None = None
    stages: tuple[Stage, ...]
    schedule: Literal["naive", "afab", "1f1b"] = "1f1b"
    microbatches: _Count = 1
    sync: Sync = Sync()
    precision: Literal["float32", "bfloat16"] = "float32"
    _file: str = pydantic.PrivateAttr("")

    def __eq__(self, other: object) -> bool:
        """Whether two plans say the same, wherever they were read."""
        return isinstance(other, Plan) and self.model_dump() == other.model_dump()

    @property
    def title(self) -> str:
        """What errors call it: "plan run/plan.yaml", or "plan" for one that is in no file."""
        return f"plan {self._file}" if self._file else "plan"

    @property
    def data(self) -> int:
        """Replicas of every stage."""
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

    def degree(self, axis: str) -> int:
        """How many ranks there are along an axis of the mesh ("data", "sequence", "tensor"), the same on all stages."""
        return self.stages[0].degree(axis)

    def place(self, rank: int) -> tuple[int, int]:
        """Stage and replica of a rank."""
        stage, at = self._where(rank)
        return stage, at["data"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's index on each of :attr:`axes`."""
        _, at = self._where(rank)
        return {axis: at[axis] for axis in self.axes}

    def rank_at(self, stage: int, replica: int, coordinates: Mapping[str, int]) -> int:
        """The rank of a replica of a stage with an index on each of :attr:`axes`."""
        position = replica
        for axis in _OPERATOR_AXES:
            position = position * self.degree(axis) + (coordinates[axis] if self.degree(axis) > 1 else 0)
        return self.stages[stage].devices[position]

    def group(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """The ranks of the same stage that differ from ``rank`` only along these axes of the mesh, ascending."""
        stage, at = self._where(rank)
        ways = [range(self.degree(axis)) if axis in axes else (at[axis],) for axis in _MESH]
        every = (dict(zip(_MESH, indices, strict=True)) for indices in itertools.product(*ways))
        return tuple(sorted(self.rank_at(stage, each["data"], each) for each in every))

    def along(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks of the same stage that differ from ``rank`` only on one axis of the mesh, by their index on it."""
        stage, here = self._where(rank)
        every = ({**here, axis: index} for index in range(self.degree(axis)))
        return tuple(self.rank_at(stage, at["data"], at) for at in every)

    def column(self, rank: int) -> tuple[int, ...]:
        """The ranks of the same replica with the same coordinates, by stage: a pipeline."""
        _, replica = self.place(rank)
        coordinates = self.coordinates(rank)
        return tuple(self.rank_at(stage, replica, coordinates) for stage in range(self.pipeline))

    def pins(self, axis: str) -> dict[str, str]:
        """The placements that the stages ask for on one axis, by the name of a parameter or node."""
        return {
            name: pattern
            for stage in self.stages
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
                    position, at[axis] = divmod(position, self.degree(axis))
                return number, at
        raise PolylaneError(f"rank {rank} is on none of the plan's stages")

    @property
    def spec(self) -> str:
        """The plan in one line; the stages' bounds and their placements are left out."""
        degrees = [f"data={self.data}", f"pipeline={self.pipeline}", *(f"{a}={self.degree(a)}" for a in self.axes)]
        line = ",".join([*degrees, f"schedule={self.schedule}", f"microbatches={self.microbatches}"])
        return line if self.precision == "float32" else f"{line},precision={self.precision}"


def fingerprint(graph: Graph) -> Fingerprint:
    """What a plan for ``graph`` carries of it."""
    return Fingerprint(id=graph.fingerprint, nodes=len(graph.nodes), parameters=len(graph.parameters))


def from_partition(partition: Partition, spec: Spec, microbatches: int) -> Plan:
    """The plan that puts each stage of ``partition`` on a mesh of data x sequence x tensor ranks.

    Replicas are outermost, then stages, and ranks that split an operator are neighbours: they talk the most, and a
    host is filled with them first.
    """
    ends = [0, *partition.cuts, len(partition.graph.nodes)]
    nodes = partition.graph.nodes
    mesh = {"data": spec.data, "sequence": spec.sequence, "tensor": spec.tensor}
    inner = spec.sequence * spec.tensor
    stages = tuple(
        Stage(
            nodes=(nodes[ends[s]].name, nodes[ends[s + 1] - 1].name),
            devices=tuple(
                (replica * spec.pipeline + s) * inner + index for replica in range(spec.data) for index in range(inner)
            ),
            mesh={axis: n for axis, n in mesh.items() if n > 1 or axis == "data"},  # type: ignore[misc]
        )
        for s in range(spec.pipeline)
    )
    return Plan(
        graph=fingerprint(partition.graph),
        stages=stages,
        schedule=spec.schedule,  # type: ignore[arg-type]
        microbatches=microbatches,
        precision=spec.precision,  # type: ignore[arg-type]
    )


def default_microbatches(spec: Spec, batch: int) -> int:
    """Four for every stage, as GPipe advises (Huang et al., section 2.3), as far as the batch has samples for them."""
    if spec.microbatches is not None:
        return spec.microbatches
    return 1 if spec.pipeline == 1 else max(1, min(4 * spec.pipeline, batch // spec.data))


def dump(plan: Plan) -> str:
    """The plan as YAML."""
    data = plan.model_dump(mode="json")
    if plan.graph is None:
        del data["graph"]
    for stage in data["stages"]:
        if not stage["placements"]:
            del stage["placements"]
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)


def load(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PolylaneError: the file cannot be read, or a key is missing, unknown or wrong; one sentence that names it.
    """
    data = reading.read(path)
    try:
        plan = Plan.model_validate(data)
    except pydantic.ValidationError as error:
        # Where a key is missing, one that nobody knows is mostly why.
        first = min(error.errors(), key=lambda each: each["type"] == "missing")
        if first["loc"][0] == "polylane":
            raise PolylaneError(
                f"plan {path}: polylane: {first['input']!r} is a form that this version cannot read"
            ) from error
        raise PolylaneError(f"plan {path}: {reading.sentence(first, _keys)}") from error
    plan._file = str(path)
    _check_meshes(plan)
    _check_devices(plan)
    return plan


def _keys(place: Sequence[int | str]) -> list[str]:
    """The keys of a mapping in a plan file."""
    models: dict[str, type[_Strict]] = {"graph": Fingerprint, "stages": Stage, "sync": Sync}
    return list((models[str(place[0])] if place else Plan).model_fields)


def _check_meshes(plan: Plan) -> None:
    if not plan.stages:
        raise PolylaneError(f"{plan.title}: stages: there must be at least one")
    for index, stage in enumerate(plan.stages):
        if len(stage.devices) != math.prod(stage.mesh.values()):
            mesh = ", ".join(f"{axis}={stage.degree(axis)}" for axis in _MESH if axis in stage.mesh) or "data=1"
            raise PolylaneError(f"{plan.title}: stages.{index}: {len(stage.devices)} devices for a mesh of {mesh}")
        for axis in _MESH:
            if stage.degree(axis) != plan.degree(axis):
                raise PolylaneError(
                    f"{plan.title}: stages.{index}.mesh: {axis}={stage.degree(axis)} beside "
                    f"{axis}={plan.degree(axis)} on stage 0: all stages must have the same degrees"
                )
    check_workers(plan.workers, {axis: plan.degree(axis) for axis in _MESH} | {"pipeline": plan.pipeline})
    check_axes([stage.placements for stage in plan.stages], plan.axes, plan.title)


def _check_devices(plan: Plan) -> None:
    """Every worker has one place, and none is left out."""
    seen: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        for device in stage.devices:
            if device in seen:
                where = (
                    f"stages.{index}.devices names {device} twice"
                    if seen[device] == index
                    else f"device {device} is on stages {seen[device]} and {index}"
                )
                raise PolylaneError(f"{plan.title}: {where}: every worker has one place")
            seen[device] = index
    most = len(seen) - 1
    missing = next((device for device in range(len(seen)) if device not in seen), None)
    if missing is not None:
        other = next(device for device in seen if not 0 <= device <= most)
        raise PolylaneError(
            f"{plan.title}: devices must be numbered from 0 to {most}: {other} is there, but {missing} is not"
        )


def partition_for(plan: Plan, graph: Graph) -> Partition:
    """Cut ``graph`` as ``plan`` says.

    Raises:
        PolylaneError: the plan is for another model (with the difference), or its stages do not cover the graph in
        order.
    """
    own = fingerprint(graph)
    if plan.graph is not None and plan.graph.id != own.id:
        which = plan.title if plan.title != "plan" else "the plan"
        raise PolylaneError(f"{which} is for another model: {_difference(plan, plan.graph, graph, own)}")
    cuts = _cuts(plan, graph)
    allowed = set(cut_positions(graph))
    for index, cut in enumerate(cuts, start=1):
        if cut not in allowed:
            raise PolylaneError(
                f"{plan.title}: stages.{index}.nodes: the graph cannot be cut before {graph.nodes[cut].name}: it "
                "shares memory that is written in place, or reads a value whose size depends on data"
            )
    partition = Partition(graph, cuts)
    placements = [stage.placements for stage in plan.stages]
    check_axes(placements, plan.axes, plan.title)
    check_pins(placements, partition, plan.title)
    return partition


def _cuts(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Where every stage but the first begins; the stages follow each other and cover the graph."""
    nodes, cuts, begin = graph.nodes, list[int](), 0
    for index in range(plan.pipeline):
        first, last = _position(plan, nodes, index)
        wrong = ""
        if first != begin:
            comes = f"{nodes[begin].name} comes next" if begin < len(nodes) else "no node is left"
            wrong = "stages must follow each other and cover the graph; this one starts at "
            wrong += f"{nodes[first].name}, but {comes}"
        elif last < first:
            wrong = f"{nodes[last].name} comes before {nodes[first].name}"
        elif index == plan.pipeline - 1 and last != len(nodes) - 1:
            wrong = f"the last stage must end at {nodes[-1].name}"
        if wrong:
            raise PolylaneError(f"{plan.title}: stages.{index}.nodes: {wrong}")
        cuts, begin = [*cuts, first], last + 1
    return tuple(cuts[1:])


def completed(plan: Plan, graph: Graph) -> Plan:
    """The plan with what it carries of its graph: whoever writes it down says what it is for."""
    return plan if plan.graph is not None else plan.model_copy(update={"graph": fingerprint(graph)})


def _position(plan: Plan, nodes: tuple[Node, ...], index: int) -> tuple[int, int]:
    first, last = (_find(plan, nodes, name, index) for name in plan.stages[index].nodes)
    return first[0], last[-1]


def _find(plan: Plan, nodes: tuple[Node, ...], name: str, index: int) -> list[int]:
    exact = [i for i, node in enumerate(nodes) if node.name == name]
    inside = [i for i, node in enumerate(nodes) if node.module == name or node.module.startswith(f"{name}.")]
    if not exact and not inside:
        close = difflib.get_close_matches(name, [*(n.name for n in nodes), *(n.module for n in nodes)], 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise PolylaneError(f"{plan.title}: stages.{index}.nodes: the model has no node and no module {name!r}{hint}")
    return exact or inside


def _difference(plan: Plan, said: Fingerprint, graph: Graph, own: Fingerprint) -> str:
    known = {node.name for node in graph.nodes} | {node.module for node in graph.nodes}
    missing = [name for stage in plan.stages for name in stage.nodes if name not in known]
    if missing:
        return f"it names {missing[0]!r}, which this model does not have"
    if said.parameters != own.parameters:
        return f"it has {said.parameters} parameter tensors, this model {own.parameters}"
    if said.nodes != own.nodes:
        return f"it has {said.nodes} nodes, this model {own.nodes}"
    return f"the shapes or the wiring differ (fingerprint {said.id}, this model's is {own.id})"


def summary(plan: Plan) -> dict[str, Any]:
    """A plan as plain data for reports."""
    return {"workers": plan.workers, "spec": plan.spec, **plan.model_dump(mode="json")}
