"""Stage of a plan: a part of the graph on a mesh of devices; and which stages have the same devices (chunks)."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_args

import pydantic
from pydantic_core import PydanticCustomError

from polylane.errors import PolylaneError
from polylane.plan.pinned_placements import read_pattern
from polylane.plan.recompute import Recompute
from polylane.yaml_file import Count, StrictMapping

# The axes of a stage's mesh, the outermost first: its devices are listed in this order.
Axis = Literal["data", "sequence", "tensor"]
MESH: tuple[str, ...] = get_args(Axis)
# Those along which operators are sharded.
OperatorAxis = Literal["sequence", "tensor"]
OPERATOR_AXES: tuple[str, ...] = get_args(OperatorAxis)


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
        message = "there must be two names, the first node or module and the last (of every piece), not {n}"
        raise PydanticCustomError("pairs", message, {"n": len(nodes)})
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
        recompute: what the stage recomputes; default: what the plan says for all stages.
    """

    nodes: Annotated[tuple[str, ...], pydantic.AfterValidator(_in_pairs)]
    devices: tuple[pydantic.StrictInt, ...]
    mesh: dict[Axis, Count] = pydantic.Field(default={"data": 1})
    placements: dict[str, dict[OperatorAxis, Annotated[str, pydantic.BeforeValidator(read_pattern)]]] = pydantic.Field(
        default={}
    )
    recompute: Recompute | None = None

    @property
    def pieces(self) -> tuple[tuple[str, str], ...]:
        """The first and the last node of each piece."""
        return tuple(zip(self.nodes[::2], self.nodes[1::2], strict=True))

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis of the mesh."""
        for name, degree in self.mesh.items():
            if name == axis:
                return degree
        return 1


class StageIndex(NamedTuple):
    """Where ranks and stages are.

    Attributes:
        stages: the stages that it was computed for.
        places: by rank, its first stage and its position among the devices of that stage.
        meshes: for every stage, the number of ranks along every axis of its mesh.
        first_chunk: for every stage, the first stage with the same devices.
        chunks: by first stage, all stages with the same devices, ascending.
    """

    stages: tuple[Stage, ...]
    places: dict[int, tuple[int, int]]
    meshes: tuple[dict[str, int], ...]
    first_chunk: tuple[int, ...]
    chunks: dict[int, tuple[int, ...]]


def index_stages(stages: tuple[Stage, ...]) -> StageIndex:
    """Return where the ranks and the chunks of stages are."""
    # Stages share workers as a whole or not at all (check_devices), so that the first device tells whose they are.
    places, first_chunk, chunks = dict[int, tuple[int, int]](), list[int](), dict[int, tuple[int, ...]]()
    for number, stage in enumerate(stages):
        first_number = places[stage.devices[0]][0] if stage.devices and stage.devices[0] in places else number
        if first_number == number:
            places |= {rank: (number, position) for position, rank in enumerate(stage.devices)}
        first_chunk.append(first_number)
        chunks[first_number] = (*chunks.get(first_number, ()), number)
    meshes = tuple({axis: stage.degree(axis) for axis in MESH} for stage in stages)
    return StageIndex(stages, places, meshes, tuple(first_chunk), chunks)


def check_devices(stages: tuple[Stage, ...], title: str, may_share: bool) -> None:
    """Refuse ranks that are named twice, or that are not all of 0 to the number of workers.

    Args:
        stages: the stages of a plan.
        title: what errors call the plan.
        may_share: whether several stages may have the same workers.

    Raises:
        PolylaneError: a rank is named twice, or left out.
    """
    # Not by the plan's own index: the plan is being made.
    first_chunk = index_stages(stages).first_chunk
    stage_of: dict[int, int] = {}
    for index, stage in enumerate(stages):
        first_stage = stages[first_chunk[index]]
        same_mesh = all(first_stage.degree(axis) == stage.degree(axis) for axis in MESH)
        if may_share and first_stage is not stage and first_stage.devices == stage.devices and same_mesh:
            continue  # a further chunk of the same workers
        for device in stage.devices:
            if device in stage_of:
                problem = (
                    f"stages.{index}.devices names {device} twice"
                    if stage_of[device] == index
                    else f"device {device} is on stages {stage_of[device]} and {index}"
                )
                chunks = "; stages that share workers have the same devices, in the same order, and the same mesh"
                several = chunks if may_share else ""
                raise PolylaneError(f"{title}: {problem}: every worker has one place{several}")
            stage_of[device] = index
    # All different, so they are 0 to most if and only if none of these is missing.
    max_device = len(stage_of) - 1
    missing = next((device for device in range(len(stage_of)) if device not in stage_of), None)
    if missing is not None:
        outlier = next(device for device in stage_of if not 0 <= device <= max_device)
        raise PolylaneError(
            f"{title}: devices must be numbered from 0 to {max_device}: {outlier} is there, but {missing} is not"
        )
