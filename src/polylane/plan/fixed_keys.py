"""Fixed keys: what a user says of a plan that is otherwise searched: ``auto,data=2``, ``shard=parameters``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from polylane.errors import PolylaneError
from polylane.plan import spec as specs
from polylane.plan.options import ROUND_ROBIN, PlanOptions
from polylane.plan.recompute import MODES
from polylane.plan.schedule_checks import check_accumulation, check_plain_sum
from polylane.plan.spec import AUTO, DEGREES, KEYS, Degrees, Spec, parse_words
from polylane.plan.sync import KEYS as SYNC_KEYS
from polylane.plan.sync import SUM, Shard, SyncOptions
from polylane.schedule.schedules import ASYNCHRONOUS, DEFAULT_CHUNKS, FOUND, KINDS
from polylane.settings import split_pairs

# A schedule, and the stages of every worker.
ScheduleOption = tuple[str, int]

# Schedules that a search compares unasked, the plainest first: all compute the numbers of one device.
COMPARED: tuple[ScheduleOption, ...] = tuple(
    (kind.name, chunks)
    for _, kind in sorted((kind.rank, kind) for kind in KINDS.values() if kind.rank is not None)
    for chunks in kind.chunks
)


@dataclass(frozen=True)
class FixedKeys:
    """Keys of a plan that a search must keep.

    Attributes:
        counts: by key ("data", "pipeline", "sequence", "tensor", "microbatches") the number that a plan must have.
        sync: how replicas synchronize; without words, the search tries what computes the same numbers.
        sync_keys: the keys of ``sync`` that were given.
        schedule: name of the pipeline schedule; None: the search compares those that compute the same numbers.
        chunks: number of stages of every worker; None: what the schedule has, or the search finds.
        replicas: whether replicas "split" every microbatch, or compute whole ones in turn ("round-robin"); None: the
            search compares both.
        precision: of the passes; None: nothing was said.
        recompute: mode of recomputation; None: as much as is needed for memory.
        compile: whether stages are compiled; None: nothing was said, and they are not.

    Raises:
        PolylaneError: replicas in turn that do anything but sum gradients, or that have no microbatch each; fewer
            microbatches than PipeDream-2BW needs.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    sync: SyncOptions = SUM
    sync_keys: frozenset[str] = frozenset()
    schedule: str | None = None
    chunks: int | None = None
    replicas: str | None = None
    precision: str | None = None
    recompute: str | None = None
    compile: bool | None = None

    def __post_init__(self) -> None:
        # What no plan with these keys could pass is said here, before a model is captured and searched in vain.
        self.check_options()
        data, pipeline, microbatches = (self.counts.get(key) for key in ("data", "pipeline", "microbatches"))
        sharing = (data or 1) if self.replicas == ROUND_ROBIN else 1
        if self.replicas == ROUND_ROBIN:
            check_plain_sum(f"replicas={ROUND_ROBIN}", self.sync)
            if microbatches is not None and microbatches < sharing:
                raise PolylaneError(
                    f"replicas={ROUND_ROBIN}: {sharing} replicas cannot compute microbatches={microbatches} in turn"
                )
        if self.schedule == "pipedream-2bw" and pipeline is not None and microbatches is not None:
            check_accumulation(f"pipeline={pipeline}", pipeline, microbatches, -(-microbatches // sharing))

    def check_options(self, precision: str | None = None) -> None:
        """Refuse keys that exclude each other.

        Args:
            precision: of the passes, where the keys do not say it.

        Raises:
            PolylaneError: no plan can have both.
        """
        options: dict[str, Any] = {key: getattr(self, key) for key in ("sync", "compile", "precision", "schedule")}
        options["precision"] = options["precision"] or precision
        if (reason := PlanOptions(**{k: v for k, v in options.items() if v is not None}).find_conflict()) is not None:
            raise PolylaneError(f"plan: {reason}")

    @property
    def schedules(self) -> tuple[ScheduleOption, ...]:
        """The schedules that a search compares, each with its chunks; what changes the numbers only where it is said.

        Chunks without a schedule are those of any that may have so many. Where orders are to be found, they are found
        for the plans that are best under these schedules.
        """
        if self.schedule in (None, FOUND):
            if self.chunks is None:
                return COMPARED
            chunk_options = [option for option in COMPARED if option[1] == self.chunks]
            return tuple(chunk_options) if chunk_options else (("interleaved", self.chunks),)
        if self.chunks is not None:
            return ((self.schedule, self.chunks),)
        schedule_options = tuple(option for option in COMPARED if option[0] == self.schedule)
        return schedule_options or ((self.schedule, DEFAULT_CHUNKS.get(self.schedule, 1)),)

    @property
    def shardings(self) -> tuple[Shard, ...]:
        """Kinds of sharding that a search may try beside ``sync``, what shares out the least first.

        None where the user chose one, or a synchronization that shares nothing out. The numbers of a training do not
        depend on them: what changes numbers (``every``, ``wire``, ``compress``, ``staleness``) is never tried unasked.
        """
        # Asynchronous pipelines share nothing out either.
        if "shard" in self.sync_keys or self.sync != SUM or self.schedule in ASYNCHRONOUS:
            return ()
        if self.replicas == ROUND_ROBIN:
            return ()  # nor do replicas in turn
        return ("optimizer", "gradients") if self.compile else ("optimizer", "gradients", "parameters")

    @property
    def degrees(self) -> Mapping[str, int]:
        """The fixed degrees of the meshes of stages, by axis."""
        return {key: number for key, number in self.counts.items() if key not in ("pipeline", "microbatches")}

    def allows(self, meshes: Sequence[Degrees], microbatches: int, workers: int = 1) -> bool:
        """Return whether stages with these meshes have the degrees and microbatches that are fixed.

        Keys that say how replicas synchronize (servers, every, ...) ask for replicas where there are ``workers`` for
        them: a plan of one worker would have nobody to synchronize with.
        """
        if workers > 1 and not self.sync.is_plain_sum and all(mesh.data == 1 for mesh in meshes):
            return False
        # Degrees are of every stage, and so compared with all of them.
        for key, number in self.counts.items():
            if key == "microbatches":
                count = microbatches
            elif key == "pipeline":
                count = len(meshes)
            elif any(getattr(mesh, key) != number for mesh in meshes):
                return False
            else:
                continue
            if count != number:
                return False
        return True

    def with_schedule(self, schedule: str | None = None, chunks: int | None = None) -> FixedKeys:
        """Return the keys with a schedule and its chunks, where they are not None.

        Raises:
            PolylaneError: the schedule is not known, or has no such chunks.
        """
        schedule, chunks = schedule or self.schedule, chunks or self.chunks
        _check_schedule(schedule, chunks, self.counts.get("pipeline"))
        return replace(self, schedule=schedule, chunks=chunks)

    def with_sync(self, **values: Any) -> FixedKeys:
        """Return the keys with further keys of ``sync``, where they are not None.

        Raises:
            PolylaneError: a value is not one that its key takes, or contradicts another.
        """
        changes = {key: value for key, value in values.items() if value is not None}
        sync = self.sync.changed(**changes)
        return replace(self, sync=sync, sync_keys=self.sync_keys | set(changes))

    def __str__(self) -> str:
        words = [f"{key}={number}" for key, number in self.counts.items()]
        words += [f"{key}={KEYS[key].format(value)}" for key in OPTIONS if (value := getattr(self, key))]
        return ",".join([*words, *self.sync.to_words()])


NOTHING_FIXED = FixedKeys()

# Keys of a plan that a search accepts; what else a plan can say, it finds or leaves at its default.
OPTIONS = tuple(option.name for option in fields(FixedKeys) if option.name in KEYS and option.name != "sync")
_COUNTS = (*DEGREES, "microbatches")


def parse_fixed(text: str) -> FixedKeys:
    """Parse the keys that a searched plan must keep, written as in a plan of one line.

    Raises:
        PolylaneError: a key is unknown or cannot be fixed, or a value is not one that its key takes.
    """
    try:
        return _parse(text)
    except PolylaneError as error:
        # The degrees are read as a plan of one line, whose errors name it already.
        raise PolylaneError(str(error) if str(error).startswith("plan ") else f"plan {text!r}: {error}") from None


def _parse(text: str) -> FixedKeys:
    if "[" in text:
        raise PolylaneError("a search accepts data=, tensor=, ...; meshes of every stage make a plan of their own")
    pairs = split_pairs(
        [piece for piece in text.split(",") if piece.strip()], (*_COUNTS, *OPTIONS, *SYNC_KEYS), "data=2"
    )
    # A plan of one line knows how numbers are written, and which are too large together.
    line = ",".join(f"{key}={pairs[key]}" for key in _COUNTS if key in pairs)
    spec = specs.parse(line) if line else None
    counts = {key: getattr(spec, key) for key in _COUNTS if key in pairs}
    if pairs.get("recompute", MODES[0]) not in MODES:
        raise PolylaneError(
            f"recompute={pairs['recompute']}: a search accepts one of {', '.join(MODES)}, and finds budgets by itself"
        )
    values = parse_words({key: value for key, value in pairs.items() if key not in counts})
    _check_schedule(values.get("schedule"), values.get("chunks"), counts.get("pipeline"))
    return FixedKeys(counts, sync_keys=frozenset(pairs).intersection(SYNC_KEYS), **values)


def _check_schedule(schedule: str | None, chunks: int | None, pipeline: int | None) -> None:
    """Refuse a schedule and chunks that no pipeline of so many stages has, or none of any length.

    Raises:
        PolylaneError: the schedule is not known, or has no such chunks.
    """
    if schedule is not None:
        parse_words({"schedule": schedule})
    if schedule is None and chunks is None:
        return
    schedule = schedule or ("interleaved" if chunks != 1 else COMPARED[0][0])
    pipeline = pipeline or 2
    usual = DEFAULT_CHUNKS.get(schedule, 1) if pipeline > 1 else 1
    Spec(schedule=schedule, pipeline=pipeline, chunks=chunks or usual)


def parse_auto(text: object) -> FixedKeys | None:
    """Return what a plan that is to be found must keep: of ``auto`` nothing; None for any other plan.

    Raises:
        PolylaneError: what follows ``auto,`` is not what a search accepts.
    """
    if text == AUTO:
        return FixedKeys()
    if isinstance(text, str) and text.startswith(f"{AUTO},"):
        return parse_fixed(text.removeprefix(f"{AUTO},"))
    return None
