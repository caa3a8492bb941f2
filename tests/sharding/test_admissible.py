"""Two axes split one operator together where that is proven exact, and not at all where it is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import Objective
from polylane.graph.capture.capture import capture
from polylane.placement.enumerate_strategies import enumerate_strategies
from polylane.placement.operator_view import view_operators
from polylane.placement.placement import PARTIAL, REPLICATE, Shard, even_cuts
from polylane.placement.rewrite import AxisSplit
from polylane.placement.strategy import RankCall, Strategy
from polylane.sharding.admissible import SplitDemands, axes_collide
from polylane.sharding.solve import solve
from polylane.verify.verify import verify
from tests.support import subsets

VOCABULARY, LENGTH = 2000, 64


class Language(nn.Module):
    """Words in, scores of words out, at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32)
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.up(self.table(words)).relu())


def by_positions(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], ignore_index=3)


def flattened(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=3)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(samples)
    words = [torch.randint(VOCABULARY, (samples, LENGTH), generator=random) for _ in range(2)]
    words[1][0, :5] = 3
    return words[0], words[1]


@pytest.mark.parametrize("loss", [by_positions, flattened])
def test_a_loss_is_split_by_positions_and_by_words(loss: object) -> None:
    graph = capture(Language(), loss, batch(4))
    shown = view_operators(graph, 4, 2)
    offered = enumerate_strategies(shown, 2)
    splits: dict[str, AxisSplit] = {}
    for axis in ("sequence", "tensor"):
        splits[axis] = solve(shown, offered, 2, SplitDemands(axis, other_axes=splits))
    of_loss = {axis: split.strategies["loss/cross_entropy_loss"] for axis, split in splits.items()}
    assert of_loss["sequence"].outputs == (PARTIAL,) and of_loss["tensor"].name == "classes"
    # What goes into it is never whole: every rank has a quarter of the scores.
    assert all(isinstance(strategy.inputs[0], Shard) for strategy in of_loss.values())
    assert splits["tensor"].placement(("head/linear", 0)) == Shard(2, even_cuts(VOCABULARY, 2))


@pytest.mark.parametrize("loss", subsets.one_in(2, [by_positions, flattened]))
def test_it_computes_what_one_device_computes(loss: object) -> None:
    torch.manual_seed(0)
    objective = Objective("loss", loss, lambda pairs: torch.optim.AdamW([p for _, p in pairs], lr=0.01))  # type: ignore[arg-type]
    verdict = verify(Language(), objective, [batch(4), batch(3)], "sequence=2,tensor=2")
    assert verdict.passed, verdict.culprit


def change(edit: RankCall) -> None:
    """Something in the call of a rank."""


ROWS, COLUMNS = Shard(0, even_cuts(4, 2)), Shard(1, even_cuts(6, 2))


def test_what_communicates_is_alone_unless_its_rule_says_otherwise() -> None:
    talking = Strategy("rows", (ROWS,), (ROWS,), local=change, sent=8, messages=1)
    changed, plain = (Strategy("columns", (COLUMNS,), (COLUMNS,), local=local) for local in (change, None))
    assert axes_collide(talking, changed, together=False) and axes_collide(changed, talking, together=False)
    assert not axes_collide(talking, changed, together=True)
    assert not axes_collide(talking, plain, together=False)
    assert not axes_collide(talking, Strategy("whole", (REPLICATE,), (REPLICATE,), local=change), together=False)
    assert axes_collide(talking, talking, together=True), "no dimension is cut twice"
    short = Shard(1, even_cuts(1, 2))  # the second rank has nothing
    assert axes_collide(talking, Strategy("columns", (short,), (short,), local=change), together=True)
