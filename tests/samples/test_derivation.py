"""Order of samples without computing anything: what is proven is so, and what turns samples around never is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.samples.batch_layout import BatchLayout
from polylane.samples.derivation import derive_composition
from tests.support import models, subsets
from tests.support.reference.computed_layouts import proven_orders, seen_orders


class Own(nn.Module):
    """A computation of one's own between two layers."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.fc, self.head = nn.Linear(16, 8), nn.Linear(8, 4)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc(x)
        logits: Tensor = self.head(self.compute(hidden if self.compute is not averaged else (self, hidden)))
        return logits


def averaged(given: tuple[Own, Tensor]) -> Tensor:
    own, x = given
    own.average.lerp_(x.detach().mean(0), 0.5)
    return x - own.average


def written(x: Tensor, piece: Callable[[Tensor], Tensor], what: Callable[[Tensor], Tensor]) -> Tensor:
    out = torch.zeros_like(x)
    view = piece(out)
    view.copy_(what(x))
    return out + view.sum() * 0 if view.dim() == 0 else out


def grouped(x: Tensor, descending: bool = False, product: Callable[..., Tensor] | None = None) -> Tensor:
    """Each row times the matrix of its expert, two experts each: rows sorted by expert, as in a mixture of experts."""
    keys, order = x.topk(2, dim=1).indices.reshape(-1).sort(descending=descending)
    ends = torch.histc(keys.float(), bins=8, min=0, max=7).cumsum(0, dtype=torch.int32)
    weights = torch.arange(8.0 * 8 * 8).sin().view(8, 8, 8).bfloat16()
    if product is None:
        rows = torch._grouped_mm(x[order // 2].bfloat16(), weights, offs=ends).to(x.dtype).tanh()
    else:
        rows = product(x[order // 2], weights.to(x.dtype), ends).tanh()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return rows[places].view(-1, 2, 8).sum(1)


def by_expert(x: Tensor, turned: bool, off: int = 0) -> Tensor:
    """Each expert on the rows that a mask finds for it, added to these rows' sum."""
    chosen, out = x.topk(2, dim=1).indices, torch.zeros_like(x)
    for expert in range(3):
        if turned:
            place, row = torch.where((chosen == expert).T)
        else:
            row, place = torch.where(chosen == expert)
        out = out.index_add(0, (row + off) % len(x) if off else row, (x[row] + chosen[row, place, None]).tanh())
    return out


def ordered(x: Tensor, what: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows in an order of data, changed there, and put back where they were."""
    order = x[:, 0].argsort()
    return what(x[order])[order.argsort()]


def flat(x: Tensor, columns: Tensor, distance: int = 4, off: int = 0) -> Tensor:
    """Means of some of a sample's four rows, read by flat numbers of all rows."""
    numbers = torch.arange(len(x))[:, None] * distance + columns
    numbers = numbers + off if off else numbers
    rows = x.reshape(-1, 2)[numbers.flatten()].tanh()
    return x * rows.view(len(x), -1, 2).mean(1).repeat(1, 4)


BREAKING: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda x: x.sort(0).values,
    "argsort": lambda x: x[x[:, 0].argsort()],
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "all samples in a roll": lambda x: x.roll(1),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "less the mean": lambda x: x - x.mean(0),
    "over the largest": lambda x: x / x.abs().amax(0),
    "the number of samples": lambda x: x / len(x),
    "each sample's number": lambda x: x * torch.arange(len(x))[:, None],
    "each sample's number looked up": lambda x: F.embedding(torch.arange(len(x)), x).flip(0),
    "triangle": lambda x: x.tril(),
    "without the first": lambda x: torch.cat([x[1:], x[:1]]),
    "twice": lambda x: torch.cat([x, x])[1 : len(x) + 1],
    "every other": lambda x: x[::2].repeat_interleave(2, 0)[: len(x)],
    "products of samples": lambda x: (x @ x.T).softmax(-1) @ x,
    "attention between samples": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "convolution over samples": lambda x: F.conv1d(x.T[None], torch.ones(8, 8, 3), padding=1)[0].T,
    "permutation": lambda x: x[torch.randperm(len(x))],
    "turned and cut": lambda x: x.T.reshape(x.shape),
    "an average that is written": averaged,
    "written in another order": lambda x: written(x, lambda out: out[:, 1:], lambda x: x.flip(0)[:, 1:]),
    "filled with the number of samples": lambda x: x * torch.empty(len(x), 1).fill_(len(x)),
    "numbers up to that of samples drawn": lambda x: x * torch.randint(1, len(x) + 1, (len(x), 1)),
    "numbers drawn for pairs of samples": lambda x: torch.rand(len(x), len(x)) @ x,
    "sorted, summed up": lambda x: ordered(x, lambda rows: rows.cumsum(0)),
    "sorted, beside a neighbour": lambda x: ordered(x, lambda rows: rows + rows.roll(1, 0)),
    "sorted, and a place as a value": lambda x: x * x[:, 0].argsort().argsort()[:, None],
    "sorted twice": lambda x: x[x[:, 0].argsort()][x[:, 0].argsort()],
    "sorted by one, added by another": lambda x: torch.zeros_like(x).index_add(
        0, x[:, 1].argsort(), x[x[:, 0].argsort()]
    ),
    "sorted, sizes of groups": lambda x: (
        x * torch.histc(x.argmax(1).sort().values.float(), 8, 0, 7)[x.argmax(1)][:, None]
    ),
    "flat numbers at half the distance": lambda x: flat(x, x[:, :2].topk(1).indices, distance=2),
    "flat numbers less one": lambda x: flat(x, x[:, :4].topk(2).indices, off=-1),
    "another's column": lambda x: x * x.T[x.argmax(1), torch.arange(len(x)).flip(0)][:, None],
    "added to another row": lambda x: by_expert(x, turned=False, off=1),
    "put to another row": lambda x: torch.zeros_like(x).index_put((x[:, 0].argsort(),), x),
    "written to one sample": lambda x: written(x, lambda out: out[0], lambda x: x[0]),
}
KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "the first of two": lambda x: torch.cat([x, x.exp()])[: len(x)],
    "turned and back": lambda x: x.T.exp().T,
    "heads": lambda x: (
        x.unflatten(1, (2, 4)).transpose(0, 1).flatten(0, 1).tanh().unflatten(0, (2, -1))[0].repeat(1, 2)
    ),
    "rows of several": lambda x: F.dropout(x.unflatten(1, (2, 4)).flatten(0, 1), 0.5).unflatten(0, (-1, 2)).flatten(1),
    "sorted features": lambda x: x.sort(1).values,
    "interleaved": lambda x: x.repeat_interleave(2, 0).unflatten(0, (-1, 2)).sum(1),
    "features turned": lambda x: x.flip(1).roll(2, -1).cumsum(1),
    "its own row": lambda x: x[torch.arange(len(x))[:, None], torch.arange(7, -1, -1)],
    "flat numbers of its own rows": lambda x: flat(x, x[:, :4].topk(2).indices),
    "flat numbers, the same columns of all": lambda x: flat(x, torch.arange(3)),
    "flat numbers by remainders": lambda x: flat(x, (x[:, :3] * 100).long() % 4),
    "flat numbers from a distance": lambda x: (
        x + x.reshape(-1, 2)[(torch.arange(0, len(x) * 4, 4)[:, None] + x[:, :4].argsort()).view(-1)].view(len(x), 8)
    ),
    "its own column": lambda x: x * x.T[x.argmax(1), torch.arange(len(x))][:, None],
    "its own column of several": lambda x: (
        x * x.T.unflatten(0, (2, 4))[:, x[:, :4].argmax(1), torch.arange(len(x))].T.repeat(1, 4)
    ),
    "its own last column": lambda x: x + x.T[:, torch.arange(len(x))].T.exp(),
    "sorted, and put back": lambda x: ordered(x, torch.exp),
    "found by expert": lambda x: by_expert(x, turned=False),
    "found by expert, samples last": lambda x: by_expert(x, turned=True),
    "sorted, and added to its row": lambda x: torch.zeros_like(x).index_add(0, (i := x[:, 0].argsort()), x[i].tanh()),
    "put into its own row": lambda x: x.index_put((torch.arange(len(x)), x.argmax(1)), torch.tensor(1.0)),
    "as another's type": lambda x: x.type_as(x[:, :1, None].expand(-1, 2, 2)),
    "zeros put beside": lambda x: torch.cat([x[:, 1:], torch.zeros(len(x), 1)], 1),
    "noise": lambda x: x + torch.randn_like(x),
    "dropped": lambda x: F.dropout(x, 0.3),
    "stochastic depth by samples": lambda x: x * torch.empty(len(x), 1).bernoulli_(0.7).div_(0.7),
    "stochastic depth of a batch": lambda x: x * torch.empty(1, 1).bernoulli_(0.7).div_(0.7),
    "stochastic depth in the samples' type": lambda x: x.div(0.7) * x.new_empty((len(x), 1)).bernoulli_(0.7),
    "stochastic depth from uniform numbers": lambda x: x * (0.7 + torch.rand(len(x), 1)).floor_(),
    "features in an order drawn": lambda x: x[:, torch.randperm(8)],
    "numbers of samples drawn": lambda x: x * torch.randint(1, 4, (len(x), 1)) + torch.randn(8, len(x)).T,
    "numbers for all drawn": lambda x: x * torch.rand(8) + torch.randn(1, 8),
    "written over nothing": lambda x: torch.empty(len(x), 8).copy_(x.exp()),
    "dropped from a weight": lambda x: x * F.dropout(torch.ones(8), 0.3),
    "batch statistics": lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), training=True),
    "attention inside samples": lambda x: F.scaled_dot_product_attention(*[x.unflatten(1, (4, 2))] * 3).flatten(1),
    "written": lambda x: written(x, lambda out: out[:, 1:], lambda x: x[:, :-1]),
}


def last(compute: Callable[[Tensor], Tensor]) -> tuple[BatchLayout | None, BatchLayout]:
    """What is known of what the last layer gives: proven, and seen."""
    torch.manual_seed(0)
    model, batch = Own(compute), models.vectors(6, 0)
    graph = capture(model, models.classify, batch)
    seen = seen_orders(graph, model, models.classify, flatten(batch)[0])
    assert seen.unknown_reason == ""
    return proven_orders(graph).get("head/linear"), seen.layouts["head/linear"]


@pytest.mark.parametrize("name", subsets.one_in(2, BREAKING))
def test_what_turns_samples_around_is_not_taken_for_order(name: str) -> None:
    assert last(BREAKING[name]) == (None, BatchLayout.UNKNOWN)


@pytest.mark.parametrize("name", subsets.one_in(2, KEEPING))
def test_what_leaves_samples_in_order_is_proven_to(name: str) -> None:
    assert last(KEEPING[name]) == (BatchLayout.SHARDED_BY_SAMPLE, BatchLayout.SHARDED_BY_SAMPLE)


@pytest.mark.parametrize("descending", [False, True])
def test_products_by_group_are_of_sorted_keys(descending: bool) -> None:
    """Torch computes them in no float64, so that they are proven alone; counts say nothing of keys that descend."""
    model = Own(lambda x: grouped(x, descending))
    proven = proven_orders(capture(model, models.classify, models.vectors(6, 0)))
    assert proven.get("head/linear") == (None if descending else BatchLayout.SHARDED_BY_SAMPLE)


@torch.library.custom_op("polylane_tests::by_group", mutates_args=())
def by_group(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """A library's own product by groups, in a loop that no capture sees."""
    found = rows.new_zeros(len(rows), weights.shape[2])
    for group, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        found[start:end] = rows[start:end] @ weights[group]
    return found


@torch.library.custom_op("polylane_tests::by_neighbour", mutates_args=())
def by_neighbour(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The same of rows to which their group's first one is added."""
    found = rows.new_zeros(len(rows), weights.shape[2])
    for group, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        found[start:end] = (rows[start:end] + rows[start : start + 1]) @ weights[group]
    return found


for operator in (by_group, by_neighbour):
    operator.register_fake(lambda rows, weights, ends: rows.new_empty(len(rows), weights.shape[2]))
    operator.register_autograd(lambda ctx, gradient: (gradient, None, None))  # nothing here goes backward


@pytest.mark.parametrize(("product", "keeps"), [(by_group, True), (by_neighbour, False)])
def test_products_of_libraries_are_known_by_what_they_compute(product: Callable[..., Tensor], keeps: bool) -> None:
    model = Own(lambda x: grouped(x, product=product))
    proven = proven_orders(capture(model, models.classify, models.vectors(6, 0)))
    assert proven.get("head/linear") == (BatchLayout.SHARDED_BY_SAMPLE if keeps else None)


def test_nothing_is_proven_beyond_a_fixed_number_of_samples() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Unflatten(0, (2, 3)), nn.Flatten(0, 1), nn.Linear(8, 4)).to("meta")
    graph = capture(model, models.classify, models.vectors(6, 0))
    assert proven_orders(graph) == {"0/linear": BatchLayout.SHARDED_BY_SAMPLE}


def test_all_leaves_of_a_batch_have_equally_many_samples() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = batch
        return (model(x) * mask.view(len(x), -1)).square().sum(1).mean()  # as transformers' masks are viewed

    x = models.vectors(6, 0)[0]
    graph = capture(nn.Linear(16, 4), loss, (x, x[:, :4] > 0))
    assert derive_composition(graph).is_proven
