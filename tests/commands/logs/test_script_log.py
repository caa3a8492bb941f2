"""A step of a script that adds up several backward passes: what of them adds up, and what nobody has measured."""

from __future__ import annotations

from typing import Any

import pytest

from polylane.commands.logs.script_log import AccumulatedStep
from tests.commands.logs.test_kept_steps import Step


def results_of(losses: tuple[float, ...], samples: tuple[int, ...]) -> list[Any]:
    known: dict[str, Any] = {"facts": ("facts",), "noise": "noise"}
    return [Step(3 + i, n, loss, (0.0, 0.0), **known) for i, (loss, n) in enumerate(zip(losses, samples, strict=True))]


def test_samples_and_losses_add_up() -> None:
    """What is differentiated is the sum of the losses: a script divides each by their number where it wants a mean."""
    step = AccumulatedStep(results_of((0.5, 0.25, 1.0), (8, 8, 5)))
    assert (step.step, step.samples, step.loss) == (5, 21, 1.75)
    total, count = step.sums
    assert total / count == pytest.approx(1.75) and count == 21
    assert step.timeline is step.results[-1].timeline


def test_norms_are_those_of_a_single_pass_or_of_none() -> None:
    """Of several passes none has all of the gradients."""
    (single,) = results_of((0.5,), (8,))
    assert AccumulatedStep([single]).facts == single.facts and AccumulatedStep([single]).noise == "noise"
    several = AccumulatedStep(results_of((0.5, 0.5), (8, 8)))
    assert several.facts == () and several.noise is None
