"""A value of another worker that several stages of one worker read: one message, handed on in an order that is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.plan.lanes import stage_graph_of
from polylane.plan.plan import Plan
from tests.support.workers.training import assert_same, batch_of, classify, compiled, plainly, sgd, trained


class Branches(nn.Module):
    """Two branches read the first layer's value, and are added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.left, self.right, self.c = (nn.Linear(6, 6) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.left(h)) + torch.sin(self.right(h)))


# Worker 1 has both branches.
RIGHT = ("f0.0 f0.1 f3.0 b3.0 f3.1 b3.1 b0.0 b0.1", "f1.0 f2.0 f1.1 f2.1 b2.0 b1.0 b2.1 b1.1")
WRONG = (RIGHT[0], "f2.0 f1.0 f2.1 f1.1 b2.0 b1.0 b2.1 b1.1")
WRONG_BACK = (RIGHT[0], "f1.0 f2.0 f1.1 f2.1 b1.0 b2.0 b1.1 b2.1")


def branching_plan(order: tuple[str, ...] = ()) -> Plan:
    """Stages a | left | right | the rest, on workers 0, 1, 1, 0."""
    pieces = (("a/linear", "tanh"), ("left/linear", "tanh#2"), ("right/linear", "sin"), ("add", "loss/mul"))
    stages = [{"nodes": ends, "devices": (rank,)} for ends, rank in zip(pieces, (0, 1, 1, 0), strict=True)]
    return Plan.model_validate({"stages": stages, "microbatches": 2, "schedule": "auto", "order": order})


@pytest.mark.parametrize("order", [RIGHT, ()], ids=["written", "found"])
def test_a_value_is_handed_on_before_it_is_read(order: tuple[str, ...]) -> None:
    batches = [batch_of(8, seed) for seed in range(2)]
    reference = plainly(Branches(), batches)
    for worker in trained(Branches(), branching_plan(order), batches):
        assert_same(worker, reference)


@pytest.mark.parametrize(("order", "says"), [(WRONG, r"order: f\d\.\d waits"), (WRONG_BACK, r"order: b\d\.\d waits")])
def test_an_order_that_reads_it_before_is_refused(order: tuple[str, ...], says: str) -> None:
    with pytest.raises(PolylaneError, match=says):
        compiled(Branches(), build_objectives(classify, sgd, None), batch_of(8), branching_plan(order))


def test_who_hands_a_value_on_comes_first() -> None:
    prepared = compiled(Branches(), build_objectives(classify, sgd, None), batch_of(8), branching_plan(RIGHT))
    graph = stage_graph_of(prepared.main_partition, prepared.plan)
    assert graph.predecessors == ((), (0,), (0, 1), (1, 2))
    apart = prepared.plan.model_copy(
        update={"stages": tuple(s.model_copy(update={"devices": (i,)}) for i, s in enumerate(prepared.plan.stages))}
    )
    assert stage_graph_of(prepared.main_partition, apart).predecessors == ((), (0,), (0,), (1, 2))
