"""Seconds of every node: measured without a trace, and estimated where nothing can be measured."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.profiling import time_operators
from polylane.profiling.time_operators import measure
from tests.support import models, subsets
from tests.support.synthetic_graphs import node_seconds


def captured(name: str, samples: int = 4, **settings: str) -> tuple[Graph, nn.Module, models.Case, list[Any]]:
    torch.manual_seed(0)
    case = models.CASES[name]() if name in models.CASES else models.example_case(name, **settings)
    model = case.model()
    batch = case.batch(samples, 1)
    return capture(model, case.loss, batch), model, case, flatten(batch)[0]


@pytest.mark.parametrize("name", subsets.one_in(2, subsets.one_in(3, [*models.CASES, *models.TINY]), first=1))
def test_measuring_leaves_no_trace(name: str) -> None:
    graph, model, case, leaves = captured(name)
    before = copy.deepcopy(model.state_dict())
    batch = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    random = torch.get_rng_state()
    seconds = measure(graph, model, case.loss, leaves)
    assert len(seconds) == len(graph.nodes)
    assert all(each >= 0 for each in seconds)
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(batch, leaves, strict=True) if isinstance(a, torch.Tensor))
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.slow  # it measures time, which a busy machine distorts
def test_measured_nodes_add_up_to_a_step() -> None:
    graph, model, case, leaves = captured("two_devices", 64)
    rebuild = flatten(case.batch(64, 1))[1]
    steps = []
    for _ in range(4):
        start = time.perf_counter()
        case.loss(model, rebuild(leaves)).backward()
        steps.append(time.perf_counter() - start)
    total = min(sum(measure(graph, model, case.loss, leaves)) for _ in range(3))
    assert 0.3 * min(steps) < total < 3 * min(steps) + 0.002


def test_larger_layers_take_longer() -> None:
    model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    batch = models.vectors(256, 0)
    graph = capture(model, models.classify, batch)
    for seconds in (measure(graph, model, models.classify, list(batch)), node_seconds(graph)):
        by_name = dict(zip((node.name for node in graph.nodes), seconds, strict=True))
        assert max(by_name, key=by_name.__getitem__) == "2/linear"


def test_nodes_of_a_kind_take_equally_long() -> None:
    graph, model, case, leaves = captured("gpt", layers="4")
    seconds = dict(zip((node.name for node in graph.nodes), measure(graph, model, case.loss, leaves), strict=True))
    layers = [sum(s for name, s in seconds.items() if name.startswith(f"blocks.{i}.")) for i in range(4)]
    assert max(layers[1:]) == pytest.approx(min(layers[1:]))


def test_opaque_and_meta_are_estimated() -> None:
    graph, model, case, leaves = captured("branching")
    assert measure(graph, model, case.loss, leaves) == node_seconds(graph)
    meta = nn.Linear(16, 4, device="meta")
    graph = capture(meta, models.classify, models.vectors(4, 0))
    assert measure(graph, meta, models.classify, list(models.vectors(4, 0))) == node_seconds(graph)


def test_estimates_count_the_backward_pass() -> None:
    batch = models.vectors(256, 0)
    trained = node_seconds(capture(nn.Linear(16, 4), models.classify, batch))
    frozen = node_seconds(capture(nn.Linear(16, 4), models.classify, batch, trainable=()))
    assert trained == pytest.approx([3 * each for each in frozen])


def test_slices_of_different_dimensions_are_timed_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows and half of the columns: one is a block of memory, the other is not."""
    seen = list[tuple[Any, ...]]()
    timed = time_operators._timed

    def watched(node: Any, values: Any, wait: Any) -> Any:
        if "slice" in node.meta["op"]:
            seen.append(tuple(node.args[1:]))
        return timed(node, values, wait)

    monkeypatch.setattr(time_operators, "_timed", watched)
    model, batch = nn.Linear(32, 32), torch.zeros(4, 32)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean() + model.weight[:16].sum() + model.weight[:, :16].sum()

    measure(capture(model, loss, batch), model, loss, [batch])
    assert {(0, 0, 16), (1, 0, 16)} <= set(seen)
