"""Loops over sequences print what the plain loops print, wherever their tensors have the samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import polylane
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.loading.input_layout import InputLayout, TapeLayout, propose_layouts
from tests.script.sequence_loops import SEQUENCE_LOOPS

PLANS = ["data=1", "data=2", "data=2,microbatches=2", "pipeline=2,microbatches=2", "tensor=2"]
QUICK: list[tuple[str, str]] = []  # each captures several forms: too long for every run
CASES = [
    pytest.param(name, plan, marks=() if (name, plan) in QUICK else pytest.mark.slow)
    for name in SEQUENCE_LOOPS
    for plan in PLANS
]


@pytest.mark.filterwarnings("ignore:every replica computes the whole batch")
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_prepared_loop_prints_the_plain_loop_s_numbers(name: str, plan: str) -> None:
    def unprepared(*objects: Any, **options: Any) -> Any:
        return objects

    expected = SEQUENCE_LOOPS[name](unprepared)

    def run(context: WorkerContext) -> list[float]:
        return SEQUENCE_LOOPS[name](partial(polylane.prepare, plan=plan))

    for numbers in fork_workers(run, 2 if "=2" in plan.replace("microbatches=2", "") else 1):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-11)


SHAPES = [
    ([(12, 4), (12,)], [0, 0]),
    ([(35, 20), (2, 20, 8), (2, 20, 8), (700,)], [1, 1, 1, (1, 0)]),  # words, states, flat targets
    ([(20, 35), (2, 20, 8), (700,)], [0, 1, (0, 0)]),  # the same, batch first
    ([(7, 20), (9, 20)], [1, 1]),  # source and target of a translation
    ([(7, 20), (9, 20), (180,)], [1, 1, (1, 1)]),  # the same, with flat targets
    ([(20, 7), (20, 7), (20,), ()], [0, 0, 0, 0]),
    ([(5, 3), (5, 3)], [0, 0]),
    ([(4, 6), (3,), (4,)], [0, None, 0]),  # weights of classes belong to the batch as a whole
]


@pytest.mark.parametrize(("shapes", "expected"), SHAPES)
def test_the_likeliest_layout_has_the_samples_where_lengths_agree(shapes: Any, expected: Any) -> None:
    layouts = [InputLayout(*where) if isinstance(where, tuple) else InputLayout(where) for where in expected]
    assert propose_layouts([torch.zeros(shape) for shape in shapes])[0] == TapeLayout(tuple(layouts))


@pytest.mark.parametrize(("shapes", "expected"), SHAPES)
def test_every_proposed_layout_gives_back_the_script_s_tensors(shapes: Any, expected: Any) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    for layout in (*propose_layouts(inputs), *propose_layouts(inputs, batch_dim=1), TapeLayout(None)):
        leaves = layout.arrange(inputs)
        divided = [leaf.shape[0] for leaf in leaves if leaf.dim()]
        assert layout.inputs is None or divided[0] == max(divided)
        for given, restored in zip(inputs, layout.restore(leaves), strict=True):
            assert torch.equal(given, restored)
            assert given.stride() == restored.stride()


def test_a_function_says_where_samples_are() -> None:
    inputs = [torch.zeros(5, 4), torch.zeros(5, 5), torch.zeros(4), torch.zeros(20)]
    said = propose_layouts(inputs, lambda tensor: None if tensor.shape == (5, 5) else min(tensor.dim() - 1, 1))
    flat = InputLayout(1, 0)
    assert said == [TapeLayout((InputLayout(1), InputLayout(None), InputLayout(0), flat))]
