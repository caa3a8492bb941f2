"""Random operators with a key: the same numbers however the samples are divided, and good ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polylane.graph.batch import flatten, split_bounds, take_samples
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.counter_rng import keep_mask, normal, random_bits, salt_of, uniform
from polylane.graph.operators.keyed_random import KEYED, attention, dropout
from tests.support import models, subsets
from tests.support.reference.eager_and_captured import run

CPU = torch.device("cpu")


def part_of(start: int, stop: int, total: int, step: int = 3, seed: int = 7) -> SampleSlice:
    return SampleSlice(stop - start, first=start, batch=total, step=step, seed=seed)


# Laws ----------------------------------------------------------------------------------------------------------------


@given(
    samples=st.integers(1, 9),
    rows=st.integers(1, 4),
    other=st.lists(st.integers(1, 4), max_size=3),
    data=st.data(),
)
@settings(deadline=None, max_examples=subsets.examples(150))
def test_parts_draw_the_numbers_of_the_whole(samples: int, rows: int, other: list[int], data: st.DataObject) -> None:
    """Wherever the batch dimension stands, and with several rows a sample in it."""
    dim = data.draw(st.integers(0, len(other)))
    cuts = sorted(data.draw(st.sets(st.integers(0, samples), max_size=4)) | {0, samples})

    def shape(count: int) -> list[int]:
        return [*other[:dim], count * rows, *other[dim:]]

    whole = random_bits(part_of(0, samples, samples), 5, shape(samples), dim, CPU)
    parts = [
        random_bits(part_of(start, stop, samples), 5, shape(stop - start), dim, CPU)
        for start, stop in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(parts, dim), whole)


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**62))
@settings(deadline=None, max_examples=subsets.examples(100))
def test_seed_step_and_node_each_change_everything(seed: int, step: int, salt: int) -> None:
    def drawn(seed: int, step: int, salt: int) -> Tensor:
        return random_bits(SampleSlice(64, batch=64, step=step, seed=seed), salt, [64], 0, CPU)

    first = drawn(seed, step, salt)
    assert torch.equal(first, drawn(seed, step, salt))
    for other in (drawn(seed + 1, step, salt), drawn(seed, step + 1, salt), drawn(seed, step, salt + 1)):
        assert int((first == other).sum()) < 3


def test_what_belongs_to_no_sample_is_drawn_alike_by_all() -> None:
    drawn = [
        random_bits(SampleSlice(n, first=first, batch=9, microbatch=m), 1, [5, 3], None, CPU)
        for n, first, m in ((2, 0, 0), (7, 2, 1))
    ]
    assert torch.equal(*drawn)


def test_numbers_go_on_beyond_32_bits() -> None:
    per_sample = 1 << 20
    near = (1 << 12) - 1  # the samples here stand on both sides of element 2**32
    drawn = random_bits(SampleSlice(2, first=near, batch=1 << 13), 9, [2, per_sample], 0, CPU)
    assert torch.equal(drawn[0], random_bits(SampleSlice(1, first=near, batch=1 << 13), 9, [1, per_sample], 0, CPU)[0])
    assert torch.equal(
        drawn[1], random_bits(SampleSlice(1, first=near + 1, batch=1 << 13), 9, [1, per_sample], 0, CPU)[0]
    )
    start = random_bits(SampleSlice(1, first=0, batch=1 << 13), 9, [1, per_sample], 0, CPU)[0]
    assert not torch.equal(drawn[1], start)


def test_uniform_and_normal_numbers_are_what_they_say() -> None:
    part = SampleSlice(1000, batch=1000, seed=1)
    u = uniform(part, salt_of("u"), [1000, 200], 0, CPU)
    n = normal(part, salt_of("n"), [1000, 200], 0, CPU)
    count = u.numel()
    assert 0 < float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=5 / math.sqrt(12 * count))
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.01)
    histogram = torch.histc(u, 100, 0, 1)
    chi_squared = float(((histogram - count / 100) ** 2 / (count / 100)).sum())
    assert chi_squared < 160  # of 99 degrees of freedom: exceeded by chance once in 10,000 times
    assert float(n.mean()) == pytest.approx(0, abs=5 / math.sqrt(count))
    assert float(n.std()) == pytest.approx(1, rel=0.01)
    assert float((n**4).mean()) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("lag", [1, 2, 64, 200, 4096])
def test_neighbours_steps_and_nodes_are_independent(lag: int) -> None:
    part = SampleSlice(1000, batch=1000, seed=1)
    flat = uniform(part, 11, [1000, 200], 0, CPU).flatten() - 0.5
    limit = 5 / math.sqrt(flat.numel())
    assert abs(float((flat[:-lag] * flat[lag:]).mean()) * 12) < limit
    for other in (
        uniform(SampleSlice(1000, batch=1000, seed=1, step=lag), 11, [1000, 200], 0, CPU),
        uniform(SampleSlice(1000, batch=1000, seed=1 + lag), 11, [1000, 200], 0, CPU),
        uniform(part, 11 + lag, [1000, 200], 0, CPU),
    ):
        assert abs(float((flat * (other.flatten() - 0.5)).mean()) * 12) < limit


@pytest.mark.parametrize("bit", range(0, 32, 3))
def test_every_bit_is_a_fair_coin(bit: int) -> None:
    drawn = random_bits(SampleSlice(500, batch=500), 3, [500, 200], 0, CPU)
    ones = float(((drawn >> bit) & 1).double().mean())
    assert ones == pytest.approx(0.5, abs=2.5 / math.sqrt(drawn.numel()))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_mean_and_its_gradient(p: float) -> None:
    x = torch.full((400, 300), 2.0, requires_grad=True)
    part = SampleSlice(400, batch=400)
    y = dropout(part, 1, 0, x, p, True)
    kept = float((y != 0).double().mean())
    assert kept == pytest.approx(1 - p, abs=0.01)
    if p < 1:
        assert float(y.detach().mean()) == pytest.approx(2.0, rel=0.03)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach() / 2)
    assert dropout(part, 1, 0, x, p, False) is x
    assert float(keep_mask(part, 1, p, [400, 300], 0, CPU).double().mean()) == pytest.approx(kept)


def test_attention_is_softmax_dropped() -> None:
    torch.manual_seed(0)
    part = SampleSlice(3, batch=3, seed=2)
    q, k, v = (torch.randn(3, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    mask = keep_mask(part, 8, 0.4, (3, 2, 5, 5), 0, CPU)
    scores = q @ k.transpose(-2, -1) / 2
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for kwargs, masked in (
        ({}, scores),
        ({"is_causal": True}, scores.masked_fill(~causal, -math.inf)),
        ({"attn_mask": causal}, scores.masked_fill(~causal, -math.inf)),
        ({"attn_mask": causal * 0.5}, scores + causal * 0.5),
        ({"scale": 0.25}, scores / 2),
    ):
        expected = (masked.softmax(-1) * mask / 0.6) @ v
        torch.testing.assert_close(attention(part, 8, 0, q, k, v, dropout_p=0.4, **kwargs), expected)
    one = v[:, :1]
    repeated = attention(part, 8, 0, q, k, v[:, :1].expand_as(v), dropout_p=0.4)
    torch.testing.assert_close(
        attention(part, 8, 0, q, k[:, :1], one, dropout_p=0.4, enable_gqa=True).shape, repeated.shape
    )


def test_attention_that_sees_nothing_gives_zeros() -> None:
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    out = attention(SampleSlice(1, batch=1), 8, 0, q, q, q, attn_mask=nothing, dropout_p=0.5)
    assert torch.equal(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert not bool(grad.isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    part = SampleSlice(1, batch=1)
    drawn = KEYED["aten.rand.default"](part, 1, None, [1 << 20], dtype=dtype)
    assert float(drawn.max()) < 1.0
    assert float(drawn.min()) >= 0.0
    assert drawn.dtype == dtype


# Through capture -----------------------------------------------------------------------------------------------------


class Using(nn.Module):
    """Something random between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function, self.head = nn.Linear(16, 8), function, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.function(self.fc(x)))
        return logits


class Layers(nn.Module):
    """A module of torch's that draws by itself, given words: (samples, 2, 4)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.fc, self.inner, self.head = nn.Linear(16, 8), inner, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = self.fc(x).unflatten(1, (2, 4))
        if isinstance(self.inner, nn.MultiheadAttention):
            words = self.inner(words, words, words, need_weights=False)[0]
        else:
            words = self.inner(words)
            words = words if isinstance(words, Tensor) else words[0]
        logits: Tensor = self.head(words.flatten(1))
        return logits


def recurrent(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Layers(kind(4, 4, num_layers=3, dropout=0.5, batch_first=True, **options))


def two_rows(x: Tensor) -> Tensor:
    """(samples, 8) as (2 * samples, 4): several rows a sample."""
    return x.reshape(x.shape[0] * 2, 4)


USES: dict[str, Callable[[], nn.Module]] = {
    "aten.dropout.default": lambda: Using(lambda x: F.dropout(x, 0.5)),
    "aten.dropout.default in place": lambda: Using(lambda x: F.dropout(x * 2, 0.5, inplace=True)),
    "aten.dropout.default of rows": lambda: Using(lambda x: F.dropout(two_rows(x), 0.5).reshape(-1, 8)),
    "aten.dropout.default time first": lambda: Using(lambda x: F.dropout(x.t(), 0.5).t()),
    "aten.feature_dropout.default": lambda: Using(lambda x: F.dropout2d(x.view(-1, 2, 2, 2), 0.5).flatten(1)),
    "aten.alpha_dropout.default": lambda: Using(lambda x: F.alpha_dropout(x, 0.5, training=True)),
    "aten.feature_alpha_dropout.default": lambda: Using(
        lambda x: F.feature_alpha_dropout(x.view(-1, 2, 2, 2), 0.5, training=True).flatten(1)
    ),
    "aten.rand.default": lambda: Using(lambda x: x * torch.rand(x.shape[0], 8)),
    "aten.rand.default for all": lambda: Using(lambda x: x * torch.rand(8)),
    "aten.randn.default": lambda: Using(lambda x: x + torch.randn(x.shape)),
    "aten.randint.default": lambda: Using(lambda x: x + torch.randint(5, (x.shape[0], 1))),
    "aten.randint.low": lambda: Using(lambda x: x + torch.randint(2, 5, x.shape)),
    "aten.randint_like.default": lambda: Using(lambda x: x + torch.randint_like(x, 5)),
    "aten.randint_like.low_dtype": lambda: Using(lambda x: x + torch.randint_like(x, 2, 5)),
    "aten.bernoulli.default": lambda: Using(lambda x: x * torch.bernoulli(x.sigmoid())),
    "aten.bernoulli.p": lambda: Using(lambda x: x * torch.empty_like(x).bernoulli_(0.3)),
    "aten.bernoulli.Tensor": lambda: Using(lambda x: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid())),
    "aten.rand_like.default": lambda: Using(lambda x: x * torch.rand_like(x)),
    "aten.randn_like.default": lambda: Using(lambda x: x + torch.randn_like(x)),
    "aten.normal_functional.default": lambda: Using(lambda x: x + torch.empty_like(x).normal_(1.0, 2.0)),
    "aten.normal.Tensor_float": lambda: Using(lambda x: x + torch.normal(x.detach(), 2.0)),
    "aten.normal.float_Tensor": lambda: Using(lambda x: x + torch.normal(0.5, x.detach().exp())),
    "aten.normal.Tensor_Tensor": lambda: Using(lambda x: x + torch.normal(x.detach(), x.detach().exp())),
    "aten.uniform.default": lambda: Using(lambda x: x + torch.empty_like(x).uniform_(-1, 1)),
    "aten.exponential.default": lambda: Using(lambda x: x + torch.empty_like(x).exponential_(2.0)),
    "aten.exponential.default of gumbel": lambda: Using(lambda x: F.gumbel_softmax(x, tau=0.5)),
    "aten.multinomial.default": lambda: Using(lambda x: x.gather(1, torch.multinomial(x.exp(), 8))),
    "aten.multinomial.default with": lambda: Using(lambda x: x.gather(1, torch.multinomial(x.exp(), 8, True))),
    "aten.randperm.default": lambda: Using(lambda x: x[:, torch.randperm(8)]),
    "aten.rrelu.default": lambda: Using(lambda x: F.rrelu(x, training=True)),
    "aten.scaled_dot_product_attention.default": lambda: Layers(nn.MultiheadAttention(4, 2, 0.5, batch_first=True)),
    "aten.dropout.default of encoder": lambda: Layers(nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True)),
    "aten.lstm.input": recurrent(nn.LSTM),
    "aten.lstm.input both ways": recurrent(nn.LSTM, bidirectional=True, proj_size=2),
    "aten.gru.input": recurrent(nn.GRU),
    "aten.rnn_tanh.input": recurrent(nn.RNN),
    "aten.rnn_relu.input": recurrent(nn.RNN, nonlinearity="relu"),
    "in place on a view": lambda: Using(lambda x: x + noisy_half(x)),
}


def noisy_half(x: Tensor) -> Tensor:
    noise = torch.zeros_like(x)
    noise[:, ::2].normal_()
    return noise


def values(graph: Graph, model: nn.Module, part: SampleSlice, batch: Any) -> tuple[Tensor, ...]:
    leaves, rebuild = flatten(batch)
    whole = ModelWithLoss(model, each_sample, rebuild)
    return run(graph, whole, take_samples(leaves, part.first, part.first + part.samples), part)


def each_sample(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("name", subsets.one_in(2, USES))
def test_captured_randomness_is_that_of_the_whole_batch(name: str) -> None:
    torch.manual_seed(0)
    model = USES[name]().double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in models.vectors(6, 0))
    graph = capture(model, each_sample, batch, in_float64=True)
    assert graph.code.random
    assert not graph.notes
    op = name.split(" ")[0]
    if op in KEYED:
        assert op in {node.op for node in graph.nodes}
    state = torch.get_rng_state()

    def loss(start: int = 0, stop: int = 6, **of: int) -> float:
        return float(values(graph, model, SampleSlice(stop - start, first=start, batch=6, **of), batch)[0].detach())

    assert loss() == loss()
    assert len({loss(step=1), loss(step=2), loss(seed=1), loss()}) == 4
    for cuts in (split_bounds(6, 2), split_bounds(6, 4), [(0, 1), (1, 6)]):
        parts = sum((stop - start) * loss(start, stop) for start, stop in cuts) / 6
        assert parts == pytest.approx(loss(), rel=1e-12)
    assert torch.equal(state, torch.get_rng_state())
    model.zero_grad()
    values(graph, model, SampleSlice(6, batch=6), batch)[0].backward()
    assert model.fc.weight.grad is not None  # type: ignore[union-attr]
    assert bool(model.fc.weight.grad.isfinite().all())  # type: ignore[union-attr]


def test_every_keyed_operator_is_used_here() -> None:
    assert set(KEYED) == {name.split(" ")[0] for name in USES if name.startswith("aten.")}


def test_the_same_in_another_graph_of_the_model() -> None:
    model = USES["aten.dropout.default"]()
    graphs = [capture(model, each_sample, models.vectors(size, 0)) for size in (2, 6)]
    losses = {
        float(values(g, model, SampleSlice(4, batch=4, seed=3), models.vectors(4, 1))[0].detach()) for g in graphs
    }
    assert len(losses) == 1


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x + torch.poisson(x.exp()), "poisson"),
        (lambda x: x + torch.empty_like(x).cauchy_(), "cauchy"),
        (lambda x: x[x.detach() > 0].new_ones(8) * F.dropout(x[x.detach()[:, 0] > 0]).sum() + x, "dropout"),
    ],
)
def test_operators_without_a_key_are_named(function: Callable[[Tensor], Tensor], name: str) -> None:
    graph = capture(Using(function), each_sample, models.vectors(6, 0))
    (note,) = graph.notes
    assert note.startswith(f"the random numbers of {name}")
    assert "may depend on how the samples are divided: " in note
    assert "test_counter_rng.py:" in note


def test_eval_draws_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.RReLU(), nn.Linear(8, 4))
    graph = capture(model, models.classify, models.vectors(4, 0), training=False)
    assert not graph.code.random
    assert not graph.notes


def test_unit_lstm_by_layer_is_torchs_own() -> None:
    torch.manual_seed(0)
    for make in (nn.LSTM, nn.GRU, nn.RNN):
        layer = make(4, 3, num_layers=3, bidirectional=True).double()
        x = torch.randn(5, 2, 4, dtype=torch.float64)
        expected, last = layer(x)
        state = torch.zeros(6, 2, 3, dtype=torch.float64)
        kind = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}[make]
        hidden = (state, state) if make is nn.LSTM else state
        out, *states = KEYED[f"aten.{kind}.input"](
            SampleSlice(2, batch=2), 1, 1, x, hidden, list(layer._flat_weights), True, 3, 0.0, True, True, False
        )
        torch.testing.assert_close(out, expected)
        for a, b in zip(states, last if make is nn.LSTM else [last], strict=True):
            torch.testing.assert_close(a, b)
