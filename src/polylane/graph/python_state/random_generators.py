"""Global random generators of torch, Python and numpy: their states, and how they are saved, restored and seeded."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

States = tuple[Any, ...]


def generator_states() -> States:
    """Return the states of the global generators: torch's, Python's, and numpy's if it is imported."""
    return torch.get_rng_state(), *_python_states()


def _python_states() -> States:
    numpy = sys.modules.get("numpy")
    return (random.getstate(),) if numpy is None else (random.getstate(), numpy.random.get_state())


def restore_generators(saved: States) -> None:
    """Restore states that :func:`generator_states` returned."""
    torch.set_rng_state(saved[0])
    _restore_python(*saved[1:])


def _restore_python(state: Any, numpy: Any = None) -> None:
    random.setstate(state)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


def seed_generators(*key: int) -> None:
    """Seed all global generators with a function of ``key``."""
    number = hash(key) & 0x7FFFFFFFFFFFFFFF  # of integers: the same in every process
    torch.default_generator.manual_seed(number)
    _seed_python(number)


def _seed_python(number: int) -> None:
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)


def states_equal(a: States, b: States) -> bool:
    """Return whether nothing was drawn between two calls of :func:`generator_states`."""
    return torch.equal(a[0], b[0]) and not generators_drawn_from(a, b)


def generators_drawn_from(a: States, b: States) -> list[str]:
    """Return which generators, Python's or numpy's, were drawn from between two calls of :func:`generator_states`."""
    generators = [] if a[1] == b[1] else ["Python's random"]
    # numpy's state is (name, keys, position, ...): position and keys change with every draw.
    if len(a) > 2 and len(b) > 2 and not (a[2][2] == b[2][2] and bool((a[2][1] == b[2][1]).all())):
        generators.append("numpy.random")
    return generators


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Context manager: all global generators are seeded with a function of ``key``, and as before afterwards."""
    saved = _python_states()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        seed_generators(*key)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(torch.default_generator.initial_seed())
        try:
            yield
        finally:
            _restore_python(*saved)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Context manager: whatever is drawn inside, as by a module that draws when it is imported, nothing was drawn."""
    saved = generator_states()
    try:
        yield
    finally:
        restore_generators(saved)


@contextmanager
def python_seeded(number: int) -> Iterator[None]:
    """Context manager: seed Python's and numpy's global generators inside, and restore the user's states afterwards."""
    saved = _python_states()
    _seed_python(number)
    try:
        yield
    finally:
        _restore_python(*saved)
