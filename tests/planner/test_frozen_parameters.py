"""Frozen parameters: memory of a rank, split along operator axes, and no gradients, states, updates or messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from polylane.cost.predict import predict
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.plan.spec import Degrees
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.planner.uniform_plans import UniformPlan, rate_uniform_plan
from tests.support import planning_graphs

HIDDEN = 1024


def adapted() -> Graph:
    """Four large frozen layers, and small ones between them that are trained."""
    with torch.device("meta"):
        parts = [(nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)) for _ in range(4)]
        model = nn.Sequential(*(layer for pair in parts for layer in pair))
    trained = [n for i, (n, _) in enumerate(model.named_parameters()) if i % 4 == 3]
    return capture(model, planning_graphs.mean_square, torch.zeros(2, HIDDEN), trainable=trained)


GRAPH = adapted()
EACH = HIDDEN * HIDDEN * 4


def test_frozen_elements_are_not_counted_as_trained() -> None:
    curves = planning_graphs.estimates(GRAPH, "4:a100-80g", 16).curves(Degrees(), 16, (0,))
    assert curves.elements[-1] == 2 * HIDDEN * HIDDEN
    assert curves.frozen_bytes[-1] == 6 * EACH
    assert (np.diff(curves.frozen_bytes) >= 0).all()


@pytest.mark.parametrize("data", [1, 4])
def test_the_estimate_of_memory_is_that_of_the_prediction(data: int) -> None:
    found = planning_graphs.estimates(GRAPH, "4:a100-80g", 16)
    candidate = rate_uniform_plan(found, UniformPlan(data, 1, 1, 1, 1), np.inf)
    partition, plan = setup.fit_plan(found.basis, spec_of(f"data={data}"), 16)
    (stage,) = predict(found.basis, partition, plan, 16).stages
    assert candidate is not None
    assert candidate.peak_bytes == pytest.approx(stage.memory.total, rel=0.05)
    assert stage.memory.parameters == 8 * EACH and stage.memory.gradients <= 2 * EACH


def test_a_tensor_axis_splits_frozen_parameters_too() -> None:
    basis = planning_graphs.basis(GRAPH, "4:a100-80g")
    whole, split = (
        predict(basis, *setup.fit_plan(basis, spec_of(p), 64), 64).stages[0] for p in ("data=1", "tensor=4")
    )
    sheet = basis.stages.sharded_graph(Degrees(1, 1, 4))
    held = sum(sheet.busiest_bytes_of("parameter", n, info.bytes) for n, info in GRAPH.parameters.items())
    assert held < 8 * EACH, "the layout splits some of them"
    assert split.memory.parameters == pytest.approx(held, rel=1e-6) and whole.memory.parameters == 8 * EACH
