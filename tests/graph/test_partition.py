"""Cuts: who sends which value to whom, how evenly, with how few bytes; and stages run by hand give equal numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import cast_leaves, flatten
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.self_check import placeholder_value, tensors_by_role
from polylane.graph.graph import Code, Graph, Node
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.partition import SLACK, Partition, align_partition, balance_stages, cut_positions
from polylane.recipe import Mean
from tests.support import models, subsets
from tests.support.call_counts import calls
from tests.support.reference.eager_and_captured import captured
from tests.support.synthetic_graphs import node_seconds


def node(i: int, inputs: Sequence[int] = (), size: int = 4, free: bool = False, crossable: bool = True) -> Node:
    return Node(
        name=f"n{i}", id=f"n{i}", op="op", inputs=tuple(f"n{j}" for j in inputs), shape=(2, size), batch_dim=0,
        dtype="float32", flops=0, bytes=size, parameters=(), buffers=(), module="", source="", requires_grad=True,
        recomputable=free, can_cross_stages=crossable,
    )  # fmt: skip


def graph_of(nodes: Sequence[Node], uncut: Sequence[tuple[int, int]] = (), outputs: tuple[str, ...] = ()) -> Graph:
    code = Code(fx.Graph(), {}, 1, False, False)
    return Graph(tuple(nodes), {}, {}, {}, 2, tuple(uncut), (), True, False, code, outputs)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    size = draw(st.integers(2, 9))
    nodes: list[Node] = []
    for i in range(size):
        earlier = st.lists(st.integers(0, i - 1), max_size=3, unique=True) if i else st.just([])
        inputs = sorted({*draw(earlier), *([i - 1] if i else [])})
        free = i < size - 1 and all(nodes[j].recomputable for j in inputs) and draw(st.integers(0, 3)) == 0
        nodes.append(node(i, inputs, draw(st.integers(1, 50)), free, draw(st.integers(0, 9)) > 0))
    first = draw(st.integers(0, size - 1))
    uncut = [(first, draw(st.integers(first, size - 1)))] if draw(st.booleans()) else []
    return graph_of(nodes, uncut)


@given(graphs(), st.data())
@settings(deadline=None, max_examples=subsets.examples(200))
def test_every_value_comes_straight_from_its_stage(graph: Graph, data: st.DataObject) -> None:
    allowed = cut_positions(graph)
    cuts = tuple(sorted(data.draw(st.sets(st.sampled_from(allowed))))) if allowed else ()
    partition = Partition(graph, cuts)
    position = graph.positions
    crossing = {c.value: c for c in partition.crossings}
    for each in graph.nodes:
        on = [stage for stage in range(partition.stages) if each in partition.nodes(stage)]
        assert on == [partition.stage_of[each.name]] if not each.recomputable else True
    for stage in range(partition.stages):
        own = {n.name for n in partition.nodes(stage)}
        assert any(not n.recomputable for n in partition.nodes(stage))
        assert list(partition.nodes(stage)) == sorted(partition.nodes(stage), key=lambda n: position[n.name])
        for name in {name for n in partition.nodes(stage) for name in n.inputs} - own:
            assert crossing[name].producer < stage
            assert stage in crossing[name].consumers
    for c in partition.crossings:
        assert graph.nodes[position[c.value]].can_cross_stages
        assert c.producer == partition.stage_of[c.value]
        assert all(any(c.value in n.inputs for n in partition.nodes(stage)) for stage in c.consumers)
    for cut, (first, last) in itertools.product(cuts, graph.unsplittable_ranges):
        assert not first < cut <= last


def times(seconds: Sequence[float], cuts: Sequence[int]) -> list[float]:
    ends = [0, *cuts, len(seconds)]
    return [float(sum(seconds[a:b])) for a, b in itertools.pairwise(ends)]


def travelling(graph: Graph, cuts: Sequence[int]) -> float:
    """Bytes that stand at the cuts, there and back, each value once for every cut that it passes."""
    last = {name: i for i, n in enumerate(graph.nodes) for name in n.inputs}
    return sum(
        2 * n.bytes
        for cut in cuts
        for i, n in enumerate(graph.nodes)
        if not n.recomputable and i < cut <= last.get(n.name, -1)
    )


@given(graphs(), st.integers(2, 4), st.data())
@settings(deadline=None, max_examples=subsets.examples(300))
def test_the_slowest_stage_is_as_fast_as_can_be_and_few_bytes_travel(graph: Graph, stages: int, data: Any) -> None:
    duration = st.just(0.0) | st.floats(1e-3, 9.0)
    seconds = data.draw(st.lists(duration, min_size=len(graph.nodes), max_size=len(graph.nodes)))
    allowed = cut_positions(graph)
    every = list(itertools.combinations(allowed, stages - 1))
    if not every:
        with pytest.raises(PolylaneError, match=rf"pipeline={stages}: the graph can be cut into at most \d+ stage"):
            balance_stages(graph, stages, seconds)
        return
    best = min(max(times(seconds, cuts)) for cuts in every)
    limit = best * (1 + SLACK)
    fewest = min(travelling(graph, cuts) for cuts in every if max(times(seconds, cuts)) <= limit + 1e-12)
    found = balance_stages(graph, stages, seconds).cuts
    assert max(times(seconds, found)) <= limit + 1e-9
    assert travelling(graph, found) <= fewest


def test_one_stage_is_the_whole() -> None:
    graph = graph_of([node(0), node(1, [0])])
    assert balance_stages(graph, 1, [1, 1]).cuts == ()
    assert Partition(graph, ()).nodes(0) == graph.nodes
    assert Partition(graph, ()).crossings == ()


def test_what_gives_the_loss_reaches_the_last_stage() -> None:
    graph = graph_of([node(0), node(1), node(2, [1]), node(3, [2])], outputs=("n3", "n0"))
    (early, skip) = Partition(graph, (2,)).crossings
    assert (early.value, early.producer, early.consumers) == ("n0", 0, (1,))
    assert skip.value == "n1"
    free = graph_of([node(0, free=True), node(1), node(2, [1])], outputs=("n2", "n0"))
    assert [n.name for n in Partition(free, (2,)).nodes(1)] == ["n0", "n2"]
    assert [n.name for n in Partition(free, (2,)).nodes(0)] == ["n1"]


def test_an_opaque_model_is_not_cut() -> None:
    graph = capture(models.Branching(), models.classify, models.vectors(4, 0))
    with pytest.raises(PolylaneError, match="the model is opaque and cannot be cut") as caught:
        balance_stages(graph, 2, node_seconds(graph))
    assert "hard_models.py" in str(caught.value)


# By hand -------------------------------------------------------------------------------------------------------------


def in_stages(
    partition: Partition, whole: ModelWithLoss, leaves: Sequence[Any], part: SampleSlice
) -> tuple[Tensor, ...]:
    """Forward and backward one stage after another, each with tensors of its own; gradients stay behind."""
    graph, code = partition.graph, partition.graph.code.fx
    by_name = {n.meta["name"]: n for n in code.nodes if n.op == "call_function"}
    table = tensors_by_role(whole, graph.code.constants, leaves)
    sent: dict[str, Tensor] = {}
    incoming: list[dict[str, Tensor]] = []
    values: dict[fx.Node, Any] = {}
    for stage in range(partition.stages):
        values = {n: placeholder_value(n, table, part) for n in code.nodes if n.op == "placeholder"}
        mine = [c for c in partition.crossings if stage in c.consumers]
        incoming.append({c.value: sent[c.value].detach().clone().requires_grad_(c.requires_grad) for c in mine})
        values |= {by_name[name]: tensor for name, tensor in incoming[-1].items()}
        for each in partition.nodes(stage):
            at = by_name[each.name]
            args, kwargs = fx.map_arg((at.args, at.kwargs), values.__getitem__)
            values[at] = at.target(*args, **kwargs)
        sent |= {c.value: values[by_name[c.value]] for c in partition.crossings if c.producer == stage}
    result = tuple(values[n] for n in code.output_node().args[0])
    result[0].backward()
    for stage in reversed(range(partition.stages - 1)):
        for c in partition.crossings:
            if c.producer == stage and c.requires_grad and sent[c.value].requires_grad:
                grads = [g for s in c.consumers if (g := incoming[s][c.value].grad) is not None]
                if grads:
                    sent[c.value].backward(sum(grads), retain_graph=True)
    return result


CUTTABLE = [name for name in (*models.CASES, *models.TINY) if name != "branching"]


@pytest.mark.parametrize("name", subsets.one_in(3, subsets.one_in(2, CUTTABLE), first=2))
def test_stages_by_hand_give_the_same_numbers(name: str) -> None:
    graph, model, case = captured(name, in_float64=True)
    leaves, rebuild = flatten(case.batch(3, 2))
    leaves = cast_leaves(leaves, torch.float64)
    whole = ModelWithLoss(model, case.loss, rebuild)
    part = SampleSlice(3, first=2, batch=7, step=4, seed=9)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    seen: list[list[Tensor]] = []
    for stages in (1, 2, 4):
        model.load_state_dict(state)
        model.zero_grad()
        if stages > len(cut_positions(graph)) + 1:
            continue
        result = in_stages(balance_stages(graph, stages, node_seconds(graph)), whole, leaves, part)
        seen.append([*result, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()])
        seen[-1] = [tensor.detach().clone() for tensor in seen[-1]]
    model.load_state_dict(state)
    for other in seen[1:]:
        assert len(other) == len(seen[0])
        for a, b in zip(seen[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert len(seen) > 1


def test_a_count_made_early_crosses_to_the_loss() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        x, y = batch
        count = (y > 0).sum()
        return Mean((F.cross_entropy(model(x), y, reduction="none") * (y > 0)).sum(), count)

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = models.vectors(6, 0)
    graph = capture(model, loss, batch)
    partition = balance_stages(graph, 2, node_seconds(graph))
    whole = ModelWithLoss(model, loss, flatten(batch)[1])
    result = in_stages(partition, whole, list(batch), SampleSlice(6, batch=6))
    expected = loss(model, batch)
    assert torch.equal(result[0], expected.total)
    assert int(result[1]) == int(expected.count)


def test_a_count_of_samples_is_made_anew() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        count = len(batch[1])
        return Mean(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), count)

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    graph = capture(model, loss, models.vectors(6, 0))
    partition = balance_stages(graph, 2, node_seconds(graph))
    batch = models.vectors(3, 1)
    result = in_stages(partition, ModelWithLoss(model, loss, flatten(batch)[1]), list(batch), SampleSlice(3, batch=3))
    assert int(result[1]) == 3


# Elsewhere -----------------------------------------------------------------------------------------------------------


def cuttable(n: int) -> list[Any]:
    """Every n-th model, those that are captured for other tests; the others are slow."""
    every = subsets.one_in(n, [*models.CASES, *models.TINY])
    return [each for each in every if each.values[0] in CUTTABLE]


@pytest.mark.parametrize("name", subsets.one_in(2, cuttable(4), first=1))
def test_the_graph_of_evaluation_is_cut_where_the_first_was(name: str) -> None:
    cut_alike(captured(name)[0], captured(name, training=False)[0])


@pytest.mark.parametrize("name", subsets.one_in(3, cuttable(3), first=2))
def test_a_graph_for_other_batches_is_cut_where_the_first_was(name: str) -> None:
    graph, other = captured(name)[0], captured(name, samples=3)[0]
    for reference, partition in cut_alike(graph, other):
        assert partition.cuts == reference.cuts


def cut_alike(graph: Graph, other: Graph) -> list[tuple[Partition, Partition]]:
    """Both graphs cut into two and into three stages, as far as they can be."""
    found = []
    for stages in (2, 3):
        if stages > min(len(cut_positions(g)) for g in (graph, other)) + 1:
            continue
        reference = balance_stages(graph, stages, node_seconds(graph))
        partition = align_partition(reference, other)
        assert partition.stages == stages
        assert set(partition.cuts) <= set(cut_positions(other))
        for stage in range(stages):
            assert set(partition.parameters(stage)) <= set(reference.parameters(stage))
        found.append((reference, partition))
    return found


def named(i: int, name: str, inputs: Sequence[str] = (), free: bool = False) -> Node:
    module = name.partition("/")[0]
    weights = () if free else (f"{module}.weight",)
    return replace(node(i, free=free), name=name, inputs=tuple(inputs), module=module, parameters=weights)


def test_what_only_training_has_leaves_its_stage_empty() -> None:
    names = ("stem/op", "aux/op", "body/op")
    loss = replace(node(3), name="loss/op", inputs=("aux/op", "body/op"), module="loss")
    training = graph_of([named(0, names[0]), *(named(i, names[i], ["stem/op"]) for i in (1, 2)), loss])
    other = [named(0, "stem/op"), named(1, "body/op", ["stem/op"]), replace(loss, inputs=("body/op",))]
    partition = align_partition(Partition(training, (1, 2)), graph_of(other))
    assert partition.stages == 3 and partition.cuts == (1, 1)
    assert [[n.name for n in partition.nodes(s)] for s in range(3)] == [["stem/op"], [], ["body/op", "loss/op"]]
    assert [(c.value, c.producer, c.consumers) for c in partition.crossings] == [("stem/op", 0, (2,))]
    assert partition.parameters(1) == ()
    first, last = graph_of([replace(other[1], inputs=())]), graph_of(other[:1])
    assert align_partition(Partition(training, (1, 2)), first).cuts == (0, 0)
    only = align_partition(Partition(training, (1, 2)), last)
    assert only.cuts == (1, 1) and [(c.value, c.consumers) for c in only.crossings] == [("stem/op", (2,))]  # the loss


def test_a_module_that_several_stages_have_may_be_used_on_any_of_them() -> None:
    """In training a network is used before and behind the one that is trained; later only behind it."""
    training = graph_of(
        [
            named(0, "shared/op"),
            named(1, "a/op"),
            named(2, "b/op", ["a/op"]),
            replace(named(3, "shared/op#2", ["b/op"]), module="shared", parameters=("shared.weight",)),
        ]
    )
    later = graph_of([named(0, "a/op"), named(1, "b/op", ["a/op"]), named(2, "shared/op", ["b/op"])])
    assert align_partition(Partition(training, (2,)), later).cuts == (1,)
    assert align_partition(Partition(training, (3,)), later).cuts == (3,)  # on that of its namesake, if it may


def test_a_sparse_tensor_of_the_batch_is_made_on_every_stage_and_never_sent() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, indices, values = (leaf[0] for leaf in batch)
        edges = torch.sparse_coo_tensor(indices, values, (4, 4), check_invariants=False)
        return torch.sparse.mm(edges, model[1](torch.sparse.mm(edges, model[0](x)).tanh())).pow(2).mean()

    indices = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    graph = capture(model, loss, (torch.ones(1, 4, 3), indices[None], torch.ones(1, 4)))
    made = [node for node in graph.nodes if node.op.startswith("aten.sparse_coo_tensor")]
    assert made and all(node.recomputable and not node.can_cross_stages for node in made)
    partition = balance_stages(graph, 2, node_seconds(graph))
    assert all({node.name for node in made} <= {node.name for node in partition.nodes(stage)} for stage in range(2))
    assert not {crossing.value for crossing in partition.crossings} & {node.name for node in made}


def test_pieces_that_come_to_wait_for_each_other_are_refused() -> None:
    """In training the two heads of one stage stand side by side; here one reads what was made of the other."""
    a, b, c = (named(i, f"{name}/op", [f"{'abc'[i - 1]}/op"] if i else ()) for i, name in enumerate("abc"))
    training = graph_of([a, replace(b, inputs=()), replace(c, inputs=("b/op",))])
    reference = Partition(training, (1, 2), (0, 1, 0))
    assert align_partition(reference, training).edges == ((1, 0),)
    with pytest.raises(PolylaneError) as caught:
        align_partition(reference, graph_of([a, b, c]))
    assert str(caught.value) == (
        "stages wait for each other in a graph that is cut where the training's is (of evaluation, of another loss, "
        "for batches of another form): stage 1 needs a/op of stage 0, stage 0 needs b/op of stage 1; put what lies "
        "between on one of them, or give the pieces a stage each"
    )


def test_an_opaque_graph_of_a_cut_model_is_refused() -> None:
    graph = capture(models.Branching(), models.classify, models.vectors(4, 0))
    reference = Partition(graph_of([node(0), node(1, [0])]), (1,))
    with pytest.raises(PolylaneError, match="the model is opaque and cannot be cut"):
        align_partition(reference, graph)


def deep(layers: int, width: int = 8, per_layer: int = 45) -> Graph:
    nodes: list[Node] = []
    for i in range(layers * per_layer):
        inputs = [i - 1] if i else []
        if i > 20 and i % 9 == 0:
            inputs.append(i - 20)
        nodes.append(node(i, inputs, width, free=False))
    return graph_of(nodes)


def test_a_deep_graph_is_cut_evenly_at_a_cost_that_grows_as_its_depth() -> None:
    def cut(graph: Graph, seconds: np.ndarray) -> list[int]:
        partition = balance_stages(graph, 8, seconds)
        return [len(partition.nodes(stage)) for stage in range(8)] + [len(partition.crossings)]

    shallow, graph = deep(24), deep(48)
    seconds = np.random.default_rng(0).random(len(graph.nodes))
    partition = balance_stages(graph, 8, seconds)
    assert [len(partition.nodes(stage)) > 100 for stage in range(8)] == [True] * 8
    assert len(partition.crossings) >= 7
    assert max(times(seconds, partition.cuts)) < sum(seconds) / 8 * 1.05
    half = seconds[: len(shallow.nodes)]
    assert calls(lambda: cut(graph, seconds)) < 2.2 * calls(lambda: cut(shallow, half))
