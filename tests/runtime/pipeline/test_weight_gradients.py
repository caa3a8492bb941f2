"""Backward passes in two halves give every gradient that the whole ones give, in any order of microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_and_captured import captured
from halves import Pipeline, interleavings, pipeline, take_gradients
from torch import Tensor

import models
from polylane.graph.batch import cast_leaves, flatten
from polylane.graph.sample_slice import SampleSlice

MICROBATCHES, SAMPLES = 3, 5
QUICK = (*models.CASES, "gpt", "digits", "unet")


def parts_of(case: models.Case) -> list[tuple[list[Any], SampleSlice]]:
    found = []
    for i in range(MICROBATCHES):
        leaves = cast_leaves(flatten(case.batch(SAMPLES, i))[0], torch.float64)
        part = SampleSlice(SAMPLES, i * SAMPLES, SAMPLES * MICROBATCHES, microbatch=i, seed=3)
        found.append((list(leaves), part))
    return found


def run_at_once(pipe: Pipeline, parts: list[Any]) -> tuple[list[dict[str, Tensor]], dict[str, Tensor | None]]:
    crossing = []
    for i, (leaves, part) in enumerate(parts):
        pipe.forward(i, leaves, part)
    for i in range(len(parts)):
        crossing.append(pipe.backward(i))
    return crossing, take_gradients(pipe.model)


@pytest.mark.parametrize("name", QUICK)
def test_two_halves_are_the_whole(name: str) -> None:
    graph, model, case = captured(name, in_float64=True)
    parts = parts_of(case)
    buffers = {n: b.clone() for n, b in model.named_buffers()}

    def reset() -> None:
        for n, b in model.named_buffers():
            b.data.copy_(buffers[n])

    stages = 2
    crossing, gradients = run_at_once(pipeline(model, graph, stages, False, [case.loss]), parts)
    reset()
    split = pipeline(model, graph, stages, True, [case.loss])
    assert any(runner.code.weight_groups for runner in split.runners)
    crossing2, gradients2 = run_at_once(split, parts)
    compare(name, crossing, gradients, crossing2, gradients2)
    for seed in range(2):
        reset()
        orders = {"forward": lambda i: split.forward(i, *parts[i])}
        split.gradients.clear()
        for kind, i in interleavings(MICROBATCHES, seed):
            if kind == "forward":
                split.forward(i, *parts[i])
            elif kind == "backward_input":
                split.backward(i, "backward_input")
            else:
                split.backward_weight(i)
        assert not any(runner.deferred or runner.live_microbatches for runner in split.runners)
        compare(name, crossing, gradients, [split.gradients[i] for i in range(MICROBATCHES)], take_gradients(model))


def compare(name: str, crossing: Any, gradients: Any, crossing2: Any, gradients2: Any) -> None:
    for a, b in zip(crossing, crossing2, strict=True):
        assert a.keys() == b.keys()
        for value in a:
            torch.testing.assert_close(b[value], a[value], rtol=1e-12, atol=1e-14, msg=lambda m: f"{name} {value} {m}")
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for parameter, gradient in gradients.items():
        other = gradients2[parameter]
        assert (gradient is None) == (other is None), (name, parameter)
        if gradient is not None:
            torch.testing.assert_close(
                other, gradient, rtol=1e-12, atol=1e-14 * max(1, largest), msg=lambda m: f"{name} {parameter} {m}"
            )
