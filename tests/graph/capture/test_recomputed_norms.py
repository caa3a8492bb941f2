"""Running statistics under the user's own checkpoints: the captured graph moves them as torch does on one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polylane.compile.objectives import Objective
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.samples.running_norms import find_running_norms
from polylane.verify.verify import verify
from tests.support import subsets
from tests.support.workers.training import adamw

Forward = Callable[["Normalized", Tensor], Tensor]


class Normalized(nn.Module):
    """Two normalized layers between a first and a last one, called as ``run`` says.

    Attributes:
        reentrant: kind of its checkpoints.
    """

    def __init__(self, run: Forward, reentrant: bool, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.run, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 3), run, reentrant
        self.outer, self.inner = (nn.Sequential(norm(), nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

    def again(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, x, use_reentrant=self.reentrant)
        return result

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.run(self, x))
        return logits


def one_of_two(model: Normalized, x: Tensor) -> Tensor:
    return model.again(model.inner, model.outer(model.first(x)))


def nested(model: Normalized, x: Tensor) -> Tensor:
    return model.again(lambda y: model.again(model.inner, model.outer(y)), model.first(x))


def on_inputs(model: Normalized, x: Tensor) -> Tensor:
    """The region's input needs no gradient: torch's reentrant checkpoint then recomputes nothing."""
    return model.inner(model.first(x) + model.again(model.outer, x))


def unused(model: Normalized, x: Tensor) -> Tensor:
    model.again(model.outer, model.first(x))
    return model.inner(model.first(x))


def shared(model: Normalized, x: Tensor) -> Tensor:
    return model.again(model.inner, model.again(model.inner, model.first(x)))


def decorated(model: Normalized, x: Tensor) -> Tensor:
    inner = checkpoint(use_reentrant=model.reentrant)(model.inner)
    return inner(model.outer(model.first(x)))


RUNS = [one_of_two, nested, on_inputs, unused]
if inspect.signature(checkpoint).parameters["function"].default is None:  # torch can be told the options first
    RUNS.append(decorated)

# Moves of outer and inner. An inner call is recomputed in the outer one's recomputation, and again by itself, unless
# the outer one's has stopped before: it ends where nothing more is asked for.
TIMES = {
    ("one_of_two", False): [1, 2],
    ("one_of_two", True): [1, 2],
    ("nested", False): [2, 2],
    ("nested", True): [2, 3],
    ("on_inputs", False): [2, 1],
    ("on_inputs", True): [1, 1],
    ("unused", False): [1, 1],
    ("unused", True): [1, 1],
    ("decorated", False): [1, 2],
    ("decorated", True): [1, 2],
}


def norm() -> nn.Module:
    return nn.BatchNorm1d(6, momentum=0.3)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return 2 + torch.randn(8, 6), torch.randint(3, (8,))


def moves(graph: Graph) -> dict[str, tuple[float, int]]:
    """By module, the momentum of its running statistics, and what a step adds to the count of its passes."""
    norms, counters = find_running_norms(graph.code.fx, {node.name for node in graph.nodes})
    owners = {norm.mean.removesuffix(".running_mean"): norm.momentum for norm in norms}
    return {name: (m, counters[f"{name}.num_batches_tracked"]) for name, m in owners.items()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("run", RUNS)
def test_statistics_move_as_often_as_torch_moves_them(run: Forward, reentrant: bool) -> None:
    """After one step of the model the count of passes is that of the graph; k moves have momentum 1 - (1 - m)^k."""
    model = Normalized(run, reentrant, norm)
    graph = capture(model, loss, batch())
    assert not graph.is_opaque
    assert not graph.notes
    loss(model, batch()).backward()
    for name, (momentum, count) in moves(graph).items():
        assert count == int(model.get_submodule(name).num_batches_tracked)
        assert momentum == pytest.approx(1 - 0.7**count, rel=1e-12)
    assert [count for _, count in moves(graph).values()] == TIMES[run.__name__, reentrant]


def test_two_calls_of_one_module_move_in_an_order_that_no_graph_has() -> None:
    """A b b a is not a a b b: such a model is kept whole, and the note says why."""
    graph = capture(Normalized(shared, False, norm), loss, batch())
    assert graph.is_opaque
    assert "torch.utils.checkpoint" in graph.notes[0]
    assert "inner.0.running_mean" in graph.notes[0]


def test_statistics_of_instances_move_alike() -> None:
    """They are averaged over the samples, and move with the same momentum."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 3, 3)
            self.norm, self.last = nn.InstanceNorm2d(3, track_running_stats=True), nn.Linear(48, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.unflatten(1, (1, 6, 1)).expand(-1, -1, -1, 6))
            return self.last(checkpoint(self.norm, x, use_reentrant=False).flatten(1))  # type: ignore[no-any-return]

    graph = capture(Images(), loss, batch())
    assert not graph.is_opaque
    assert not graph.notes


@pytest.mark.parametrize(
    "plan", subsets.one_in(2, ["pipeline=2,microbatches=4", "data=2,replicas=round-robin,microbatches=4"])
)
def test_trainings_with_checkpointed_norms_are_those_of_one_device(plan: str) -> None:
    """Each microbatch moves the statistics twice, as it does where one device accumulates gradients."""
    verdict = verify(Normalized(one_of_two, False, norm), Objective("loss", loss, adamw), [batch(1), batch(2)], plan)
    assert verdict.passed and verdict.worst <= 1e-9, verdict.culprit
