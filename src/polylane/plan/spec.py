"""Spec: a plan in one line, before the graph is known: ``data=2,pipeline=2,microbatches=8``, ``[data=2 | 1],...``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from polylane.errors import PolylaneError
from polylane.plan import sync as syncs
from polylane.plan.options import (
    MAX_COUNT,
    ROUND_ROBIN,
    SPLIT,
    PlanKey,
    PlanOptions,
    explain_shares,
    keys_of,
    parse_count,
    shorten,
)
from polylane.schedule.schedules import DEFAULT_CHUNKS, assign_stages
from polylane.settings import split_pairs

# Written in place of a plan, it asks for the best one that the planner finds.
AUTO = "auto"

DEGREES = ("data", "pipeline", "sequence", "tensor")


class Degrees(NamedTuple):
    """The mesh of one stage: the number of ranks along each axis.

    Attributes:
        data: number of replicas, each on its own samples.
        sequence: ranks that shard activations along the sequence.
        tensor: ranks that shard operators together with their parameters.
    """

    data: int = 1
    sequence: int = 1
    tensor: int = 1

    @property
    def workers(self) -> int:
        """Number of ranks in the mesh."""
        return self.data * self.sequence * self.tensor

    def __str__(self) -> str:
        return ",".join(f"{axis}={n}" for axis, n in self._asdict().items() if n > 1) or "1"


@dataclass(frozen=True)
class Spec(PlanOptions):
    """Degrees and options, before the graph is known.

    Attributes:
        data: data parallelism: replicas compute on separate samples, gradients are reduced during the backward pass
        pipeline: pipeline parallelism: each stage holds its part of the graph; values and gradients are sent directly
            to the stages that need them
        tensor: tensor parallelism: every operator of a stage is split over ranks, each with a part of the parameters
        sequence: sequence parallelism: as ``tensor``, but each rank holds all parameters and parts of the activations,
            such as of a long sequence
        chunks: stages of each worker, for ``interleaved`` (default 2) and ``zb-v`` (always 2)
        stages: the mesh of every group of workers, where they differ; the degrees above then follow from them: their
            number, and the largest degrees. Empty where all meshes are equal: then the degrees say it all.

    Raises:
        PolylaneError: degrees are given beside stages that have others, there are too many workers, or the schedule
            has no such chunks.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    chunks: Annotated[int, PlanKey(fixed_values=())] = 1
    stages: tuple[Degrees, ...] = ()

    def __post_init__(self) -> None:
        if self.stages:
            self._follow_stages()
        sizes = {axis: getattr(self, axis) for axis in DEGREES}
        degrees = [f"{axis}={shorten(n)}" for axis, n in sizes.items() if n > 1]
        check_workers(self.workers, format_degrees(self.stages) if self.stages else degrees)
        if reason := explain_shares(self.shares, [degrees.data for degrees in self.group_meshes]):
            raise PolylaneError(reason)
        # What the schedule says of one stage would not name the key that is missing.
        if self.chunks > 1 and self.pipeline == 1:
            raise PolylaneError(
                f"chunks={self.chunks} are of a pipeline's workers, and there is one stage: add pipeline=2 or more"
            )
        if self.pipeline == self.chunks == 1 and self.schedule == "zb-v":
            raise PolylaneError("schedule=zb-v folds a pipeline of two workers or more: add pipeline=2 or more")
        try:
            assign_stages(self.schedule, self.pipeline, self.chunks)
        except ValueError as error:
            raise PolylaneError(str(error)) from None

    def _follow_stages(self) -> None:
        # A degree beside meshes must be 1, the default, or the one that follows; the dataclass is frozen, so it is set
        # through object.
        max_degrees = {axis: max(getattr(mesh, axis) for mesh in self.stages) for axis in Degrees._fields}
        for axis, n in {**max_degrees, "pipeline": len(self.stages)}.items():
            degree = getattr(self, axis)
            if degree not in (1, n):
                conflict = f"{n} stages" if axis == "pipeline" else f"stages of which the most have {axis}={n}"
                raise PolylaneError(f"{axis}={degree} cannot be combined with {conflict}: give it in the stages alone")
            object.__setattr__(self, axis, n)
        # Equal meshes are the same plan as plain degrees: one form, so that equal plans compare equal.
        if len(set(self.stages)) == 1:
            object.__setattr__(self, "stages", ())

    def changed(self, **values: Any) -> Spec:
        """Return the spec with other values of some keys.

        Raises:
            PolylaneError: they do not go together.
        """
        return replace(self, **values)

    def with_chunks(self, chunks: int) -> Spec:
        """Return the spec with that many stages on every worker, 1F1B interleaved.

        Raises:
            PolylaneError: the schedule has no such chunks, or the pipeline has one stage.
        """
        schedule = "interleaved" if chunks > 1 and self.schedule == "1f1b" else self.schedule
        return replace(self, chunks=chunks, schedule=schedule)

    @property
    def group_meshes(self) -> tuple[Degrees, ...]:
        """The mesh of every group of workers."""
        return self.stages or (Degrees(self.data, self.sequence, self.tensor),) * self.pipeline

    @property
    def stage_groups(self) -> tuple[int, ...]:
        """For every stage, the number of the group of workers that has it."""
        return assign_stages(self.schedule, self.pipeline, self.chunks)

    @property
    def meshes(self) -> tuple[Degrees, ...]:
        """The mesh of every stage."""
        return tuple(self.group_meshes[group] for group in self.stage_groups)

    @property
    def resplits_batch(self) -> bool:
        """Whether stages divide a microbatch over different numbers of replicas: it is resplit between them."""
        return self.replicas == SPLIT and len({degrees.data for degrees in self.group_meshes}) > 1

    @property
    def workers(self) -> int:
        """Number of workers that train."""
        if self.stages:
            return sum(degrees.workers for degrees in self.stages)
        return self.data * self.pipeline * self.sequence * self.tensor

    @property
    def processes(self) -> int:
        """Number of processes: workers that train, and behind them those that only serve parameters."""
        return self.workers + (self.sync.server_count if self.sync.dedicated else 0)


def format_degrees(meshes: Sequence[Degrees]) -> list[str]:
    """Format degrees as words: ``data=2``, ``pipeline=1``, and ``tensor=4`` where it is more than 1.

    Stages with different meshes are one word: ``[data=2 | 1]``.
    """
    if len(set(meshes)) > 1:
        return [f"[{' | '.join(map(str, meshes))}]"]
    data, sequence, tensor = meshes[0]
    inner = {"sequence": sequence, "tensor": tensor}
    return [f"data={data}", f"pipeline={len(meshes)}", *(f"{axis}={n}" for axis, n in inner.items() if n > 1)]


def shorten_plan(line: str) -> str:
    """Return a plan's line without degrees of 1, and without the schedule of what is no pipeline: ``tensor=2``.

    It says the same plan, for people; a single worker is ``data=1``.
    """
    words = line.split(",")
    is_pipeline = any(word.startswith("pipeline=") and word != "pipeline=1" for word in words) or "[" in line
    redundant = {"data=1", "pipeline=1", *(() if is_pipeline else ("schedule=1f1b", "microbatches=1"))}
    return ",".join(word for word in words if word not in redundant) or ("data=1" if line else "")


def check_workers(workers: int, degrees: Sequence[str]) -> None:
    """Refuse more workers than any machine has, before anything is computed for each of them.

    Raises:
        PolylaneError: there are more than :data:`MAX_COUNT`; it names the degrees that they are the product of.
    """
    if workers > MAX_COUNT:
        raise PolylaneError(
            f"{' times '.join(degrees)} would be more than {MAX_COUNT:,} workers, the most that a plan can have"
        )


# The first keys of a list of those that are known, and of a plan as it is written; further ones follow. They stay where
# they are, so that lines of different versions can be compared.
_COUNTS = (*DEGREES, "microbatches", "chunks")
_LISTED = (*_COUNTS, "schedule", "replicas", "vertical_sync", "precision", "recompute", "sync")
_WRITTEN = ("replicas", "schedule", "microbatches", "chunks", "vertical_sync", "compile")

# The rows of the keys that a line may have; sync stands for several words.
_ROWS = keys_of(Spec)
KEYS: Mapping[str, PlanKey] = {
    key: _ROWS[key] for key in dict.fromkeys((*_LISTED, *_ROWS)) if _ROWS[key].in_lines or key == "sync"
}
LINE_KEYS = tuple(word for key in KEYS for word in (syncs.KEYS if key == "sync" else (key,)))


def format_options(options: PlanOptions, chunks: int) -> list[str]:
    """Format options as words of a line.

    Args:
        options: those of a plan in one line, or of a complete one.
        chunks: number of stages of every worker.
    """
    words, values = [], {**options.option_values(), "chunks": chunks}
    for key in dict.fromkeys((*_WRITTEN, *KEYS)):
        if key == "sync":
            words += options.sync.to_words()
        elif key in values and (values[key] != KEYS[key].default or KEYS[key].shown == "everywhere"):
            words.append(f"{key}={KEYS[key].format(values[key])}")
    return words


def default_microbatches(plan: PlanOptions, batch: int) -> int:
    """Return the plan's microbatches; default: four for every stage (GPipe, section 2.3), if there are samples.

    One under ``pipedream``, which fills the pipeline with the batches of further steps. Replicas that compute whole
    microbatches in turn need as many of them each.
    """
    if plan.microbatches is not None:
        return plan.microbatches
    assert isinstance(plan, Spec)  # a complete plan has a number of them
    limit = 1 if plan.pipeline == 1 or plan.schedule == "pipedream" else 4 * plan.pipeline
    count = max(1, min(limit, batch // plan.data))
    return plan.data * count if plan.replicas == ROUND_ROBIN else count


def parse(text: str) -> Spec:
    """Read a one-line plan.

    Args:
        text: the plan, such as ``data=2,pipeline=2``.

    Returns:
        The plan's degrees and options; the graph of a model makes a complete plan of it.

    Raises:
        PolylaneError: naming the key at fault and what it may be.

    Examples:
        >>> from polylane.plan import spec
        >>> plan = spec.parse("data=2,pipeline=2,microbatches=8")
        >>> plan.workers, plan.schedule
        (4, '1f1b')
        >>> spec.parse("data=2,pipelines=2")
        Traceback (most recent call last):
        polylane.errors.PolylaneError: plan 'data=2,pipelines=2': unknown key 'pipelines', ...did you mean pipeline?
    """
    try:
        return _parse_line(text)
    except PolylaneError as error:
        raise PolylaneError(f"plan {shorten(text)!r}: {error}") from None


def _parse_line(text: str) -> Spec:
    opened = text.strip().startswith("[")
    mesh_text, closed, remainder = text.strip()[1:].partition("]") if opened else ("", "", text)
    if opened and (not closed or remainder.strip()[:1] not in ("", ",")):
        raise PolylaneError("meshes of stages are written [data=2 | tensor=2 | 1], and then a comma and the rest")
    options = split_pairs(_pieces(remainder), LINE_KEYS, "data=2,pipeline=2")
    if degree_key := next((key for key in options if opened and key in DEGREES), None):
        raise PolylaneError(f"{degree_key} cannot be combined with meshes of stages: give it inside the brackets")
    if not options and not opened:
        raise PolylaneError("nothing is said: give degrees, as in data=2,pipeline=2, or data=1 for one worker")
    values = parse_words(options)
    stages = [_parse_mesh(stage, number) for number, stage in enumerate(mesh_text.split("|"))] if opened else []
    # Chunks without a schedule are those of 1F1B, interleaved; a schedule that has chunks has them unasked.
    schedule = values.setdefault("schedule", "interleaved" if values.get("chunks", 1) > 1 else Spec.schedule)
    pipeline = len(stages) or values.get("pipeline", 1)
    values.setdefault("chunks", DEFAULT_CHUNKS.get(schedule, 1) if pipeline > 1 else 1)
    return Spec(**values, stages=tuple(stages))


def parse_words(texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse the words of a line.

    Args:
        texts: text of the value, by key.

    Returns:
        Values by field of :class:`Spec`; ``sync`` is always there.

    Raises:
        PolylaneError: a value is not one that its key takes.
    """
    values = {key: row.parse(key, texts[key]) for key, row in KEYS.items() if key in texts}
    return {**values, "sync": syncs.parse_sync({key: texts[key] for key in syncs.KEYS if key in texts})}


def says_schedule(text: str) -> bool:
    """Return whether a plan in one line names its schedule, the default one included."""
    return any(piece.partition("=")[0].strip() == "schedule" for piece in text.rpartition("]")[2].split(","))


def _parse_mesh(text: str, stage: int) -> Degrees:
    """Parse the mesh of one stage: "data=2,tensor=2", or "1" for one worker."""
    if not text.strip():
        raise PolylaneError(f"stage {stage} has no mesh: write 1 for one worker")
    try:
        degrees = split_pairs(_pieces(text), Degrees._fields, "data=2") if text.strip() != "1" else {}
    except PolylaneError as error:
        raise PolylaneError(f"stage {stage}: {error}; a stage that is one worker is 1") from None
    return Degrees(**{key: parse_count(key, value) for key, value in degrees.items()})


def _pieces(text: str) -> list[str]:
    """Split at commas; empty pieces are ignored."""
    return [piece for piece in text.split(",") if piece.strip()]
