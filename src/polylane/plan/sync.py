"""Sync options: how replicas synchronize gradients or weights; a mapping in a plan file, words in a one-line plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic_core import PydanticCustomError

from polylane.errors import PolylaneError
from polylane.settings import parse_whole
from polylane.yaml_file import Count, StrictMapping

_Share = Annotated[float, pydantic.Field(strict=True, gt=0.0, le=1)]
_Rate = Annotated[float, pydantic.Field(strict=True, gt=0.0, allow_inf_nan=False)]
_Momentum = Annotated[float, pydantic.Field(strict=True, ge=0, lt=1)]
_Steps = Annotated[int, pydantic.Field(strict=True, ge=0)]

ANY = "any"
Staleness = int | Literal["any"]

Shard = Literal["none", "optimizer", "gradients", "parameters"]


class OuterOptimizer(StrictMapping):
    """Outer optimizer of local SGD: SGD with Nesterov momentum on the mean change of the replicas' weights (DiLoCo:
    Douillard et al., arXiv 2311.08105, algorithm 1). Rate 1 and momentum 0 is plain averaging.

    Attributes:
        rate: learning rate of the outer step.
        momentum: Nesterov momentum of the outer step, in [0, 1).
    """

    rate: _Rate = 0.7
    momentum: _Momentum = 0.9


class PowerSGDOptions(StrictMapping):
    """PowerSGD: gradient matrices are sent as products of two thin ones (Vogels et al., NeurIPS 2019).

    Attributes:
        kind: tag that selects this compressor.
        rank: rank of the approximation, the width of the thin matrices.
        start: first step with compression; gradients are summed whole before it.
    """

    kind: Literal["powersgd"]
    rank: Count = 4
    start: _Steps = 10


class TopKOptions(StrictMapping):
    """Top-k: only the largest entries are sent, with error feedback (Stich et al., NeurIPS 2018).

    Attributes:
        kind: tag that selects this compressor.
        fraction: share of a gradient's entries that is sent, in (0, 1].
    """

    kind: Literal["top_k"]
    fraction: _Share = 0.01


def _staleness(value: Any) -> Any:
    if value == ANY or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise PydanticCustomError(
        "sync", "must be a whole number of at least 0, or any, not {value}", {"value": repr(value)}
    )


class SyncOptions(StrictMapping):
    """How replicas synchronize.

    Attributes:
        kind: "all_reduce": they sum gradients, or average weights; "parameter_server": servers hold weights and
            optimizer, and update them with the gradients that replicas send.
        every: steps from one synchronization to the next. 1: gradients are summed in each step; n: replicas train alone
            for n steps, then average their weights (local SGD: Stich, ICLR 2019).
        warmup: steps at the start with gradients summed in each (post-local SGD: Lin et al., ICLR 2020).
        outer: optimizer that is applied to the averaged change of the weights; None: the average is taken as it is.
        shard: what is sharded over the replicas: optimizer states, gradients as well, parameters as well (ZeRO-1, -2,
            -3: Rajbhandari et al., SC 2020).
        within: number of replicas in a sharding group, where that is not all of them (hybrid sharding).
        wire: dtype in which gradients are sent: "same" as they are computed, or a shorter one.
        compress: how gradients are compressed before they are sent; None: not at all.
        servers: number of parameter servers; parameters are assigned to them by bytes.
        dedicated: whether servers are further processes; else they run in those that train.
        staleness: most steps that a replica may be ahead of the slowest one; 0: synchronous, all gradients make one
            update; "any": each replica goes at its own pace.
    """

    kind: Literal["all_reduce", "parameter_server"] = "all_reduce"
    every: Count = 1
    warmup: _Steps = 0
    outer: OuterOptimizer | None = None
    shard: Shard = "none"
    within: Count | None = None
    wire: Literal["same", "bfloat16", "float16"] = "same"
    compress: Annotated[PowerSGDOptions | TopKOptions, pydantic.Field(discriminator="kind")] | None = None
    servers: Count | None = None
    dedicated: Annotated[bool, pydantic.Field(strict=True)] = False
    staleness: Annotated[Staleness, pydantic.BeforeValidator(_staleness)] = 0

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        why = _find_contradiction(self)
        if why is not None:
            raise PydanticCustomError("sync", "{why}", {"why": why})
        return self

    @property
    def has_servers(self) -> bool:
        """Whether parameter servers hold the weights."""
        return self.kind == "parameter_server"

    @property
    def server_count(self) -> int:
        """Number of parameter servers; 0 where replicas synchronize by all-reduce."""
        return (self.servers or 1) if self.has_servers else 0

    @property
    def is_replica_local(self) -> bool:
        """Whether replicas take steps of their own, each with the mean of its own samples."""
        return self.every > 1 or (self.has_servers and self.staleness != 0)

    @property
    def is_plain_sum(self) -> bool:
        """Whether gradients are all-reduced in every step, neither compressed nor sharded."""
        return self == SUM

    @property
    def is_summed_or_sharded(self) -> bool:
        """Whether replicas sum their gradients in every step as they are, or each its shard of them (ZeRO)."""
        return not self.has_servers and self.every == 1 and self.wire == "same" and self.compress is None

    @property
    def is_exact(self) -> bool:
        """Whether the training computes the same numbers as one device, up to rounding."""
        return not self.is_replica_local and self.wire == "same" and self.compress is None

    def changed(self, **values: Any) -> SyncOptions:
        """Return the options with other values of some keys.

        Raises:
            PolylaneError: a value is not one that its key takes, or two keys then exclude each other.
        """
        try:
            # model_copy would not validate.
            return SyncOptions.model_validate({**self.model_dump(), **values})
        except pydantic.ValidationError as error:
            details = error.errors()[0]
            key = str(details["loc"][0]) if details["loc"] else ""
            message = f"{key} {values.get(key)!r} must be {WANTED[key]}" if key in WANTED else details["msg"]
            raise PolylaneError(message) from error

    def changed_keys(self) -> frozenset[str]:
        """Return the keys whose values are not the defaults."""
        return frozenset(key for key, value in self if value != type(self).model_fields[key].default)

    def to_words(self) -> list[str]:
        """Format the options as words of a plan in one line; no words for the plain sum of gradients."""
        keys = [key for key in KEYS if key in self.changed_keys() and key != "servers"]
        words = [f"{key}={_format_word(getattr(self, key))}" for key in keys]
        return [f"servers={self.server_count}", *words] if self.has_servers else words


def _format_word(value: Any) -> str:
    if isinstance(value, OuterOptimizer):
        return f"{_format_number(value.rate)}:{_format_number(value.momentum)}"
    if isinstance(value, PowerSGDOptions):
        return f"powersgd:{value.rank}:{value.start}"
    if isinstance(value, TopKOptions):
        return f"top_k:{_format_number(value.fraction)}"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _format_number(value: float) -> str:
    """Format a number in six digits, if these are exact; else in full."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _find_contradiction(sync: SyncOptions) -> str | None:
    """Describe two options that exclude each other, and what to do; None if there are none."""
    if sync.has_servers:
        return _find_server_contradiction(sync)
    changed = sync.changed_keys()
    if server_key := next((key for key in ("servers", "dedicated", "staleness") if key in changed), None):
        return f"{server_key} is for kind: parameter_server: give that as well, or leave {server_key} out"
    if sync.every == 1:
        for key in ("warmup", "outer"):
            if key in changed:
                return f"{key} is for replicas that agree every so many steps: give every as well, or leave {key} out"
    if sync.within is not None and sync.shard == "none":
        return "within says among how many replicas something is sharded: give shard as well, or leave within out"
    if sync.shard != "none" and sync.every > 1:
        return f"shard: {sync.shard} needs replicas that are alike, and every: {sync.every} lets them differ"
    if sync.compress is not None and sync.wire != "same":
        return f"wire: {sync.wire} and compress exclude each other: leave one of them out"
    option = "compress" if sync.compress is not None else "wire" if sync.wire != "same" else None
    if option is not None and (sync.shard != "none" or sync.every > 1):
        conflict = f"shard: {sync.shard}" if sync.shard != "none" else f"every: {sync.every}"
        return f"{option} is for gradients that are summed whole in every step, and {conflict} does not do that"
    return None


def _find_server_contradiction(sync: SyncOptions) -> str | None:
    if sync.shard != "none":
        return (
            f"shard: {sync.shard} and kind: parameter_server exclude each other: servers hold the optimizer's states, "
            "shared out among them"
        )
    if key := next((key for key in KEYS[: KEYS.index("servers")] if key in sync.changed_keys()), None):
        return f"{key} is for kind: all_reduce, and a parameter server does not take it: leave {key} out"
    return None


# The plain sum of gradients in every step.
SUM = SyncOptions()

# Keys of a plan in one line that belong to the sync options: there is no word kind.
KEYS = tuple(key for key in SyncOptions.model_fields if key != "kind")


def parse_sync(texts: Mapping[str, str]) -> SyncOptions:
    """Parse the words of a plan in one line that belong to sync, given by key.

    Raises:
        PolylaneError: a value is not one that its key takes, or two keys exclude each other.
    """
    values: dict[str, Any] = {key: _parse_value(key, text) for key, text in texts.items()}
    # In one line the word servers alone selects parameter servers; there is no word kind.
    if "servers" in values:
        values["kind"] = "parameter_server"
    try:
        return SyncOptions.model_validate(values)
    except pydantic.ValidationError as error:
        details = error.errors()[0]
        if not details["loc"]:
            raise PolylaneError(details["msg"].replace("kind: parameter_server", "servers=n")) from error
        key = str(details["loc"][0])
        raise PolylaneError(f"{key}={texts.get(key, '')} must be {WANTED[key]}") from error


# What each key takes, in words.
WANTED = {
    "every": "a whole number of at least 1",
    "warmup": "a whole number of at least 0",
    "outer": "RATE:MOMENTUM, as in 0.7:0.9 (a rate above 0, a momentum from 0 to below 1)",
    "shard": "none, optimizer, gradients or parameters",
    "within": "a whole number of at least 1",
    "wire": "same, bfloat16 or float16",
    "compress": "powersgd:RANK, powersgd:RANK:START or top_k:FRACTION, as in powersgd:4 or top_k:0.01",
    "servers": "a whole number of at least 1",
    "dedicated": "yes or no",
    "staleness": "a whole number of at least 0, or any",
}


def _parse_value(key: str, text: str) -> Any:
    """Parse a value into what a plan file would have; text that fits nothing is returned as is, and refused later."""
    if key == "outer":
        rate, _, momentum = text.partition(":")
        if not momentum:
            return {"rate": _parse_number(key, text)}
        return {"rate": _parse_number(key, rate), "momentum": _parse_number(key, momentum)}
    if key == "compress":
        kind, *values = text.split(":")
        names = {"powersgd": ("rank", "start"), "top_k": ("fraction",)}.get(kind, ())
        if len(values) > len(names):
            return text
        return {"kind": kind, **{name: _parse_number(key, value) for name, value in zip(names, values, strict=False)}}
    if key == "dedicated":
        return {"yes": True, "no": False}.get(text, text)
    return _parse_number(key, text)


def _parse_number(key: str, text: str) -> Any:
    """Parse a number in plain notation; other text is returned as it is."""
    # int() and float() would also accept other scripts' digits, signs and underscores.
    if text.isascii() and text.isdecimal():
        return parse_whole(key, text)
    try:
        return float(text) if text.isascii() and text[:1] not in "-+" and "_" not in text else text
    except ValueError:
        return text
