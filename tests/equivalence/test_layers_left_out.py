"""Layers left out at random (LayerDrop): all workers leave out the same ones, whose weights have no gradient then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.graph.capture.capture import capture
from polylane.graph.readings.asked_draws import AskedDraw, StepDraws, draws_replayed
from tests.support import subsets
from tests.support.workers.training import adamw, assert_same, batch_of, classify, plainly, trained

LAYERS, STEPS, RATE = 2, 3, 0.4


class Dropping(nn.Module):
    """Layers, each of which is left out in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(LAYERS)])
        self.last = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            dropped = torch.rand([])
            if self.training and dropped < RATE:
                continue
            x = x + torch.tanh(layer(x))
        y: Tensor = self.last(x)
        return y


def numbers(step: int) -> list[Tensor]:
    return [AskedDraw("rand", place, (), torch.float32)(StepDraws(0, step)) for place in range(LAYERS)]


@pytest.mark.parametrize(
    "plan", subsets.one_in(2, ["data=2,pipeline=2,microbatches=2", "data=2,shard=parameters"], first=1)
)
def test_equal_to_one_device(plan: str) -> None:
    """AdamW decays every weight that has a gradient, be it zero: those of a layer that is left out have none."""
    batches, steps = [batch_of(4, seed) for seed in range(STEPS)], iter(range(STEPS))
    ways = {tuple(bool(number < RATE) for number in numbers(step)) for step in range(STEPS)}
    assert len(ways) > 1 and any(map(any, ways)), "another way in some steps"

    def replaying(model: nn.Module, batch: Any) -> Tensor:
        with draws_replayed(StepDraws(0, next(steps))):
            return classify(model, batch)

    reference = plainly(Dropping(), batches, loss=replaying, optimizer=adamw)
    assert_same(trained(Dropping(), plan, batches, optimizer=adamw)[0], reference)


def test_the_graph_has_the_way_that_is_asked_for() -> None:
    """Ahead of any step no layer is left out, where that is rare."""
    batch = batch_of(4)
    ahead = capture(Dropping(), classify, batch)
    assert not ahead.notes and not ahead.is_opaque and ahead.code.random
    assert sum(node.op == "aten.tanh.default" for node in ahead.nodes) == LAYERS
    for step in range(STEPS):
        own = capture(Dropping(), classify, batch, draws=StepDraws(0, step))
        kept = sum(bool(number >= RATE) for number in numbers(step))
        assert sum(node.op == "aten.tanh.default" for node in own.nodes) == kept


class Numbered(Dropping):
    """What decides is used besides."""

    def forward(self, x: Tensor) -> Tensor:
        number = torch.rand([])
        y: Tensor = self.last(x) * number
        return y if number < RATE else -y


def test_a_number_that_is_used_besides_is_no_graph() -> None:
    graph = capture(Numbered(), classify, batch_of(4))
    assert graph.is_opaque or graph.notes
