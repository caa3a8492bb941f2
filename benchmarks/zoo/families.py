"""The families of the zoo, in the order of the page."""

from __future__ import annotations

from benchmarks.zoo.entry import Entry, Family
from benchmarks.zoo.models.convolutional import CONVOLUTIONAL
from benchmarks.zoo.models.dense import DENSE
from benchmarks.zoo.models.experts import EXPERTS
from benchmarks.zoo.models.generative import GENERATIVE
from benchmarks.zoo.models.graphs import GRAPHS
from benchmarks.zoo.models.language import LANGUAGE
from benchmarks.zoo.models.physics import PHYSICS
from benchmarks.zoo.models.recommenders import RECOMMENDERS
from benchmarks.zoo.models.recurrent import RECURRENT
from benchmarks.zoo.models.speech import SPEECH
from benchmarks.zoo.models.two_tower import TWO_TOWER
from benchmarks.zoo.models.vision_transformers import VISION_TRANSFORMERS

FAMILIES: tuple[Family, ...] = (
    CONVOLUTIONAL,
    VISION_TRANSFORMERS,
    DENSE,
    LANGUAGE,
    EXPERTS,
    SPEECH,
    TWO_TOWER,
    GENERATIVE,
    RECOMMENDERS,
    RECURRENT,
    GRAPHS,
    PHYSICS,
)


def all_entries() -> dict[str, Entry]:
    """Every model of the zoo, by name.

    Raises:
        ValueError: two families have a model of the same name.
    """
    entries: dict[str, Entry] = {}
    for family in FAMILIES:
        for name, entry in family.entries.items():
            if name in entries:
                raise ValueError(f"{name} is in {entries[name].family} and in {family.name}")
            entries[name] = entry
    return entries


def find_entry(name: str) -> Entry:
    """The model of that name."""
    return all_entries()[name]
