"""The weight half of a backward pass: what it is predicted to compute is what it computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eager_and_captured import captured
from torch.utils.flop_counter import FlopCounterMode

from halves import pipeline, take_gradients
from polylane.cost.cost_table import OperatorWork, ShardedGraphCost
from polylane.cost.operators.operation import operation
from polylane.cost.stage_cost import sum_passes
from polylane.graph.batch import cast_leaves, flatten
from polylane.graph.sample_slice import SampleSlice

SAMPLES = 5


class CountingFlops:
    """A second for every operation of a matrix product."""

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        found = operation(work.operator.call, work.inputs, work.outputs)
        forward, backward = (sum(p.flops for p in way.products) for way in (found.forward, found.backward))
        return forward, backward

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        return 0.0, 0.0


@pytest.mark.parametrize("name", ["gpt", "digits", "t5"])
def test_the_weight_half_is_what_runs_in_it(name: str) -> None:
    """Operations of the second half, predicted and counted; and both halves are the whole."""
    graph, model, case = captured(name, in_float64=True)
    table = ShardedGraphCost(graph, {}, SAMPLES).table(SAMPLES, CountingFlops(), {})
    costs = sum_passes(table, [(0, len(graph.nodes))])
    assert costs.backward_input + costs.backward_weight == costs.backward
    assert bool(np.all(np.diff(table.backward_weight) <= np.diff(table.backward) + 1e-6))
    pipe = pipeline(model, graph, 1, True, [case.loss])
    leaves = cast_leaves(flatten(case.batch(SAMPLES, 0))[0], torch.float64)
    pipe.forward(0, leaves, SampleSlice(SAMPLES, 0, SAMPLES, seed=3))
    pipe.backward(0, "backward_input")
    with FlopCounterMode(display=False) as counter:
        pipe.backward_weight(0)
    take_gradients(model)
    assert costs.backward_weight == pytest.approx(counter.get_total_flops(), rel=0.01)
