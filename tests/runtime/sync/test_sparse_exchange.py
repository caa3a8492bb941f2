"""Sparse gradients: replicas exchange the rows that were touched, and lazy optimizers move no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.graph.sparse_gradients import count_exchanged_rows, find_sparse_gradients, gradient_sizes
from polylane.runtime.job import Job
from polylane.runtime.sync.sparse_exchange import launch_sparse_sum
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support.workers.compiling import compile_training
from tests.support.workers.thread_transport import LocalTransport, run_local
from tests.support.workers.training import assert_state, classify, plainly

ROWS, WIDTH = 40, 6


class Bags(nn.Module):
    """A table that is looked up twice, one in bags, and one that is also read as an ordinary matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
        self.tied = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, 4)
        self.double()

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text).mean(1) + self.words(text[:, 0]) + self.bags(text) + self.tied(text[:, 1])
        y: Tensor = self.out(torch.tanh(x @ (self.tied.weight[:WIDTH])))
        return y


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0), nn.Linear(WIDTH, 4)
        self.double()

    def forward(self, text: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.words(text).mean(1)))
        return y


def text(samples: int, words: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, words, (samples, 3), generator=random), torch.randint(0, 4, (samples,), generator=random)


BATCHES = [text(samples, 6 + 9 * seed, seed) for seed, samples in enumerate((8, 7, 5))]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def lazy(parameters: Any) -> torch.optim.Optimizer:
    """Of the table alone: SparseAdam takes no other gradients."""
    return torch.optim.SparseAdam([p for name, p in parameters if name == "words.weight"], lr=0.1)


PLANS = ("data=2", "tensor=2", "data=2,pipeline=2,microbatches=2")


@pytest.mark.parametrize("plan", PLANS)
def test_as_on_one_device_and_only_touched_rows_move(plan: str) -> None:
    kinds = {"lazy": lazy, "momentum": momentum}
    compiled = {
        name: compile_training(Words(), build_objectives(classify, kind, None), BATCHES[0], plan, seconds=_alike)
        for name, kind in kinds.items()
    }

    def work(_: Any) -> dict[str, Any]:
        found = {}
        for name, prepared in compiled.items():
            with Job(prepared, World.join(), example=BATCHES[0], clip_norm=None) as job:
                losses = [job.step(batch).loss for batch in BATCHES]
                found[name] = losses, job.state_dict(), job.traffic()
        return found

    results = fork_workers(work, compiled["lazy"].plan.workers)
    for name, kind in kinds.items():
        expected = plainly(Words(), BATCHES, optimizer=kind)
        for worker in results:
            losses, state, traffic = worker[name]
            torch.testing.assert_close(losses, expected.losses, rtol=1e-10, atol=1e-10)
            assert_state(state, expected.state)
            if plan == "data=2":
                assert all(0 < own["agreement"] <= own["theory"] for own in traffic), traffic
    never = [row for row in range(ROWS) if all(not (batch == row).any() for batch, _ in BATCHES)]
    before, after = Words().words.weight, results[0]["lazy"][1]["words.weight"]
    assert never and torch.equal(before[never], after[never]) and not torch.equal(before, after)


def _alike(graph: Any, *_: Any) -> tuple[float, ...]:
    return (1.0,) * len(graph.nodes)


def test_which_gradients_are_sparse() -> None:
    graph = capture(Bags(), classify, BATCHES[0])
    assert find_sparse_gradients(graph) == {"words.weight": 8 * 4, "bags.weight": 8 * 3}
    assert count_exchanged_rows(graph, "words.weight", 2) == 8 and count_exchanged_rows(graph, "words.weight", 99) == 40
    # An index and a row of float64 for each; never more than the table.
    sizes = gradient_sizes(graph, 2, list(graph.parameters))
    assert sizes == {"words.weight": 8 * (8 + WIDTH * 8), "bags.weight": 6 * (8 + WIDTH * 8)}
    assert gradient_sizes(graph, 99, ["bags.weight"]) == {"bags.weight": ROWS * WIDTH * 8}


def test_rows_are_added_up_and_rows_of_zeros_are_touched() -> None:
    table = nn.Parameter(torch.zeros(5, 2))
    own = [
        torch.sparse_coo_tensor(torch.tensor([[1, 3, 1]]), torch.ones(3, 2), (5, 2)),
        torch.sparse_coo_tensor(torch.tensor([[3, 4]]), torch.tensor([[2.0, 2.0], [0.0, 0.0]]), (5, 2)),
        None,
    ]

    def work(transport: LocalTransport) -> Any:
        pending = launch_sparse_sum("table", table, own[transport.rank], (0, 1, 2), transport)
        pending.start_next_round()
        found = pending.wait()
        none = launch_sparse_sum("table", table, None, (0, 1, 2), transport)
        none.start_next_round()
        return found.gradients[0], found.without_gradient, none.wait().without_gradient

    for summed, without, missing in run_local(3, work):
        assert summed.indices().tolist() == [[1, 3, 4]] and not without and missing == {"table"}
        assert summed.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [3, 3], [0, 0]]


@pytest.mark.parametrize(
    ("optimizer", "plan", "says"),
    [
        (momentum, "data=2,shard=optimizer", "shard .* takes no sparse gradients, and words.weight has them"),
        (momentum, "data=2,servers=1", "servers .* takes no sparse gradients, and words.weight has them"),
        (lambda p: torch.optim.Adam(list(p)), "data=2", "first step raises RuntimeError: Adam does not support sparse"),
        (lambda p: torch.optim.SparseAdam([q for _, q in p]), "data=2", "SparseAdam does not support dense gradients"),
        (
            lambda p: torch.optim.SGD(list(p), weight_decay=0.1),
            "data=1",
            "a first step raises RuntimeError: add",
        ),
    ],
)
def test_what_takes_no_sparse_gradients_says_so(optimizer: Any, plan: str, says: str) -> None:
    with pytest.raises(PolylaneError, match=says):
        compile_training(Words(), build_objectives(classify, optimizer, None), BATCHES[0], plan)
