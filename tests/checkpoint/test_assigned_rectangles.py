"""Of all workers that hold a rectangle one writes it, and they write about as many bytes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from polylane.runtime.checkpoint.save import WritableRectangle, assign_rectangles


def rectangle(name: str, length: int, dtype: str = "F32") -> WritableRectangle:
    return WritableRectangle(name, (length,), dtype, (0,), (length,), False)


def test_bytes_count_and_not_elements() -> None:
    held = [rectangle("a", 8, "F64"), rectangle("b", 8), rectangle("c", 8)]
    assert assign_rectangles([held, held]) == [[0], [1, 2]]


@pytest.mark.parametrize("seed", range(30))
def test_each_is_written_once_by_who_holds_it(seed: int) -> None:
    draw = random.Random(seed)
    made = [rectangle(f"{i}", draw.randrange(10), draw.choice(("F64", "F32", "BOOL"))) for i in range(seed % 12)]
    replicated = seed % 3 == 0
    every: list[list[WritableRectangle]] = [[] for _ in range(4)]
    for each in made:
        for rank in range(4) if replicated else draw.sample(range(4), draw.randint(1, 4)):
            every[rank].append(each)
    chosen = assign_rectangles(every)
    written = [[every[rank][index] for index in own] for rank, own in enumerate(chosen)]
    assert Counter(each for own in written for each in own) == Counter(made)
    if replicated:  # anybody may write anything: no two differ by more than one rectangle
        loads = [sum(each.bytes for each in own) for own in written]
        assert max(loads) - min(loads) <= max((each.bytes for each in made), default=0)
