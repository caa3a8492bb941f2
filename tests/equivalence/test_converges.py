"""Every way in which replicas agree trains a small residual network on real digits to 97% of the test images."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import sync
from polylane.recipe import load

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("plan", sync.KINDS)
def test_digits(plan: str) -> None:
    accuracy, _, _ = sync.trained(load(str(ROOT / "examples/digits.py"), {}), plan, epochs=12)
    assert accuracy >= 0.97
