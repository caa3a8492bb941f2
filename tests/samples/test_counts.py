"""Losses on parts of a batch: with counts of the whole batch they make up the loss and the gradients of one device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import flatten, sample_count, sampled_leaves, take_samples
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.self_check import run_code, tensors_by_role
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.whole_batch_counts import statistics_of
from polylane.recipe import Mean
from polylane.samples.batch_division import loss_couples_samples
from polylane.samples.batch_statistics import BatchStatistics, CountingReplicas
from polylane.samples.counts import count_whole_batch
from polylane.samples.derivation import derive_composition
from tests.support import subsets

Loss = Callable[[Any, Any], Any]
Batch = tuple[Tensor, Tensor, Tensor]
CLASSES = 4
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def make(samples: int, seed: int, innocent: bool = False) -> Batch:
    """Inputs (samples, 6), labels of which some are ignored, weights of which some are 0; all count if innocent."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=random, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (samples,), generator=random)
    weights = torch.rand(samples, generator=random, dtype=torch.float64)
    if innocent:
        return x, labels, torch.ones_like(weights)
    labels[torch.rand(samples, generator=random) < 0.4] = -100
    labels[0] = 1  # somebody counts
    weights[weights < 0.3] = 0.0
    weights[-1] = 0.9
    return x, labels, weights


def each(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of every sample."""
    return F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="none")


def selected(model: nn.Module, batch: Batch) -> Tensor:
    mask = batch[2] > 0.5
    return F.smooth_l1_loss(model(batch[0])[mask], batch[0][mask][:, :CLASSES])


def places(batch: Batch) -> Tensor:
    """The numbers of the rows that count."""
    return (batch[2] > 0.5).nonzero().squeeze(1)


def written(model: nn.Module, batch: Batch) -> Tensor:
    """A vector into which a sum is written in place, and which is read as a whole."""
    kept = torch.zeros(2, dtype=torch.float64)
    kept[0] = each(model, batch).sum()
    kept[1] = 1.0
    return kept


def normalized(model: nn.Module, batch: Batch) -> Tensor:
    weights = batch[2] / batch[2].sum()
    return (each(model, batch) * weights / (weights * weights).sum()).mean()


def several(model: nn.Module, batch: Batch) -> Tensor:
    out, positive = model(batch[0]), batch[2] > 0.5
    boxes = F.l1_loss(out[positive], batch[0][positive][:, :CLASSES], reduction="sum") / positive.sum().clamp(min=1)
    norm = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(out, batch[1]) + 0.3 * out.square().mean() + boxes + 0.01 * norm


def stacked(model: nn.Module, batch: Batch, weights: Tensor) -> Tensor:
    """Losses of several tasks with weights that are learned (Kendall et al., CVPR 2018): sums and means, stacked."""
    out = model(batch[0])
    tasks = torch.stack([F.cross_entropy(out, batch[1]), out.square().mean(), each(model, batch).sum(), weights.sum()])
    return (tasks * torch.exp(-weights) + weights).sum()


def centred(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0] - batch[0].mean(0)
    return model(x / x.abs().amax().clamp(min=0.1)).square().mean()


def explicit(model: nn.Module, batch: Batch) -> Mean:
    return Mean((each(model, batch) * batch[2]).sum(), batch[2].sum())


# Losses that the parts of a batch make up, whatever the batch.
ADDITIVE: dict[str, Loss] = {
    "ignored labels": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    "smoothed labels": lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
    "weighted classes": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=WEIGHTS, label_smoothing=0.2),
    "likelihood": lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1], WEIGHTS),
    "weighted mean": lambda m, b: (each(m, b) * b[2]).sum() / b[2].sum(),
    "weighted mean, clamped": lambda m, b: (each(m, b) * b[2]).sum() / b[2].sum().clamp(min=3.0),
    "selected rows": lambda m, b: each(m, b)[b[2] > 0.5].mean(),
    "masked select": lambda m, b: each(m, b).masked_select(b[2] > 0.5).mean(),
    "selected before the loss": lambda m, b: F.cross_entropy(m(b[0])[b[2] > 0.5], b[1].clamp(min=0)[b[2] > 0.5]),
    "regression of selected rows": selected,
    "rows at places": lambda m, b: F.cross_entropy(m(b[0])[places(b)], b[1].clamp(min=0)[places(b)]),
    "rows where": lambda m, b: each(m, b)[torch.where(b[2] > 0.5)].mean(),
    "all features of selected rows": lambda m, b: m(b[0])[b[2] > 0.5].flatten().square().mean(),
    "positives": lambda m, b: (each(m, b) * (b[2] > 0.5)).sum() / (b[2] > 0.5).sum(),
    "several terms": several,
    "terms in a stack": lambda m, b: stacked(m, b, m[0].bias[:4]),
    "a sum": lambda m, b: each(m, b).sum(),
    "a sum over the batch's size": lambda m, b: each(m, b).sum() / len(b[0]),
    "a sum beside a mean": lambda m, b: each(m, b).sum() + m(b[0]).square().mean(),
    "weights over their sum, twice": normalized,
    "weights over their maximum": lambda m, b: (each(m, b) * b[2] / b[2].max()).mean(),
    "inputs less their mean": centred,
    "each over the batch's size": lambda m, b: (each(m, b) / len(b[0])).sum(),
    "an explicit mean": explicit,
    "an explicit mean of a mean": lambda m, b: Mean(each(m, b).mean(), len(b[0]) * each(m, b).new_ones(())),
    "probabilities": lambda m, b: F.cross_entropy(m(b[0]), b[0][:, :CLASSES].softmax(1)),
    "divergence": lambda m, b: F.kl_div(m(b[0]).log_softmax(1), b[0][:, :CLASSES].softmax(1), reduction="batchmean"),
}

# Losses that they do not make up.
MEETING: dict[str, Loss] = {
    "hard examples": lambda m, b: each(m, b).topk(len(b[0]) // 2).values.mean(),
    "sorted": lambda m, b: (each(m, b).sort().values * torch.arange(len(b[0]))).mean(),
    "above their mean": lambda m, b: (each(m, b) * (each(m, b) > each(m, b).mean())).mean(),
    "selected by the loss": lambda m, b: each(m, b)[each(m, b) > 1.0].mean(),
    "variance": lambda m, b: m(b[0]).var(0, correction=0).mean(),
    "a mean squared": lambda m, b: each(m, b).mean() ** 2,
    "stacked terms, squared": lambda m, b: torch.stack([F.cross_entropy(m(b[0]), b[1]), each(m, b).mean()]).norm(),
    "a root of a mean": lambda m, b: m(b[0]).square().mean().sqrt(),
    "median": lambda m, b: each(m, b).median(),
    "negatives in the batch": lambda m, b: F.cross_entropy(m(b[0]) @ m(b[0]).T, torch.arange(len(b[0]))),
    "weights over the losses' sum": lambda m, b: (each(m, b) * (each(m, b) / each(m, b).sum()).detach()).sum(),
    "places of other rows": lambda m, b: each(m, b)[(places(b) + 1) % len(b[0])].mean(),
    "places as numbers": lambda m, b: (m(b[0])[places(b)] * places(b)[:, None]).mean(),
    "a sum written into a vector": lambda m, b: written(m, b).square().sum(),
    "the largest of what is written": lambda m, b: written(m, b).max(),
    "by a size that is one for few": lambda m, b: (each(m, b) / (len(b[0]) // 32 + 1)).mean(),
    "the last row's number": lambda m, b: (each(m, b) * torch.where(b[2] > 0.5)[0].max()).mean(),
    "the longest of selected rows": lambda m, b: (each(m, b) / b[2][b[1] > 0].max()).mean(),
    "a count times the batch": lambda m, b: each(m, b).sum() / ((b[2] > 0.5).double().sum() * len(b[0])).sqrt(),
    "pairs of selected rows": lambda m, b: (each(m, b)[b[2] > 0.5][:1] - each(m, b)[b[2] <= 0.5]).square().mean(),
    "the first sample": lambda m, b: each(m, b)[0],
    "no more than ten samples": lambda m, b: each(m, b)[:10].mean(),
    "labels that the model makes": lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), m(b[0]).argmax(1)),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


@cache
def captured(loss: Loss) -> tuple[Graph, nn.Module]:
    """Captured on a batch of which nothing tells that not all samples count alike."""
    model = network()
    return count_whole_batch(capture(model, loss, make(6, 0, innocent=True))), model


def by_parts(graph: Graph, model: nn.Module, loss: Loss, batch: Batch, sizes: Sequence[int]) -> tuple[Tensor, Any]:
    """The loss over parts of a batch, each with its share of the samples, and its gradients."""
    leaves, rebuild = flatten(batch)
    samples, sampled = sample_count(leaves), sampled_leaves(leaves)
    model = copy.deepcopy(model)
    whole, code = ModelWithLoss(model, loss, rebuild), fx.GraphModule(nn.Module(), graph.code.fx)
    ends = [0, *accumulate(sizes)]
    parts = [SampleSlice(b - a, a, samples, i) for i, (a, b) in enumerate(pairwise(ends))]
    own = [take_samples(leaves, a, b, sampled) for a, b in pairwise(ends)]
    constants = {("constant", name): value for name, value in graph.code.constants.items()}
    counts = BatchStatistics(graph.code.fx).compute_statistics(parts, own, constants)
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for part, x in zip(parts, own, strict=True):
        part = SampleSlice(part.samples, part.first, samples, part.microbatch, whole=lambda key, _: counts[key])
        result = run_code(code, graph.code.fx, tensors_by_role(whole, graph.code.constants, x), part)
        total = total + (result[0] * part.samples / samples if graph.loss_is_mean else result[0])
        count = count + (0.0 if graph.loss_is_mean else result[1].detach())
    value = total if graph.loss_is_mean else total / count
    value.backward()
    return value.detach(), [p.grad for p in model.parameters()]


def plainly(model: nn.Module, loss: Loss, batch: Batch) -> tuple[Tensor, Any]:
    model = copy.deepcopy(model)
    value = loss(model, batch)
    value = value.total / value.count if isinstance(value, Mean) else value
    value.backward()
    return value.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", subsets.one_in(2, ADDITIVE))
@settings(max_examples=subsets.examples(5), deadline=None)
@given(data=st.data())
def test_parts_make_up_the_loss_and_its_gradients(name: str, data: st.DataObject) -> None:
    graph, model = captured(ADDITIVE[name])
    assert derive_composition(graph).is_proven and not loss_couples_samples(graph, 3, 2)
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    batch = make(sum(sizes), data.draw(st.integers(0, 99)))
    torch.testing.assert_close(
        by_parts(graph, model, ADDITIVE[name], batch, sizes),
        plainly(model, ADDITIVE[name], batch),
        rtol=1e-11,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", subsets.one_in(2, MEETING))
def test_what_the_parts_do_not_make_up_is_never_taken_for_it(name: str) -> None:
    graph, _ = captured(MEETING[name])
    assert not derive_composition(graph).is_proven and not statistics_of(graph.code.fx)
    assert loss_couples_samples(graph, 1, 2)
    with pytest.raises(PolylaneError, match=r"microbatches=2 would not compute .*test_counts.py:\d+"):
        loss_couples_samples(graph, 2, 1)


@settings(max_examples=subsets.examples(10), deadline=None)
@given(data=st.data())
def test_replicas_count_what_one_worker_counts(data: st.DataObject) -> None:
    graph, _ = captured(normalized)
    shares = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(any))
    batch = make(sum(shares), 1)
    leaves, samples = flatten(batch)[0], sum(shares)
    ends = [0, *accumulate(shares)]
    counted = BatchStatistics(graph.code.fx)
    alone = counted.compute_statistics([SampleSlice(samples, 0, samples)], [leaves], {})

    def counts(replica: int, add: Callable[[Tensor], Tensor]) -> Any:
        start, stop = ends[replica], ends[replica + 1]
        weight = int(stop > start)
        start, stop = (start, stop) if weight else (0, 1)  # on another one's sample, which does not count
        part = SampleSlice(stop - start, start, samples, weight=weight)
        return counted.compute_statistics(
            [part], [take_samples(leaves, start, stop)], {}, CountingReplicas(add, replica, len(shares))
        )

    given, meet = [torch.empty(0)] * len(shares), threading.Barrier(len(shares))

    def adder(replica: int) -> Callable[[Tensor], Tensor]:
        def add(own: Tensor) -> Tensor:
            given[replica] = own
            meet.wait()
            total = torch.stack(given).sum(0)
            meet.wait()
            return total

        return add

    with ThreadPoolExecutor(len(shares)) as pool:
        for result in pool.map(lambda r: counts(r, adder(r)), range(len(shares))):
            torch.testing.assert_close(result, alone, rtol=1e-12, atol=0)


def test_on_a_whole_batch_nothing_changes() -> None:
    for loss in ADDITIVE.values():
        graph, model = captured(loss)
        torch.testing.assert_close(
            by_parts(graph, model, loss, make(7, 3), [7]), plainly(model, loss, make(7, 3)), rtol=1e-12, atol=1e-13
        )


def test_what_is_no_mean_over_counts_stays_as_it_was_captured() -> None:
    graph = capture(network(), ADDITIVE["divergence"], make(6, 0))
    assert [n.name for n in count_whole_batch(graph).nodes][: len(graph.nodes)] == [n.name for n in graph.nodes]
    meeting = capture(network(), MEETING["median"], make(6, 0))
    assert count_whole_batch(meeting) is meeting


class Counting(nn.Module):
    """A buffer that counts the calls, and that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.fc(x) * torch.where(self.calls > 2, 2.0, 1.0)


def test_a_buffer_that_counts_calls_counts_batches() -> None:
    captured = capture(Counting(), lambda m, b: m(b).square().mean(), torch.randn(4, 6))
    assert not loss_couples_samples(count_whole_batch(captured), 2, 3)
    with pytest.raises(PolylaneError, match=r"writes the buffer calls once for each microbatch \(.*test_counts"):
        loss_couples_samples(captured, 2, 1)


class Averaging(nn.Module):
    """A moving average of its inputs."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.fc, self.hidden = nn.Linear(6, CLASSES), hidden
        self.register_buffer("average", torch.zeros(CLASSES if hidden else 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.average.lerp_((y.detach() if self.hidden else x).mean(0), 0.5)
        return y


def test_a_buffer_must_be_alike_on_all_replicas() -> None:
    square: Loss = lambda m, b: m(b).square().mean()  # noqa: E731
    inputs = count_whole_batch(capture(Averaging(False), square, torch.randn(4, 6)))
    assert not loss_couples_samples(inputs, 1, 2)  # the inputs' mean is counted over the whole batch
    hidden = count_whole_batch(capture(Averaging(True), square, torch.randn(4, 6)))
    assert loss_couples_samples(hidden, 1, 2)
    with pytest.raises(PolylaneError, match="the buffer average depends on how the samples are divided"):
        loss_couples_samples(hidden, 2, 1)
