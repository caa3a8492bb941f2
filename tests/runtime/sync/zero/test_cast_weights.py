"""Weights that a pass casts are gathered cast: the numbers are those of gathering them whole, in half the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polylane.compile.objectives import build_objectives
from polylane.graph.operators.autocast_reads import find_weight_reads
from polylane.program import lower
from polylane.runtime.job import Job
from polylane.runtime.parameters import local_model
from polylane.runtime.sync.zero import all_gather_passes
from polylane.runtime.transport.choose import VARIABLE
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import workers

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def _many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "BUCKET_BYTES", 3000)


class Block(nn.Module):
    """Attention by one matrix of a layer, and by one that is cut into views; a matrix that is used transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Parameter(torch.randn(width, 2 * width) / width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        query, key, value = self.project(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention(x, memory, memory, need_weights=False)[0]  # three views of its matrix
        return x + F.gelu(self.wide(x)) @ self.narrow.t()


class GPT(nn.Module):
    """A model of tokens whose last layer has the weight of the first, and uses another one twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.blocks = nn.Embedding(13, 8), nn.ModuleList(Block(8) for _ in range(2))
        self.twice, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = memory = self.token(tokens)
        for block in self.blocks:
            x = block(x, memory)
        return self.head(self.norm(self.twice(torch.tanh(self.twice(x)))))


class Convolutions(nn.Module):
    """Convolutions; one weight is also a penalty's, which is computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.second, self.last = nn.Conv1d(8, 8, 3, stride=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.norm(self.first(x[:, None]))))
        return self.last(x.mean(-1)) + self.second.weight.square().sum() * 1e-3


class Expanded(nn.Module):
    """A matrix for each sample, views of one: their number depends on the batch, and their gradients are added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.each, self.last = nn.Linear(9, 8), nn.Parameter(torch.randn(8, 8) / 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))[:, None]
        return self.last((x + x @ self.each.expand(len(x), -1, -1))[:, 0])


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def adamw(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in pairs], lr=0.01)


def tokens(step: int) -> Tensor:
    return torch.randint(0, 13, (8, 6), generator=torch.Generator().manual_seed(step))


def signals(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, 9, generator=random), torch.randint(0, 4, (8,), generator=random)


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int], Any]]] = {
    "gpt": (GPT, next_token, tokens),
    "convolutions": (Convolutions, classify, signals),
    "expanded": (Expanded, classify, signals),
}


def train(name: str, plan: str, steps: int = 4) -> list[Any]:
    """Return losses, an evaluation, weights and bytes of every worker."""
    build, loss, batch_of = TRAININGS[name]

    def work(job: Job) -> Any:
        losses = [job.step(batch_of(step)).loss for step in range(steps)]
        sent = job.traffic()[job.world.rank]
        return [*losses, job.evaluate(batch_of(0))], job.state_dict(), sent, job.worker.counters

    return workers(work, build(), plan, loss=loss, optimizer=adamw, example=batch_of(0))


def gather_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on weights are gathered in their own dtype, and cast by autocast."""
    monkeypatch.setattr(local_model, "find_cast_weights", lambda *_: frozenset())


CASES = [
    ("gpt", "data=2,precision=bfloat16", "gloo"),
    ("convolutions", "data=3,microbatches=2,precision=bfloat16", "shared_memory"),
    ("gpt", "data=2,precision=float16,recompute=full", "shared_memory"),
    ("gpt", "data=2,pipeline=2,microbatches=2,recompute=selective,precision=bfloat16", "shared_memory"),
    ("gpt", "data=2,tensor=2,precision=bfloat16", "gloo"),
    ("convolutions", "data=4,within=2,precision=bfloat16", "gloo"),
    ("gpt", "data=2,pipeline=2,schedule=interleaved,microbatches=4,precision=bfloat16", "shared_memory"),
    ("expanded", "data=2,precision=bfloat16", "shared_memory"),
]


@pytest.mark.parametrize(("name", "plan", "transport"), subsets.one_in(3, CASES, first=1, several=True))
def test_the_same_bits(name: str, plan: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, transport)
    cast = train(name, f"{plan},shard=parameters")
    gather_whole(monkeypatch)
    whole = train(name, f"{plan},shard=parameters")
    for (losses, state, sent, _), (old_losses, old_state, old_sent, _) in zip(cast, whole, strict=True):
        assert losses == old_losses
        assert all(torch.equal(state[name], value) for name, value in old_state.items())
        assert sent["agreement"] < old_sent["agreement"]


def test_what_is_cast_alone_is_half_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two gathers and a sum of float32; a unit of both dtypes is two, and what is left of several is one."""
    plan = "data=2,shard=parameters,precision=bfloat16"
    cast, graph = train("gpt", plan, steps=2)[0], compile_graph("gpt")
    names = find_weight_reads(graph, torch.bfloat16).cast
    sizes = {name: info.bytes for name, info in graph.parameters.items()}
    half = sum(sizes[name] for name in names) / 2
    gather_whole(monkeypatch)
    whole = train("gpt", plan, steps=2)[0]
    assert whole[2]["theory"] == pytest.approx(3 * sum(sizes.values()) / 2)
    assert cast[2]["theory"] == pytest.approx((3 * sum(sizes.values()) - 2 * half) / 2)
    assert cast[2]["agreement"] == pytest.approx(cast[2]["theory"], rel=0.02)
    gathers = [sum(counters.messages["all_gather"] for counters in seen[3]) for seen in (cast, whole)]
    passes = 2 * 2 + 1  # and the evaluation
    assert gathers[1] < gathers[0] <= gathers[1] + 2 * passes


def compile_graph(name: str) -> Any:
    build, loss, batch_of = TRAININGS[name]
    return compile_training(build(), build_objectives(loss, adamw, None), batch_of(0), "data=1").main_partition.graph


def test_which_weights_are_cast() -> None:
    reads = find_weight_reads(compile_graph("gpt"), torch.bfloat16)
    norms = {name for name, _ in GPT().named_parameters() if "norm" in name}
    assert reads.otherwise == {"token.weight", *norms}
    assert reads.cast == {name for name, _ in GPT().named_parameters()} - reads.otherwise
    reads = find_weight_reads(compile_graph("convolutions"), torch.float16)
    assert reads.otherwise == {"norm.weight", "norm.bias", "second.weight"}
    assert reads.cast == {"first.weight", "first.bias", "second.bias", "last.weight", "last.bias"}


class Apart(nn.Module):
    """Layers out of autocast, and in another autocast; a result that is a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.cast, self.out, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.cut = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cast(x)
        with torch.autocast("cpu", enabled=False):
            x = self.out(x.float())
        with torch.autocast("cpu", dtype=torch.float16):
            x = self.other(x)
        return (x.float() @ self.cut[:2].t()).float() * self.cut[2, :2]


def test_settings_of_the_user_count() -> None:
    example = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
    prepared = compile_training(Apart(), build_objectives(classify, adamw, None), example, "data=1")
    reads = find_weight_reads(prepared.main_partition.graph, torch.bfloat16)
    assert reads.cast == {"cast.weight", "cast.bias"}
    assert reads.otherwise == {f"{name}.{kind}" for name in ("out", "other") for kind in ("weight", "bias")} | {"cut"}


class Penalized(nn.Module):
    """Evaluated with the norm of a weight, which no training reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(9, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.first(x)))
        return y if self.training else y + self.first.weight.square().sum()


def test_a_graph_that_reads_a_weight_otherwise_gathers_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    TRAININGS["penalized"] = Penalized, classify, signals
    plan = "data=2,shard=parameters,precision=bfloat16"
    cast = train("penalized", plan)
    gather_whole(monkeypatch)
    for seen, expected in zip(cast, train("penalized", plan), strict=True):
        assert seen[0] == expected[0]


class Handed(nn.Module):
    """A view that is made out of autocast, and read behind other layers; a weight that dropout hands on as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat, self.first = nn.Parameter(torch.randn(72) / 9), nn.Linear(9, 9)
        self.second, self.last = nn.Linear(9, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            viewed, dropped = self.flat.view(8, 9), F.dropout(self.last.weight, 0.2, self.training)
        x = torch.tanh(self.first(x))
        return F.linear(torch.tanh(self.second(x) + F.linear(x, viewed)), dropped, self.last.bias)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_that_operators_hand_on_are_full_until_they_are_read(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "BUCKET_BYTES", 0)  # a unit for each parameter
    monkeypatch.setitem(TRAININGS, "handed", (Handed, classify, signals))
    plan = f"data=2,precision={precision}"
    for seen, expected in zip(train("handed", f"{plan},shard=parameters"), train("handed", plan), strict=True):
        assert seen[0] == pytest.approx(expected[0], rel=1e-6)  # the last one is an evaluation: without dropout


def test_nothing_whole_is_kept_between_passes() -> None:
    """Neither what is gathered nor a cast of it: autograd has positions in units, from which it is gathered again."""
    build, loss, batch_of = TRAININGS["gpt"]

    def work(job: Job) -> Any:
        kept, shapes = list[Any](), {p.shape for p in build().parameters() if p.dim() > 1}
        pack = all_gather_passes.GatheredPasses.pack_saved

        def note(self: Any, tensor: Tensor) -> Any:
            kept.append(pack(self, tensor))
            return kept[-1]

        all_gather_passes.GatheredPasses.pack_saved = note  # type: ignore[method-assign]
        job.step(batch_of(0))
        tensors = [value for value in tree_leaves(kept) if isinstance(value, Tensor)]
        views = [value for value in kept if isinstance(value, all_gather_passes.ShardView)]
        casts = {tensor.shape for tensor in tensors if tensor.dtype == torch.bfloat16 and tensor.dim() == 2}
        whole = {shape for shape in casts if shape in shapes or shape[::-1] in shapes}
        return whole, {view.flat_buffer.shard.dtype for view in views}, len(views)

    plan = "data=2,shard=parameters,precision=bfloat16"
    for whole, dtypes, count in workers(work, build(), plan, loss=loss, optimizer=adamw, example=batch_of(0)):
        # The tied weight alone, which an embedding reads in float32.
        assert whole <= {torch.Size((13, 8)), torch.Size((8, 13))}
        assert dtypes == {torch.float32} and count > 0
