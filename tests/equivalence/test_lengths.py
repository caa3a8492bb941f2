"""Batches whose sizes vary (lengths of texts, sides of images): one graph for all, and the numbers of a plain loop."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.recipe import Mean
from polylane.runtime import compile_cache
from polylane.runtime.job import Job
from polylane.verify.verify import verify
from tests.support.workers.training import sgd, workers

# The example's first; none but it is known before the first step. Odd ones, primes, shorter and longer ones.
LENGTHS = (8, 5, 12, 3, 2)
FEW_LENGTHS = (8, 5, 12, 3)  # where each length is placed anew, which takes its time
WORDS = 19

Losses = list[float]


class Text(nn.Module):
    """A small encoder with learned positions, a causal mask and rotated queries, all made from the length."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(32, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.head, self.heads = nn.Linear(width, WORDS), heads

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        h = self.words(x) + self.places(torch.arange(length))
        q, k, v = self.qkv(h).view(x.shape[0], length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        angles = torch.outer(torch.arange(length).to(h.dtype), torch.tensor([1.0, 0.1], dtype=h.dtype))
        q, k = rotated(q, angles), rotated(k, angles)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        h = h + self.out(y.transpose(1, 2).flatten(2))
        return self.head(h + self.down(F.gelu(self.up(self.norm(h)))))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of a head's features, turned by an angle of their place (rotary positions)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


def text_batch(length: int, samples: int = 6) -> tuple[Tensor, Tensor]:
    """Words and labels, of which every sample ignores another number."""
    generator = torch.Generator().manual_seed(length)
    words, labels = torch.randint(0, WORDS, (2, samples, length), generator=generator)
    for i in range(samples):
        labels[i, : (i * length) // (samples + 2)] = -100
    return words, labels


def mean_of_labels(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def counted(model: nn.Module, batch: Sequence[Tensor]) -> Mean:
    total = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="sum")
    return Mean(total, (batch[1] != -100).sum())


class Picture(nn.Module):
    """Convolutions, batch normalization and a pooling to one place: any sides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return self.head(self.second(x).relu().mean((2, 3)))


SIDES = ((8, 8), (10, 8), (7, 9), (12, 6), (11, 11))


def picture_batch(sides: tuple[int, int], samples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(sides))
    x = torch.randn(samples, 2, *sides, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def classify(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def plain_losses(model: nn.Module, loss: Any, batches: Sequence[Any], parts: int = 1) -> tuple[Losses, dict[str, Any]]:
    """Losses and weights of a plain loop; BatchNorm sees ``parts`` microbatches, as in one that accumulates."""
    model = copy.deepcopy(model)
    optimizer, losses = sgd(model.named_parameters()), Losses()
    for batch in batches:
        optimizer.zero_grad()
        samples, total = len(batch[0]), 0.0
        for part in zip(*(leaf.tensor_split(parts) for leaf in batch), strict=True):
            result = loss(model, part)
            value = result.total / result.count if isinstance(result, Mean) else result
            share = value * (len(part[0]) / samples)
            share.backward()
            total += float(share.detach())
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def train_and_count(job: Job, batches: Sequence[Any]) -> tuple[Losses, dict[str, Any], list[bool]]:
    """Losses, weights, and for each capture whether it left sizes open."""
    captures, binder = list[bool](), job._role._cache._compiler
    capture = binder.capture

    def noting(*args: Any) -> Any:
        captures.append(args[-1] is not None)
        return capture(*args)

    binder.capture = noting  # type: ignore[method-assign]
    losses = [float(job.step(batch).loss) for batch in batches]
    return losses, job.state_dict(), captures


def same_weights(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("plan", "loss", "lengths"),
    [
        pytest.param("data=2", mean_of_labels, LENGTHS, marks=pytest.mark.slow),  # as pictures are
        ("pipeline=2,microbatches=3", counted, LENGTHS),
        ("tensor=2", mean_of_labels, LENGTHS),
        ("sequence=3", mean_of_labels, LENGTHS),  # two places are fewer than its ranks
        pytest.param(
            "pipeline=2,sequence=2,microbatches=4,schedule=zb-h1,recompute=full",
            counted,
            LENGTHS[:4],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_texts_of_many_lengths_are_captured_once(plan: str, loss: Any, lengths: Sequence[int]) -> None:
    """The example's graph, compiled ahead, and one more: no length after the second one causes a capture."""
    model, batches = built(Text), [text_batch(length) for length in lengths]
    losses, weights = plain_losses(model, loss, batches)
    for found, state, captures in workers(
        lambda job: train_and_count(job, batches), model, plan, loss=loss, example=batches[0]
    ):
        assert captures == [True]
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
        same_weights(state, weights)


@pytest.mark.parametrize(("plan", "parts", "opens"), [("data=2", 1, 1), ("pipeline=2,microbatches=2", 2, 2)])
def test_pictures_of_any_sides_are_captured_once(plan: str, parts: int, opens: int) -> None:
    """Both sides vary, together, or first the one and then the other: each opens what has varied until then."""
    model, batches = built(Picture), [picture_batch(sides) for sides in (SIDES[0], *SIDES[3 - opens :])]
    losses, weights = plain_losses(model, classify, batches, parts)
    for found, state, captures in workers(
        lambda job: train_and_count(job, batches), model, plan, loss=classify, example=batches[0]
    ):
        assert captures == [True] * opens
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
        same_weights(state, weights)


def test_verify_compares_lengths_with_the_model_itself() -> None:
    """Masks of dropout depend on the place in the whole batch, at every length; the model draws them by their keys."""
    batches, objectives = [text_batch(length) for length in LENGTHS[:3]], build_objectives(mean_of_labels, sgd, None)
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Dropout(0.4), nn.Linear(4, WORDS))
    verdict = verify(model, objectives["loss"], batches, "data=2")
    assert verdict.passed and verdict.reference == "the plain model, on whole batches"


class Edges(nn.Module):
    """A layer of a graph network: nodes are the samples, and the number of edges is a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.head(h + torch.zeros_like(h).index_add(0, edges[1], self.second(h)[edges[0]]) / edges.shape[1])


def nodes_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


def graph_batch(nodes: int, edges: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes + edges)
    x = torch.randn(nodes, 5, generator=generator, dtype=torch.float64)
    ends = torch.randint(0, nodes, (2, edges), generator=generator)
    return x, ends, torch.randint(0, 3, (nodes,), generator=generator)


def test_numbers_of_nodes_and_edges_vary() -> None:
    model, batches = built(Edges), [graph_batch(*sizes) for sizes in ((9, 30), (9, 34), (12, 41), (6, 20), (8, 8))]
    optimizer, losses = sgd((plain := copy.deepcopy(model)).named_parameters()), Losses()
    for batch in batches:
        optimizer.zero_grad()
        loss = nodes_loss(plain, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    ((found, state, captures),) = workers(
        lambda job: train_and_count(job, batches), model, "data=1", loss=nodes_loss, example=batches[0]
    )
    assert captures == [True]
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
    same_weights(state, plain.state_dict())


class Branching(nn.Module):
    """Computes one thing for short texts and another for long ones, and a third for odd lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        h = h.cumsum(1) if x.shape[1] > 8 else h.flip(1) * 3
        if x.shape[1] % 2:
            h = h.square()
        return self.head(h.mean(1) + h[:, 0])


def test_no_length_runs_the_branch_of_another() -> None:
    model = built(Branching)
    batches = [(text_batch(n)[0], torch.arange(6) % 3) for n in (4, 6, 10, 7, 12, 3, 9, 14, 2, 11, 8, 5, 13, 20, 15)]
    losses, weights = plain_losses(model, classify, batches)
    ((found, state, captures),) = workers(
        lambda job: train_and_count(job, batches), model, "data=1", loss=classify, example=batches[0]
    )
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
    same_weights(state, weights)
    # Each of the four kinds of lengths has a graph of its own; captures that could not be opened came before.
    assert captures.count(False) + captures.count(True) < len(batches)


class Fixed(nn.Module):
    """A layer as wide as the text is long: the length of one graph cannot be that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) / 8
        for place in range(x.shape[1]):  # as many operators as places
            h = h + h[:, place : place + 1]
        return self.head(h[:, 0])


def test_what_cannot_be_left_open_is_kept_within_a_bound_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used graph goes, with its memory; the user is told what varies, what it costs, what to do."""
    monkeypatch.setattr(compile_cache, "FORMS_KEPT", 3)
    model = built(Fixed)
    batches = [(text_batch(n)[0], torch.arange(6) % 3) for n in (2, *range(3, 12), 11, 4, 3)]
    losses, _ = plain_losses(model, classify, batches)

    def work(job: Job) -> tuple[Losses, list[int], list[bool], list[str]]:
        cache, graphs, counts, found = job._role._cache, list[Any](), list[int](), Losses()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for batch in batches:
                found.append(float(job.step(batch).loss))
                counts.append(len(cache))
                graphs.append(weakref.ref(next(reversed(cache._entries.values())).graph.partition.graph.code.fx))
        gc.collect()
        return found, counts, [graph() is not None for graph in graphs], [str(each.message) for each in told]

    ((found, counts, alive, told),) = workers(work, model, "data=1", loss=classify, example=batches[0])
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
    assert max(counts) == 4  # that of the example, which was compiled ahead, and three more
    assert sum(alive[:-3]) <= 2 and alive[-1]
    (sentence,) = told
    assert all(words in sentence for words in ("batch[0].shape[1] varies from batch to batch", " s and", "pad batches"))


def test_workers_that_padded_differently_are_told() -> None:
    """Each collates its own samples: by this plan all of them must have one length. The first batch is read whole."""
    samples = [tuple(leaf[0] for leaf in text_batch(length, 1)) for length in (*(5,) * 6, 7, 5)]

    def padded(own: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return tuple(nn.utils.rnn.pad_sequence(list(leaves), batch_first=True) for leaves in zip(*own, strict=True))

    def work(job: Job) -> None:
        for batch in job.batches(samples, 4, collate=padded, shuffle=False):
            job.step(batch)

    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
    with pytest.raises(PolylaneError, match="collated their samples of a batch to different sizes"):
        workers(work, model, "data=2,shard=parameters", loss=mean_of_labels, example=padded(samples[:4]))
