"""Global random generators: torch's, Python's and numpy's; their states, and how they are set."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

States = tuple[Any, ...]


def generator_states() -> States:
    """The states of the generators that anybody may draw from: torch's, Python's, and numpy's if it is there."""
    numpy = sys.modules.get("numpy")
    own = (torch.get_rng_state(), random.getstate())
    return own if numpy is None else (*own, numpy.random.get_state())


def restore_generators(saved: States) -> None:
    """Go back to :func:`generator_states`."""
    torch.set_rng_state(saved[0])
    random.setstate(saved[1])
    if len(saved) > 2:
        sys.modules["numpy"].random.set_state(saved[2])


def seed_generators(*key: int) -> None:
    """Let what is drawn next be a function of ``key``."""
    number = hash(key) & 0x7FFFFFFFFFFFFFFF  # of integers: the same in every process
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)


def states_equal(a: States, b: States) -> bool:
    """Whether nothing was drawn between two calls of :func:`generator_states`."""
    arrays = len(a) < 3 or (a[2][2] == b[2][2] and bool((a[2][1] == b[2][1]).all()))
    return torch.equal(a[0], b[0]) and a[1] == b[1] and arrays


def generators_drawn_from(a: States, b: States) -> list[str]:
    """Whose generators, of Python and of numpy, were drawn from between two calls of :func:`generator_states`."""
    found = [] if a[1] == b[1] else ["Python's random"]
    if len(a) > 2 and len(b) > 2 and not (a[2][2] == b[2][2] and bool((a[2][1] == b[2][1]).all())):
        found.append("numpy.random")
    return found


@contextmanager
def python_seeded(number: int) -> Iterator[None]:
    """For the while, Python's and numpy's global generators start from ``number``; the user's own go on afterwards."""
    numpy = sys.modules.get("numpy")
    own, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    random.seed(number)
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(arrays)
