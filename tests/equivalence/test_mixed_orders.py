"""Orders with whole and halved backward passes: trainings by them compute what one device computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.plan.order import check_order, check_order_runs, format_order
from polylane.plan.plan import Plan
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import schedule_lanes
from polylane.schedule.stage_graph import StageGraph
from polylane.verify.verify import verify_compiled
from tests.support import subsets
from tests.support.reference.split_backward import pipeline, take_gradients
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import adamw, batch_of, classify, mlp

IN_PLACE = {ActionKind.BACKWARD_INPUT: ActionKind.BACKWARD}


class Block(nn.Module):
    """A feed-forward layer with dropout and statistics of the batch; its middle is a value that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)


class TiedBlocks(nn.Module):
    """Blocks between an embedding and a head with the same weights, on other stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(words).mean(1)))


def next_word(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def words(steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(12, (12, 3)), torch.randint(12, (12,))) for _ in range(steps)]


def mix(plan: Plan, seed: int) -> tuple[str, ...]:
    """A valid order of a plan with some backward passes whole: those of ZB-H1, or of ZB-V, joined at random."""
    name, groups, draw = ("zb-v" if plan.most_chunks > 1 else "zb-h1"), plan.stage_groups, random.Random(seed)
    graph = StageGraph.chain(plan.pipeline)
    lanes = [list(lane) for lane in schedule_lanes(name, graph, plan.microbatches, groups)]
    for lane in lanes:
        for second in [action for action in lane if action.kind is ActionKind.BACKWARD_WEIGHT]:
            joined = join(lane, second)
            # Of passes one behind the other, so that both kinds follow each other in both ways.
            if draw.random() < 0.6 and is_order(lanes, lane, joined, groups, plan.microbatches, graph):
                lane[:] = joined
    kinds = {action.kind for lane in lanes for action in lane}
    assert kinds > {ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT}
    return format_order(lanes)


def join(lane: Sequence[Action], second: Action) -> list[Action]:
    """A lane with one pass whole, where its second half was."""
    kept = [a for a in lane if (a.kind, a.stage, a.microbatch) != ("backward_input", second.stage, second.microbatch)]
    return [Action(ActionKind.BACKWARD, a.stage, a.microbatch) if a == second else a for a in kept]


def is_order(lanes: Any, lane: Any, joined: Any, groups: Any, microbatches: int, graph: StageGraph) -> bool:
    lines = format_order([joined if each is lane else each for each in lanes])
    try:
        check_order(lines, groups, microbatches)
        check_order_runs(lines, graph)
    except PolylaneError:
        return False
    return True


def compile_mixed(plan: str, model: nn.Module, seed: int = 0) -> CompiledTraining:
    """A training compiled for a plan, with a mixed order in place of its schedule."""
    objectives = {"loss": Objective("loss", next_word, adamw)}
    first = compile_training(model, objectives, words()[0], plan, in_float64=True)
    mixed = first.plan.model_copy(update={"schedule": "auto", "order": mix(first.plan, seed)})
    return compile_training(model, objectives, words()[0], mixed, in_float64=True)


PLANS = [
    "pipeline=2,microbatches=4,recompute=full",
    "pipeline=2,chunks=2,microbatches=4,schedule=zb-v",
    "data=2,pipeline=2,microbatches=3,shard=gradients",
    "tensor=2,pipeline=2,microbatches=4",
    "pipeline=4,microbatches=6",
    "pipeline=2,chunks=2,microbatches=5,schedule=zb-v,recompute=selective",
    "data=2,pipeline=2,microbatches=4",
]


@pytest.mark.parametrize("plan", subsets.except_slow(PLANS, PLANS[2:]))
def test_mixed_orders_train_as_one_device(plan: str) -> None:
    """Dropout, statistics, tied weights, clipping, sharded states and operators, and recomputation included."""
    verdict = verify_compiled(compile_mixed(plan, TiedBlocks().double()), words(), clip_norm=0.5)
    assert verdict.passed and verdict.worst <= 1e-9, verdict.culprit


def test_a_pass_that_is_not_halved_defers_nothing() -> None:
    """Its gradients are there after the backward pass, equal to those of halves, and nothing is kept for later."""
    model, batch = mlp(6, 8, 8, 4), batch_of(4)
    stages = pipeline(model, capture(model, classify, batch), 2, True)
    part, (runner, *_) = SampleSlice(4, 0, 4), stages.runners
    assert runner.code.weight_groups
    found = []
    for in_halves in (True, False):
        values: dict[str, Tensor] = {}
        for stage, each in enumerate(stages.runners):
            crossings = [c for c in stages.partition.crossings if stage in c.consumers]
            incoming = {c.value: values[c.value].detach().clone() for c in crossings}
            live = each.forward(0, incoming, list(batch), part, in_halves)
            assert (live.deferred is not None) == in_halves
            values |= live.outputs
        stages.values[0] = {}
        stages.backward(0, "backward_input" if in_halves else "backward")
        assert bool(runner.deferred) == in_halves
        if in_halves:
            stages.backward_weight(0)
        found.append(take_gradients(model))
        stages.gradients.clear()
    for name, gradient in found[0].items():
        other = found[1][name]
        assert gradient is not None and other is not None and torch.allclose(gradient, other, rtol=1e-12, atol=1e-14)
