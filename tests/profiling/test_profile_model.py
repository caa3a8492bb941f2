"""A profile is taken without a trace, of normalizations among replicas too."""

from __future__ import annotations

import torch

from polylane.graph.batch import clone_leaves, flatten
from polylane.profiling.profile_model import NORM, profiled
from polylane.profiling.time_operators import measure_both
from tests.support import models, planning_graphs


def test_normalizations_are_measured_among_replicas_too() -> None:
    case, graph = models.example_case("digits"), planning_graphs.example("digits")
    model, batch = case.model(), case.batch(4, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    leaves, rebuild = flatten(batch)
    norms = {node.name for node in graph.nodes if node.op == NORM}
    apart = dict(
        zip(
            (n.name for n in graph.nodes),
            measure_both(graph, model, case.loss, clone_leaves(leaves), NORM),
            strict=True,
        )
    )
    assert {name for name, (forward, _) in apart.items() if forward > 0} == norms
    found = profiled(graph, model, case.loss, case.optimizer, leaves, rebuild, [2, 4, 64])
    assert found.samples == (2, 4) and set(found.shared) == norms and set(found.nodes) == set(graph.positions)
    assert all(forward > 0 for forward, _ in found.steps)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
