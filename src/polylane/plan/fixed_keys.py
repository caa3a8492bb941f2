"""Fixed keys: what a user says of a plan that is otherwise searched: ``auto,data=2``, ``shard=parameters``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polylane.errors import PolylaneError
from polylane.plan import spec as specs
from polylane.plan.spec import AUTO, DEGREES, PRECISIONS, Degrees
from polylane.plan.sync import KEYS, SUM, SyncOptions, parse_sync
from polylane.settings import split_pairs

# Keys of a plan that a search can be told; what else a plan can say, it finds or leaves at its default.
_KNOWN = (*DEGREES, "microbatches", "precision", *KEYS)


@dataclass(frozen=True)
class FixedKeys:
    """Keys of a plan that a search must keep.

    Attributes:
        counts: by key ("data", "pipeline", "sequence", "tensor", "microbatches") the number that a plan must have.
        sync: how replicas synchronize; without words, the search tries what computes the same numbers.
        sync_keys: the keys of ``sync`` that were given.
        precision: of the passes; None: nothing was said.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    sync: SyncOptions = SUM
    sync_keys: frozenset[str] = frozenset()
    precision: str | None = None

    @property
    def shardings(self) -> tuple[Literal["optimizer", "gradients", "parameters"], ...]:
        """Kinds of sharding that a search may try beside ``sync``, what shares out the least first.

        None where the user chose one, or a synchronization that shares nothing out. The numbers of a training do not
        depend on them: what changes numbers (``every``, ``wire``, ``compress``, ``staleness``) is never tried unasked.
        """
        if "shard" in self.sync_keys or self.sync != SUM:
            return ()
        return ("optimizer", "gradients", "parameters")

    @property
    def degrees(self) -> Mapping[str, int]:
        """The fixed degrees of the meshes of stages, by axis."""
        return {key: number for key, number in self.counts.items() if key not in ("pipeline", "microbatches")}

    def allows(self, meshes: Sequence[Degrees], microbatches: int) -> bool:
        """Return whether stages with these meshes have the degrees and microbatches that are fixed."""
        for key, number in self.counts.items():
            if key == "microbatches":
                found = microbatches
            elif key == "pipeline":
                found = len(meshes)
            elif any(getattr(mesh, key) != number for mesh in meshes):
                return False
            else:
                continue
            if found != number:
                return False
        return True

    def with_sync(self, **values: Any) -> FixedKeys:
        """Return the keys with further keys of ``sync``, where they are not None.

        Raises:
            PolylaneError: a value is not one that its key takes, or contradicts another.
        """
        given = {key: value for key, value in values.items() if value is not None}
        sync = self.sync.changed(**given)
        return replace(self, sync=sync, sync_keys=self.sync_keys | set(given))

    def __str__(self) -> str:
        words = [f"{key}={number}" for key, number in self.counts.items()]
        words += [f"precision={self.precision}"] if self.precision else []
        return ",".join([*words, *self.sync.to_words()])


NOTHING_FIXED = FixedKeys()


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
        raise PolylaneError("a search can be told data=, tensor=, ...; meshes of every stage make a plan of their own")
    given = split_pairs([piece for piece in text.split(",") if piece.strip()], _KNOWN, "data=2")
    # The plan of one line knows how numbers are written, and which are too large.
    line = ",".join(f"{key}={given[key]}" for key in (*DEGREES, "microbatches") if key in given)
    spec = specs.parse(line) if line else None
    counts = {key: int(getattr(spec, key)) for key in (*DEGREES, "microbatches") if key in given}
    precision = given.get("precision")
    if precision not in (None, *PRECISIONS):
        raise PolylaneError(f"precision={precision} is not known, known are {', '.join(PRECISIONS)}")
    keys = {key: given[key] for key in KEYS if key in given}
    return FixedKeys(counts, parse_sync(keys), frozenset(keys), precision)


def parse_auto(text: object) -> FixedKeys | None:
    """Return what a plan that is to be found must keep: of ``auto`` nothing; None for any other plan.

    Raises:
        PolylaneError: what follows ``auto,`` is not what a search can be told.
    """
    if text == AUTO:
        return FixedKeys()
    if isinstance(text, str) and text.startswith(f"{AUTO},"):
        return parse_fixed(text.removeprefix(f"{AUTO},"))
    return None
