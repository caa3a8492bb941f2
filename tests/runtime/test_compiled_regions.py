"""Plans with ``compile=yes``: which operators are compiled, and that the numbers are those of one device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import polylane
from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.plan.fixed_keys import parse_fixed
from polylane.plan.spec import parse
from polylane.runtime import compiled_regions
from polylane.runtime.compiled_regions import CompiledRegion, refuse_without_compiler, with_compiled_regions
from polylane.verify.verify import verify

torch.set_num_threads(1)

aten = torch.ops.aten
CPU = torch.device("cpu")


def called(x: Tensor) -> Tensor:
    """What is none of torch's operators."""
    return x * 3


def example() -> fx.Graph:
    """Two operators, a call that is none, a view and two operators, of which one value is read across the call."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    early = graph.call_function(aten.relu.default, (graph.call_function(aten.neg.default, (x,)),))
    own = graph.call_function(called, (early,))
    rows = graph.call_function(aten.sym_size.int, (own, 0))
    flat = graph.call_function(aten.view.default, (own, [rows, -1]))
    total = graph.call_function(aten.add.Tensor, (graph.call_function(aten.mul.Tensor, (flat, early)), x))
    graph.output((total, early))
    return graph


def run(graph: fx.Graph, x: Tensor) -> tuple[Tensor, ...]:
    return fx.GraphModule(nn.Module(), graph)(x)


def test_a_region_ends_at_every_call_that_is_no_operator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    made = with_compiled_regions(graph := example(), CPU)
    regions = [node.target for node in made.nodes if isinstance(node.target, CompiledRegion)]
    names = [[n.target._opname for n in r.module.graph.nodes if n.op == "call_function"] for r in regions]
    assert names == [["neg", "relu"], ["sym_size", "view", "mul", "add"]]
    x = torch.randn(4, 3)
    assert all(map(torch.equal, run(made, x), run(graph, x)))


def test_single_operators_and_random_numbers_are_called():
    graph = fx.Graph()
    x = graph.placeholder("x")
    noise = graph.call_function(aten.bernoulli.p, (x, 0.5))
    graph.output((graph.call_function(aten.view.default, (graph.call_function(aten.mul.Tensor, (x, noise)), [-1])),))
    assert [n.target for n in with_compiled_regions(graph, CPU).nodes] == [n.target for n in graph.nodes]


def test_the_plan_says_it():
    assert parse("data=2,compile=yes").compile and not parse("data=2").compile
    assert str(parse_fixed("data=2,compile=yes")) == "data=2,compile=yes"
    with pytest.raises(PolylaneError, match="compile=perhaps must be yes or no"):
        parse("compile=perhaps")
    with pytest.raises(PolylaneError, match="compile and shard=parameters exclude each other"):
        parse_fixed("compile=yes,shard=parameters")


def test_a_device_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: 1 / 0)
    with pytest.raises(PolylaneError, match="compile=yes needs a C\\+\\+ compiler"):
        refuse_without_compiler(CPU)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(PolylaneError, match="compile=yes needs Triton for cuda"):
        refuse_without_compiler(torch.device("cuda", 0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(11, 8), nn.Linear(8, 11), nn.BatchNorm1d(8)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(self.norm(self.blocks(x).transpose(1, 2)).transpose(1, 2))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def adam(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters], lr=1e-2)


def tokens(*samples: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, 11, (n, 6), generator=generator) for _ in range(2)) for n in samples]  # type: ignore


@pytest.mark.slow
def test_one_worker_trains_as_without_it(monkeypatch: pytest.MonkeyPatch):
    """Through dynamo and autograd's compiler, whose code is then run as it is: nothing waits for a C++ compiler."""
    monkeypatch.setattr(compiled_regions, "BACKEND", "aot_eager_decomp_partition")
    found = []
    for plan in ("microbatches=2", "microbatches=2,compile=yes"):
        torch.manual_seed(0)
        batches = tokens(6, 6, 4)
        job = polylane.parallelize(Attended().double(), cross_entropy, adam, example=batches[0], plan=plan, alone=True)
        losses = [job.step(batch).loss for batch in batches]
        found.append((losses, job.evaluate(batches[0]), job.state_dict()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        "pipeline=2,schedule=zb-h1,microbatches=4",
        "tensor=2",
        "data=2,shard=gradients,recompute=selective",
        "pipeline=2,schedule=pipedream,microbatches=1",
    ],
)
def test_compiled_plans_are_one_device(plan: str):
    torch.manual_seed(0)
    objective = Objective("loss", cross_entropy, adam, None)
    verdict = verify(Attended(), objective, tokens(8, 8), parse(f"{plan},compile=yes"))
    assert verdict.passed, verdict.culprit
