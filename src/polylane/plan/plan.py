"""Plan: a complete parallelization strategy (stages, meshes, schedule, sync) as a YAML file to read and edit."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pydantic
import yaml
from pydantic_core import PydanticCustomError

from polylane.errors import PolylaneError
from polylane.plan.checks import MESH, check
from polylane.plan.pinned_placements import read_pattern
from polylane.plan.spec import Degrees, Spec, format_degrees
from polylane.plan.straggler import Slowness, straggler_words
from polylane.plan.sync import SUM, SyncOptions
from polylane.yaml_file import Count, FileForm, StrictMapping, error_sentence, first_error, read

_OPERATOR_AXES = ("sequence", "tensor")


class Fingerprint(StrictMapping):
    """Which graph a plan is for, with enough of it to say what differs from another graph.

    Attributes:
        id: hash of the graph's nodes, shapes and edges.
        nodes: number of nodes of the graph.
        parameters: number of parameter tensors of the graph.
    """

    id: str
    nodes: pydantic.StrictInt
    parameters: pydantic.StrictInt


def _in_pairs(nodes: tuple[str, ...]) -> tuple[str, ...]:
    if not nodes or len(nodes) % 2:
        wanted = "there must be two names, the first node or module and the last (of every piece), not {n}"
        raise PydanticCustomError("pairs", wanted, {"n": len(nodes)})
    return nodes


class Stage(StrictMapping):
    """One pipeline stage: a part of the graph on a mesh of devices, which may have other stages as well (chunks).

    Attributes:
        nodes: the first and the last node, by the user's module path ("layer2.3": all of that module) or by a node's
            own name ("layer2.3.conv1/conv2d"); a stage of several pieces names the first and the last of each.
        devices: ranks of the mesh of data x sequence x tensor, in row-major order.
        mesh: number of ranks along each axis; 1 for an axis that is left out.
        placements: by name of a parameter or node, its placement along an axis ("replicate", "shard(1)", "partial");
            placements of all other tensors are chosen.
    """

    nodes: Annotated[tuple[str, ...], pydantic.AfterValidator(_in_pairs)]
    devices: tuple[pydantic.StrictInt, ...]
    mesh: dict[Literal["data", "sequence", "tensor"], Count] = pydantic.Field(default={"data": 1})
    placements: dict[
        str, dict[Literal["sequence", "tensor"], Annotated[str, pydantic.BeforeValidator(read_pattern)]]
    ] = pydantic.Field(default={})

    @property
    def pieces(self) -> tuple[tuple[str, str], ...]:
        """The first and the last node of each piece."""
        return tuple(zip(self.nodes[::2], self.nodes[1::2], strict=True))

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis of the mesh."""
        return next((degree for name, degree in self.mesh.items() if name == axis), 1)


class _StageIndex(NamedTuple):
    """Where ranks and stages are.

    Attributes:
        stages: the stages that it was computed for.
        places: by rank, its first stage and its position among the devices of that stage.
        first_chunk: for every stage, the first stage with the same devices.
        chunks: by first stage, all stages with the same devices, ascending.
    """

    stages: tuple[Stage, ...]
    places: dict[int, tuple[int, int]]
    first_chunk: tuple[int, ...]
    chunks: dict[int, tuple[int, ...]]


def _index_stages(stages: tuple[Stage, ...]) -> _StageIndex:
    places, first_chunk, chunks = dict[int, tuple[int, int]](), list[int](), dict[int, tuple[int, ...]]()
    for number, stage in enumerate(stages):
        first = places[stage.devices[0]][0] if stage.devices and stage.devices[0] in places else number
        if first == number:
            places |= {rank: (number, position) for position, rank in enumerate(stage.devices)}
        first_chunk.append(first)
        chunks[first] = (*chunks.get(first, ()), number)
    return _StageIndex(stages, places, tuple(first_chunk), chunks)


class Plan(StrictMapping):
    """How the training of one graph is parallelized; refused with a PolylaneError where it contradicts itself.

    Attributes:
        polylane: version of the file format.
        graph: fingerprint of the graph that it is for; a plan written by hand may leave it out. Names of nodes and
            parameters that the model does not have are refused either way.
        stages: the pipeline stages, in the order of their numbers.
        schedule: name of a pipeline schedule (:data:`polylane.schedule.schedules.NAMES`).
        microbatches: number of microbatches of a step.
        sync: how replicas synchronize gradients or weights.
        precision: "float32" (the model's own dtypes), or "bfloat16" for autocast.
        slow: by rank, how it is made a straggler, to see the effect on the others.
        per_sample: modules that run the user's own Python and, by the user's word, treat each sample by itself; "model"
            is all of it.
    """

    polylane: Literal[1] = 1
    graph: Fingerprint | None = None
    stages: tuple[Stage, ...]
    schedule: Literal["naive", "afab", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"] = "1f1b"
    microbatches: Count = 1
    sync: SyncOptions = SUM
    precision: Literal["float32", "bfloat16"] = "float32"
    slow: Slowness = pydantic.Field(default={})
    per_sample: tuple[str, ...] = ()
    _file: str = pydantic.PrivateAttr("")
    # Computed once for the stages: plans may have a million ranks.
    _found: _StageIndex | None = pydantic.PrivateAttr(None)

    @pydantic.model_validator(mode="after")
    def _checked(self, info: pydantic.ValidationInfo) -> Plan:
        self._file = (info.context or {}).get("file", "")
        check(self)
        return self

    def __eq__(self, other: object) -> bool:
        # Where two plans were read from does not matter.
        return isinstance(other, Plan) and self.model_dump() == other.model_dump()

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
        return sum(len(self.stages[first].devices) for first in self.first_chunks)

    @property
    def first_chunks(self) -> tuple[int, ...]:
        """The first stage of every group of workers, ascending; without chunks these are all stages."""
        return tuple(stage for stage in range(self.pipeline) if self.first_chunk(stage) == stage)

    @property
    def stage_groups(self) -> tuple[int, ...]:
        """For every stage, the number of the group of workers that has it; groups are in the order of first stages."""
        numbers = {first: number for number, first in enumerate(self.first_chunks)}
        return tuple(numbers[self.first_chunk(stage)] for stage in range(self.pipeline))

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
        return tuple(axis for axis in _OPERATOR_AXES if self.degree(axis) > 1)

    def axes_of(self, stage: int) -> tuple[str, ...]:
        """Return the axes along which the operators of one stage are sharded; see :attr:`axes`."""
        return tuple(axis for axis in _OPERATOR_AXES if self.degree(axis, stage) > 1)

    def degree(self, axis: str, stage: int | None = None) -> int:
        """Return the number of ranks along an axis ("data", "sequence", "tensor") of a stage; None: of the largest."""
        if stage is not None:
            return self.stages[stage].degree(axis)
        return max((each.degree(axis) for each in self.stages), default=1)

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
    def resplits_batch(self) -> bool:
        """Whether stages have different numbers of replicas, so that batches are resplit between them."""
        return len({degrees.data for degrees in self.meshes}) > 1

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
        for axis in _OPERATOR_AXES:
            degree = self.degree(axis, stage)
            position = position * degree + (coordinates[axis] if degree > 1 else 0)
        return self.stages[stage].devices[position]

    def group(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Return the process group of a rank along axes: ranks of its stage that differ only along these, ascending."""
        stage, at = self._stage_and_indices(rank)
        ways = [range(self.degree(axis, stage)) if axis in axes else (at[axis],) for axis in MESH]
        every = (dict(zip(MESH, indices, strict=True)) for indices in itertools.product(*ways))
        return tuple(sorted(self.rank_at(stage, each["data"], each) for each in every))

    def ranks_along(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks of the same stage that differ from ``rank`` only on one axis, by their index on it."""
        stage, here = self._stage_and_indices(rank)
        every = ({**here, axis: index} for index in range(self.degree(axis, stage)))
        return tuple(self.rank_at(stage, at["data"], at) for at in every)

    def peers(self, rank: int, stage: int) -> tuple[int, ...]:
        """Return the ranks of another stage with which this one may exchange values.

        On a stage with the same mesh it is the counterpart alone; with as many replicas, all ranks of the same replica;
        else all ranks of the stage.
        """
        own, (_, replica) = self._stage_and_indices(rank)[0], self.stage_and_replica(rank)
        devices = self.stages[stage].devices
        if self.have_same_mesh(own, stage):
            return (devices[self._index.places[rank][1]],)
        if self.degree("data", own) != self.degree("data", stage):
            return devices
        # Data is the outermost axis of the mesh, so a replica's ranks are consecutive in the list of devices.
        size = len(devices) // self.degree("data", stage)
        return devices[replica * size : (replica + 1) * size]

    def pins(self, axis: str, stages: Collection[int] | None = None) -> dict[str, str]:
        """Return the placements that stages (default: all) pin on one axis, by name of a parameter or node."""
        return {
            name: pattern
            for stage in (self.stages if stages is None else [self.stages[s] for s in stages])
            for name, on_axes in stage.placements.items()
            for own, pattern in on_axes.items()
            if own == axis
        }

    def _stage_and_indices(self, rank: int) -> tuple[int, dict[str, int]]:
        """Return the stage of a rank, and its index along each axis of the mesh."""
        if rank not in self._index.places:
            raise PolylaneError(f"rank {rank} is on none of the plan's stages")
        (number, position), at = self._index.places[rank], dict[str, int]()
        for axis in reversed(MESH):
            position, at[axis] = divmod(position, self.degree(axis, number))
        return number, at

    @property
    def _index(self) -> _StageIndex:
        # A copy of the plan with other stages takes this table along: compare whose it is.
        if self._found is None or self._found.stages is not self.stages:
            self._found = _index_stages(self.stages)
        return self._found

    @property
    def spec(self) -> str:
        """The plan in one line, as :func:`.spec.parse` reads it; bounds and placements of the stages are left out."""
        words = [*format_degrees(self.group_meshes), f"schedule={self.schedule}", f"microbatches={self.microbatches}"]
        words += [f"chunks={self.most_chunks}"] if self.most_chunks > 1 else []
        words += [] if self.precision == "float32" else [f"precision={self.precision}"]
        words += [*self.sync.to_words(), *straggler_words(self.slow)]
        words += [f"per_sample={'+'.join(self.per_sample)}"] if self.per_sample else []
        return ",".join(words)


def default_microbatches(spec: Spec, batch: int) -> int:
    """Return the spec's microbatches; default: four for every stage (GPipe, section 2.3), if there are samples."""
    if spec.microbatches is not None:
        return spec.microbatches
    return 1 if spec.pipeline == 1 else max(1, min(4 * spec.pipeline, batch // spec.data))


def dump(plan: Plan) -> str:
    """Format a plan as YAML."""
    # Keys at their defaults are left out where most plans have no use for them; sync always shows its kind.
    data = plan.model_dump(mode="json", exclude={"slow"} | ({"graph"} if plan.graph is None else set()))
    if not plan.per_sample:
        del data["per_sample"]
    if plan.slow:
        data["slow"] = {rank: slow.model_dump() for rank, slow in plan.slow.items()}
    for stage in data["stages"]:
        if not stage["placements"]:
            del stage["placements"]
    said = plan.sync.model_dump(mode="json", exclude_defaults=True)
    data["sync"] = {"kind": plan.sync.kind, **({} if plan.sync.has_servers else {"every": plan.sync.every}), **said}
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)


def load(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PolylaneError: the file cannot be read, or a key is missing, unknown or wrong; one sentence that names it.
    """
    data = read(path, "plan")
    try:
        return Plan.model_validate(data, context={"file": str(path)})
    except pydantic.ValidationError as error:
        first = first_error(error)
        if first["loc"][0] == "polylane":
            raise PolylaneError(
                f"plan {path}: polylane: {first['input']!r} is a form that this version cannot read"
            ) from error
        raise PolylaneError(f"plan {path}: {error_sentence(first, _FORM, data)}") from error


def _keys(place: Sequence[int | str]) -> list[str]:
    """Return the keys that a mapping at a place of a plan file may have, for suggestions in errors."""
    models: dict[str, type[StrictMapping]] = {"graph": Fingerprint, "stages": Stage, "sync": SyncOptions}
    return list((models[str(place[0])] if place else Plan).model_fields)


_FORM = FileForm("a plan", _keys)
