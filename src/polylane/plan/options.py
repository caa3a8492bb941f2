"""Plan options: what a plan says beside its meshes. A key of plans is one field of PlanOptions, with its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from polylane.errors import PolylaneError
from polylane.plan.recompute import MODES, NONE, Recompute, format_recompute, parse_recompute
from polylane.plan.sync import SUM, SyncOptions
from polylane.schedule.schedules import ASYNCHRONOUS, ScheduleName

Precision = Literal["float32", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

# What the replicas of a stage do with a microbatch: compute a part of each, or whole ones in turn.
Replicas = Literal["split", "round-robin"]
REPLICAS: tuple[Replicas, ...] = get_args(Replicas)
SPLIT, ROUND_ROBIN = REPLICAS

# Most workers that a plan may have, and most microbatches: ten times the largest machines.
MAX_COUNT = 2**20


def shorten(value: str | int, max_length: int = 80) -> str:
    """Shorten what the user gave, for a sentence."""
    text = str(value)
    return text if len(text) <= max_length else f"{text[:max_length]}…"


# ---- values of keys in a line ----------------------------------------------------------------------------------------


def parse_count(key: str, text: str) -> int:
    """Parse the number that a key of a plan has.

    Raises:
        PolylaneError: it is no whole number of at least 1, or more than :data:`MAX_COUNT`.
    """
    # The length is checked before int(), which takes quadratic time, and raises ValueError above 4300 digits.
    if not (text.isascii() and text.isdecimal()) or not text.strip("0"):
        commas = ": keys are separated by commas" if "=" in text else ""
        raise PolylaneError(f"{key}={shorten(text)} must be a whole number of at least 1{commas}")
    if len(text.lstrip("0")) > len(str(MAX_COUNT)) or int(text) > MAX_COUNT:
        raise PolylaneError(f"{key}={shorten(text)} is more than {MAX_COUNT:,}, the most that a plan can have")
    return int(text)


def parse_switch(key: str, text: str) -> bool:
    """Parse yes or no.

    Raises:
        PolylaneError: the text is neither yes nor no.
    """
    if text not in ("yes", "no"):
        raise PolylaneError(f"{key}={shorten(text)} must be yes or no")
    return text == "yes"


def choice_of(*names: str) -> Callable[[str, str], str]:
    """Return a parser of one of several names, which raises a PolylaneError that lists them for any other."""

    def parse_choice(key: str, text: str) -> str:
        if text not in names:
            raise PolylaneError(f"{key}={shorten(text)} is not known, known are {', '.join(names)}")
        return text

    return parse_choice


def parse_paths(key: str, text: str) -> tuple[str, ...]:
    """Parse module paths, joined by +: "experts.0+experts.1".

    Raises:
        PolylaneError: a path is empty.
    """
    paths = tuple(path.strip() for path in text.split("+"))
    if not all(paths):
        raise PolylaneError(f"{key}={shorten(text)}: name modules, as in {key}=experts.0+experts.1, or model")
    return paths


def parse_shares(key: str, text: str) -> tuple[int, ...]:
    """Parse the shares of replicas, as 2:2:1.

    Raises:
        PolylaneError: one is no whole number of at least 1.
    """
    return tuple(parse_count(key, share) for share in text.split(":"))


def explain_shares(shares: Sequence[int], replicas: Sequence[int]) -> str | None:
    """Return why a plan's shares do not fit the numbers of replicas of its stages; None: they do."""
    if not shares or (set(replicas) == {len(shares)} and min(shares) > 0):
        return None
    if min(shares) < 1:
        return f"shares: {min(shares)} must be a whole number of at least 1"
    text, degrees = ":".join(map(str, shares)), " and ".join(f"data={count}" for count in dict.fromkeys(replicas))
    return f"shares={text} is of {len(shares)} replicas, and every stage must have so many, not {degrees}"


def _parse_recompute(key: str, text: str) -> str | dict[str, str]:
    return parse_recompute(text)


# By the type of a key's value in a plan file: how its text in a line is read, and written.
_CODECS: Mapping[Any, tuple[Callable[[str, str], Any], Callable[[Any], str]]] = {
    bool: (parse_switch, lambda value: "yes" if value else "no"),
    int: (parse_count, str),
    int | None: (parse_count, str),
    tuple[str, ...]: (parse_paths, "+".join),
    tuple[int, ...]: (parse_shares, lambda value: ":".join(map(str, value))),
    get_args(Recompute)[0]: (_parse_recompute, format_recompute),
}


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanKey:
    """The row of one key: how lines, files and searches treat it.

    A field without a row has the usual one. Write a row only to change one of the first five; :func:`keys_of` fills in
    the rest from the field's type and default. What the key means is said in the docstring of the field's class, which
    docs/reference/plan-keys.md repeats word for word.

    Attributes:
        in_lines: whether lines have the key, as one word.
        shown: where a plan says the default as well: "nowhere", in "files", or in files and lines, "everywhere".
        fixed_values: values that a search for a replacement plan, as for fewer workers, must not change, because they
            change the numbers; None: every value but the default.
        applies_alone: whether it also holds where one worker computes all microbatches (``alone=True``).
        find_conflict: (options) -> why a value that is not the default cannot be combined with the others; None: it
            can.
        default: value of a plan that does not have the key.
        parse: (key, text of a line) -> value; it raises a PolylaneError.
        format: (value) -> text of a line.
    """

    in_lines: bool = True
    shown: Literal["nowhere", "files", "everywhere"] = "nowhere"
    fixed_values: Sequence[str] | None = None
    applies_alone: bool = True
    find_conflict: Callable[[PlanOptions], str | None] = lambda options: None
    default: Any = None
    parse: Callable[[str, str], Any] = lambda key, text: text
    format: Callable[[Any], str] = str


def keys_of(record: type) -> dict[str, PlanKey]:
    """Return the rows of a dataclass by key: of its fields that have one, or a value that a line can have."""
    kinds, annotations = get_type_hints(record), get_type_hints(record, include_extras=True)
    rows = dict[str, PlanKey]()
    for option in fields(record):
        kind = kinds[option.name]
        metadata = getattr(annotations[option.name], "__metadata__", ())
        row = next((value for value in metadata if isinstance(value, PlanKey)), None)
        codec = (choice_of(*get_args(kind)), str) if get_origin(kind) is Literal else _CODECS.get(kind)
        if row or codec:
            parse, write = codec or (PlanKey.parse, str)
            rows[option.name] = replace(row or PlanKey(), default=option.default, parse=parse, format=write)
    return rows


def _explain_vertical_sync(options: PlanOptions) -> str | None:
    if options.schedule == "pipedream":
        return None
    return f"vertical_sync is for schedule=pipedream, not {options.schedule}"


def _explain_float16(options: PlanOptions) -> str | None:
    if options.precision != "float16":
        return None
    words = [f"schedule={options.schedule}"] if options.schedule in ASYNCHRONOUS else []
    if options.sync.has_servers or options.sync.is_replica_local or options.sync.compress is not None:
        words += options.sync.to_words()
    if not words:
        return None
    return (
        f"precision=float16 and {','.join(words)} exclude each other, since workers leave out a step together where a "
        "gradient overflows, and the loss scale is the same for all of a step: take precision=bfloat16"
    )


def _explain_compile(options: PlanOptions) -> str | None:
    if options.sync.shard != "parameters":
        return None
    return (
        "compile and shard=parameters exclude each other, since compiled code keeps the parameters that its backward "
        "pass reads: take shard=gradients, or leave compile out"
    )


def _explain_shares(options: PlanOptions) -> str | None:
    words = [f"replicas={options.replicas}"] if options.replicas == ROUND_ROBIN else []
    if options.sync.is_replica_local or options.sync.has_servers:
        words += options.sync.to_words()
    if not words:
        return None
    return f"shares and {','.join(words)} exclude each other: shares divide microbatches whose gradients are summed"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan says beside its meshes: a part of a plan in one line, and of a complete one.

    A field, and its line below, is all that a key of plans needs to be read, written, checked, copied and compared;
    docs/reference/plan-keys.md repeats the line. A field's type is that of its value in a plan file.

    Attributes:
        schedule: ``naive``, ``afab`` (all forward, all backward: GPipe), ``1f1b`` (one forward, one backward),
            ``interleaved`` (1F1B over several stages of each worker), ``zb-h1``, ``zb-h2``, ``zb-v`` (zero bubble:
            backward passes in two halves); ``auto`` (an order that is searched for your stages' times); asynchronous:
            ``pipedream``, ``pipedream-2bw``. See [schedules](docs/explanation/schedules.md)
        vertical_sync: ``yes``: under ``pipedream`` all stages compute a batch on weights of the same age
        order: under ``auto``, the passes of every group of workers (:mod:`polylane.plan.order`); empty until found
        microbatches: parts of a batch that follow each other through the stages (by default four for each stage; one,
            with a note, where a batch must stay whole). With BatchNorm this number affects the results, and a note is
            printed
        replicas: ``split`` (each replica of a stage computes a part of every microbatch) or ``round-robin`` (replicas
            compute whole microbatches in turn, as in PipeDream; their number may differ between stages): see
            [schedules](docs/explanation/schedules.md#replicas-in-turn)
        sync: how replicas synchronize gradients or weights; in a line its keys are words of their own
        precision: ``float32`` (whatever dtype your model has), ``bfloat16`` (autocast) or ``float16`` (autocast, with a
            loss scale): see [mixed precision](docs/how-to/mixed-precision.md)
        recompute: what backward passes recompute instead of keeping it: ``none``, ``selective`` (attention), ``full``,
            a budget (``budget:200MB``), or one of these for each module: see
            [memory](docs/explanation/memory.md)
        per_sample: modules that run your own Python code and treat each sample independently, which no graph can show:
            ``per_sample=experts``, or ``model``. Every replica computes other such modules on the whole batch
        compile: ``yes``: the operators of every stage are compiled by ``torch.compile``'s inductor: see
            [GPUs](docs/explanation/gpu.md#compiled-stages)
        shares: what the replicas compute of every microbatch, in proportion: ``2:2:1:1``; by default equal parts. The
            results are the same: see [slow workers](docs/learn/load-balancing.md#slow-workers)
    """

    schedule: Annotated[ScheduleName, PlanKey(shown="everywhere", fixed_values=ASYNCHRONOUS, applies_alone=False)] = (
        "1f1b"
    )
    vertical_sync: Annotated[bool, PlanKey(applies_alone=False, find_conflict=_explain_vertical_sync)] = False
    order: Annotated[tuple[str, ...], PlanKey(in_lines=False, applies_alone=False)] = ()
    # None leaves the choice to the planner.
    microbatches: Annotated[int | None, PlanKey(shown="everywhere")] = None
    # In turn, replica r of d has the microbatches r, r + d, r + 2d, ... (PipeDream's replicated stages).
    replicas: Annotated[Replicas, PlanKey(shown="files", fixed_values=(), applies_alone=False)] = SPLIT
    sync: Annotated[SyncOptions, PlanKey(in_lines=False, shown="files", applies_alone=False)] = SUM
    precision: Annotated[Precision, PlanKey(shown="files", find_conflict=_explain_float16)] = PRECISIONS[0]
    # A budget is of a stage, and a plan in the place of this one has other stages.
    recompute: Annotated[Recompute, PlanKey(fixed_values=MODES[1:])] = NONE
    per_sample: tuple[str, ...] = ()
    compile: Annotated[bool, PlanKey(find_conflict=_explain_compile)] = False
    shares: Annotated[
        tuple[int, ...], PlanKey(fixed_values=(), applies_alone=False, find_conflict=_explain_shares)
    ] = ()

    def option_values(self) -> dict[str, Any]:
        """Return the values of all options, by key."""
        return {key: getattr(self, key) for key in OPTIONS}

    def find_conflict(self) -> str | None:
        """Describe an option that cannot be combined with the others; None if there is none."""
        changed = (row for key, row in OPTIONS.items() if getattr(self, key) != row.default)
        return next((reason for row in changed if (reason := row.find_conflict(self)) is not None), None)


# The rows of the options, in the order of plan files.
OPTIONS: Mapping[str, PlanKey] = keys_of(PlanOptions)
