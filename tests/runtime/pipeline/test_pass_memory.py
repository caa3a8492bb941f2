"""Laws of the memory of schedules, by the tensors that are alive on the workers while they train."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory.laws import MICROBATCHES, SCHEDULES, WORKERS, Held, Subject, gpt, measure
from benchmarks.memory.plot import draw
from tests.support.workers.training import classify

WIDTH, SAMPLES, BLOCKS, DEPTH = 16, 64, 4, 4


class Shortcut(nn.Sequential):
    """Layers, and what they read added to what they make."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def small(block: type[nn.Sequential] = nn.Sequential) -> Subject:
    """Blocks of linear layers, between which one value crosses."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(*(make_layers(block) for _ in range(DEPTH))) for _ in range(BLOCKS)]

    def example(microbatches: int) -> tuple[Tensor, Tensor]:
        return torch.randn(SAMPLES * microbatches, WIDTH), torch.zeros(SAMPLES * microbatches, dtype=torch.long)

    return Subject(nn.Sequential(*blocks), classify, tuple(str(i) for i in range(BLOCKS)), example)


def make_layers(block: type[nn.Sequential]) -> nn.Sequential:
    return block(nn.Linear(WIDTH, WIDTH), nn.GELU())


def by_case(found: list[Held]) -> dict[tuple[str, int], Held]:
    return {(held.schedule, held.microbatches): held for held in found}


def check_growth(few: Held, many: Held, factor: float) -> None:
    """The worker's bytes between passes have grown by the factor, up to 5 %."""
    for before, after in zip(few.kept, many.kept, strict=True):
        assert after == pytest.approx(factor * before, rel=0.05)


def check_theory(held: Held) -> None:
    """Bytes are live microbatches times what one holds alone."""
    assert abs(held.theory_error) < 0.05, held


def test_kept_activations_are_live_microbatches_times_one() -> None:
    cases = [("afab", 2), ("afab", 16), ("1f1b", 2), ("1f1b", 16), ("interleaved", 4), ("zb-h1", 4), ("pipedream", 4)]
    found = by_case(measure(small(), 2, cases))
    check_growth(found["afab", 2], found["afab", 16], 8)
    check_growth(found["1f1b", 2], found["1f1b", 16], 1)
    for held in found.values():
        check_theory(held)
        assert abs(held.prediction_error) < 0.05, held
    assert found["1f1b", 16].live == (2, 1) and found["afab", 16].live == (16, 16)
    assert found["pipedream", 4].versions == (2, 1)


def test_what_is_held_at_most_is_predicted_where_gradients_of_shortcuts_wait_for_weights() -> None:
    """What the weights' gradients wait for cannot be added up in place."""
    for held in measure(small(Shortcut), 2, [("1f1b", 4), ("zb-h1", 4), ("zb-h2", 4), ("zb-v", 4)]):
        check_theory(held)
        assert abs(held.prediction_error) < 0.05, held


@pytest.mark.slow
def test_a_gpt_on_four_workers_keeps_what_theory_says_under_every_schedule() -> None:
    few, most = MICROBATCHES[0], MICROBATCHES[-1]
    found = by_case(measure(gpt(2 * WORKERS), WORKERS, [(name, m) for name in SCHEDULES for m in (few, most)]))
    check_growth(found["afab", few], found["afab", most], most / few)
    check_growth(found["1f1b", few], found["1f1b", most], 1)
    for held in found.values():
        check_theory(held)
        assert abs(held.prediction_error) < 0.05, held


def test_a_picture_has_a_line_for_every_schedule() -> None:
    drawn = draw("Bytes", {"afab": [(4, 1.0), (8, 2.0)], "1f1b": [(4, 1.0), (8, 1.0)]})
    assert drawn.count("<polyline") == 2 and ">afab</text>" in drawn and ">8</text>" in drawn
