"""Spec: a plan in one line, before the graph is known: ``data=2,pipeline=2,microbatches=8``, ``[data=2 | 1],...``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from polylane.errors import PolylaneError
from polylane.plan import straggler as stragglers
from polylane.plan import sync as syncs
from polylane.plan.recompute import NONE, RecomputeRule, parse_recompute
from polylane.plan.straggler import Straggler
from polylane.plan.sync import SUM, SyncOptions
from polylane.schedule.schedules import DEFAULT_CHUNKS, RUNNABLE, assign_stages
from polylane.settings import split_pairs

# Written in place of a plan, it asks for the best one that the planner finds.
AUTO = "auto"

PRECISIONS = ("float32", "bfloat16")
# What the replicas of a stage do with a microbatch: compute a part of each, or whole ones in turn.
SPLIT, TURNS = REPLICAS = ("split", "round-robin")
DEGREES = ("data", "pipeline", "sequence", "tensor")
_COUNTS = (*DEGREES, "microbatches", "chunks")
_KEYS = (
    *_COUNTS,
    "schedule",
    "replicas",
    "vertical_sync",
    "precision",
    "recompute",
    *syncs.KEYS,
    "slow",
    "per_sample",
    "compile",
)

# Most workers that a plan may have, and most microbatches: ten times the largest machines.
MOST = 2**20


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
class Spec:
    """Degrees and schedule, before the graph is known.

    Attributes:
        data: number of replicas of every stage.
        pipeline: number of groups of workers in the pipeline, at least 1; each has ``chunks`` stages.
        schedule: a name of :data:`polylane.schedule.schedules.RUNNABLE`.
        microbatches: number of microbatches of a step; None leaves the choice to the planner.
        precision: "float32" (the model's own dtypes), or "bfloat16" for autocast.
        tensor: ranks that shard the operators of a stage, so that each holds a shard of the parameters.
        sequence: ranks that shard them along the sequence, so that each holds a shard of the activations, and all
            parameters.
        stages: the mesh of every group of workers, where they differ; the degrees above then follow from them: their
            number, and the largest degrees. Empty where all meshes are equal: then the degrees say it all.
        sync: how replicas synchronize gradients or weights.
        slow: pairs (rank, straggler) of ranks that are slowed down.
        per_sample: paths of modules that run the user's own Python and, by the user's word, treat each sample by
            itself; "model" for all of it.
        recompute: what backward passes recompute instead of saving it, as in a :class:`polylane.plan.plan.Plan`.
        chunks: number of stages of every worker.
        vertical_sync: whether under ``pipedream`` all stages compute a batch on the same version of the weights.
        replicas: "split", each replica of a stage computes a part of every microbatch; or "round-robin", they compute
            whole microbatches in turn.
        compile: whether the operators of every stage are compiled by torch.compile's inductor.

    Raises:
        PolylaneError: degrees are given beside stages that have others, there are too many workers, or the schedule
            has no such chunks.
    """

    data: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    microbatches: int | None = None
    precision: str = "float32"
    tensor: int = 1
    sequence: int = 1
    stages: tuple[Degrees, ...] = ()
    sync: SyncOptions = SUM
    slow: tuple[tuple[int, Straggler], ...] = ()
    per_sample: tuple[str, ...] = ()
    recompute: RecomputeRule = NONE
    chunks: int = 1
    vertical_sync: bool = False
    replicas: str = SPLIT
    compile: bool = False

    def __post_init__(self) -> None:
        if self.stages:
            self._follow_stages()
        sizes = {axis: getattr(self, axis) for axis in DEGREES}
        degrees = [f"{axis}={_shorten(n)}" for axis, n in sizes.items() if n > 1]
        check_workers(self.workers, format_degrees(self.stages) if self.stages else degrees)
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


def check_workers(workers: int, degrees: Sequence[str]) -> None:
    """Refuse more workers than any machine has, before anything is computed for each of them.

    Raises:
        PolylaneError: there are more than :data:`MOST`; it names the degrees that they are the product of.
    """
    if workers > MOST:
        raise PolylaneError(
            f"{' times '.join(degrees)} would be more than {MOST:,} workers, the most that a plan can have"
        )


def default_microbatches(spec: Spec, batch: int) -> int:
    """Return the spec's microbatches; default: four for every stage (GPipe, section 2.3), if there are samples.

    One under ``pipedream``, which fills the pipeline with the batches of further steps. Replicas that compute whole
    microbatches in turn need as many of them each.
    """
    if spec.microbatches is not None:
        return spec.microbatches
    if spec.replicas == TURNS:
        turns = 1 if spec.pipeline == 1 or spec.schedule == "pipedream" else 4 * spec.pipeline
        return spec.data * max(1, min(turns, batch // spec.data))
    if spec.schedule == "pipedream":
        return 1
    return 1 if spec.pipeline == 1 else max(1, min(4 * spec.pipeline, batch // spec.data))


def parse(text: str) -> Spec:
    """Read a one-line plan.

    Raises:
        PolylaneError: naming the key at fault and what it may be.
    """
    try:
        return _parse_line(text)
    except PolylaneError as error:
        raise PolylaneError(f"plan {_shorten(text)!r}: {error}") from None


def _parse_line(text: str) -> Spec:
    opened = text.strip().startswith("[")
    mesh_text, closed, remainder = text.strip()[1:].partition("]") if opened else ("", "", text)
    if opened and (not closed or remainder.strip()[:1] not in ("", ",")):
        raise PolylaneError("meshes of stages are written [data=2 | tensor=2 | 1], and then a comma and the rest")
    options = split_pairs(_pieces(remainder), _KEYS, "data=2,pipeline=2")
    if degree_key := next((key for key in options if opened and key in DEGREES), None):
        raise PolylaneError(f"{degree_key} cannot be combined with meshes of stages: give it inside the brackets")
    if not options and not opened:
        raise PolylaneError("nothing is said: give degrees, as in data=2,pipeline=2, or data=1 for one worker")
    schedule, precision = options.get("schedule"), options.get("precision", "float32")
    if schedule is not None and schedule not in RUNNABLE:
        raise PolylaneError(f"schedule={_shorten(schedule)} is not known, known are {', '.join(RUNNABLE)}")
    if precision not in PRECISIONS:
        raise PolylaneError(f"precision={_shorten(precision)} is not known, known are {', '.join(PRECISIONS)}")
    replicas = options.get("replicas", SPLIT)
    if replicas not in REPLICAS:
        raise PolylaneError(f"replicas={_shorten(replicas)} is not known, known are {', '.join(REPLICAS)}")
    counts = {key: parse_count(key, options[key]) for key in _COUNTS if key in options}
    microbatches = counts.pop("microbatches", None)
    sync = syncs.parse_sync({key: options[key] for key in syncs.KEYS if key in options})
    slow = tuple(stragglers.parse_stragglers(options["slow"]).items()) if "slow" in options else ()
    per_sample = _parse_paths(options["per_sample"]) if "per_sample" in options else ()
    stages = [_parse_mesh(stage, number) for number, stage in enumerate(mesh_text.split("|"))] if opened else []
    # Chunks without a schedule are those of 1F1B, interleaved; a schedule that has chunks has them unasked.
    schedule = schedule or ("interleaved" if counts.get("chunks", 1) > 1 else "1f1b")
    pipeline = len(stages) or counts.get("pipeline", 1)
    chunks = counts.pop("chunks", DEFAULT_CHUNKS.get(schedule, 1) if pipeline > 1 else 1)
    return Spec(
        **counts,
        chunks=chunks,
        schedule=schedule,
        replicas=replicas,
        vertical_sync=parse_switch("vertical_sync", options.get("vertical_sync", "no")),
        microbatches=microbatches,
        precision=precision,
        stages=tuple(stages),
        sync=sync,
        slow=slow,
        per_sample=per_sample,
        recompute=parse_recompute(options.get("recompute", NONE)),
        compile=parse_switch("compile", options.get("compile", "no")),
    )


def says_schedule(text: str) -> bool:
    """Return whether a plan in one line names its schedule, the default one included."""
    return any(piece.partition("=")[0].strip() == "schedule" for piece in text.rpartition("]")[2].split(","))


def parse_switch(key: str, text: str) -> bool:
    """Parse yes or no.

    Raises:
        PolylaneError: the text is neither yes nor no.
    """
    if text not in ("yes", "no"):
        raise PolylaneError(f"{key}={_shorten(text)} must be yes or no")
    return text == "yes"


def _parse_paths(text: str) -> tuple[str, ...]:
    """Parse module paths, joined by +: "experts.0+experts.1"."""
    paths = tuple(path.strip() for path in text.split("+"))
    if not all(paths):
        raise PolylaneError(
            f"per_sample={_shorten(text)}: name modules, as in per_sample=experts.0+experts.1, or model"
        )
    return paths


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


def parse_count(key: str, value: str) -> int:
    """Parse the number that a key of a plan has.

    Raises:
        PolylaneError: it is no whole number of at least 1, or more than :data:`MOST`.
    """
    # The length is checked before int(), which takes quadratic time, and raises ValueError above 4300 digits.
    if not (value.isascii() and value.isdecimal()) or not value.strip("0"):
        raise PolylaneError(f"{key}={_shorten(value)} must be a whole number of at least 1")
    if len(value.lstrip("0")) > len(str(MOST)) or int(value) > MOST:
        raise PolylaneError(f"{key}={_shorten(value)} is more than {MOST:,}, the most that a plan can have")
    return int(value)


def _shorten(value: str | int, max_length: int = 80) -> str:
    """Shorten what the user gave, for a sentence."""
    text = str(value)
    return text if len(text) <= max_length else f"{text[:max_length]}…"
