"""How units are cut, who sums which part of them, and which optimizers take parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from polylane.compile.optimizer_parts import OptimizerPart, find_unshardable, replace_parameters
from polylane.errors import PolylaneError
from polylane.optim import LAMB
from polylane.plan.plan import Plan
from polylane.runtime.connections.shard_groups import cross_shard_group, shard_group
from polylane.runtime.parameters.zero_units import ShardUnit


def plan(*meshes: dict[str, int], **sync: Any) -> Plan:
    stages: list[dict[str, Any]] = []
    for mesh in meshes:
        first = sum(len(stage["devices"]) for stage in stages)
        count = mesh.get("data", 1) * mesh.get("tensor", 1)
        devices = list(range(first, first + count))
        stages.append({"nodes": [f"n{first}", f"n{first}"], "devices": devices, "mesh": mesh})
    return Plan.model_validate({"stages": stages, "sync": {"shard": "parameters", **sync}})


def test_a_unit_is_cut_evenly_or_by_owners() -> None:
    assert ShardUnit("u", ("a", "b")).part_bounds((5, 6), 3) == ((0, 4), (4, 8), (8, 11))
    assert ShardUnit("u", ("a",)).part_bounds((2,), 3) == ((0, 1), (1, 2), (2, 2))
    assert ShardUnit("u", ("a", "b", "c"), (0, 2, 2)).part_bounds((5, 6, 1), 3) == ((0, 5), (5, 5), (5, 12))


def test_groups_of_replicas() -> None:
    assert shard_group(plan({"data": 4}), 2) == (0, 1, 2, 3)
    assert shard_group(plan({"data": 4}, within=2), 2) == (2, 3)
    assert shard_group(plan({"data": 2, "tensor": 2}), 3) == (1, 3)
    assert shard_group(plan({"data": 2}, {}), 2) == (2,)


@pytest.mark.parametrize(
    ("given", "rank", "ranks", "expected"),
    [
        (plan({"data": 4}), 1, (0, 1, 2, 3), (1,)),
        (plan({"data": 4}, within=2), 1, (0, 1, 2, 3), (1, 3)),
        (plan({"data": 2, "tensor": 2}), 0, (0, 1, 2, 3), (0, 1)),  # a summand at each of the tensor ranks
        (plan({"data": 2, "tensor": 2}), 0, (0, 2), (0,)),
        (plan({"data": 2}, {"data": 2}), 3, (0, 1, 2, 3), (1, 3)),  # tied weights
        (plan({"data": 2}, {"data": 2, "tensor": 2}), 1, (0, 1, 2, 3, 4, 5), (1, 4, 5)),
        (plan({"data": 2}, {}), 0, (0, 1, 2), None),  # stages that cut in different ways
    ],
)
def test_who_sums_the_same_part(
    given: Plan, rank: int, ranks: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    assert cross_shard_group(given, rank, ranks) == expected


def named() -> list[tuple[str, nn.Parameter]]:
    shapes = {"matrix": (3, 5), "vector": (7,), "image": (2, 3, 3, 3), "scalar": ()}
    return [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


def of(kind: Any, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(list(parameters), **options)


class DecaysMatrices(torch.optim.SGD):
    """Element by element, but by a rule that a flat piece does not show."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9 if parameter.dim() > 1 else 1.0).sub_(parameter.grad)


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (of(torch.optim.SGD, lr=0.1, momentum=0.9), set()),
        (of(torch.optim.AdamW, lr=0.1, foreach=True), set()),
        (of(torch.optim.Adagrad, lr=0.1), set()),
        (of(torch.optim.Adafactor, lr=0.1), {"matrix", "image", "vector"}),
        (of(DecaysMatrices, lr=0.1), {"matrix", "image"}),
        (of(LAMB, lr=0.1), set()),
        (lambda parameters: torch.optim.Muon([p for _, p in parameters if p.ndim == 2], lr=0.1), {"matrix"}),
        (lambda parameters: torch.optim.SGD([dict(parameters)["vector"][:2]]), {"matrix", "vector", "image"}),
    ],
)
def test_what_an_optimizer_must_see_whole(factory: Any, expected: set[str]) -> None:
    assert find_unshardable(named(), [factory]) == expected | {"scalar"}


def test_one_that_mixes_parameters_is_refused() -> None:
    class Mixes(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(gradients, sum(g.abs().sum().item() for g in gradients))
            super().step()

    with pytest.raises(PolylaneError, match="shard: Mixes looks at several parameters at once"):
        find_unshardable(named(), [of(Mixes, lr=0.1)])


@pytest.mark.parametrize(
    "rate",
    [
        lambda place, parameters: 1.0 + place,
        lambda place, parameters: 1.0 / len(parameters),
        lambda place, parameters: float(place == len(parameters) - 1),
        lambda place, parameters: float(parameters[place] is max(parameters, key=torch.numel)),
    ],
)
def test_one_that_goes_by_places_is_refused(rate: Any) -> None:
    """A replica has parts of some parameters: the others are no longer before them in their group."""

    class ByPlace(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for place, parameter in enumerate(group["params"]):
                    parameter.grad.mul_(rate(place, group["params"]))
            super().step()

    with pytest.raises(PolylaneError, match="shard: ByPlace looks at several parameters at once"):
        find_unshardable(named(), [of(ByPlace, lr=0.1)])


def test_pieces_take_the_place_of_parameters() -> None:
    matrix, vector = nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.zeros(4))
    groups = [{"params": [("matrix", matrix)], "lr": 1.0}, {"params": [("vector", vector)]}]
    optimizer = torch.optim.Adagrad(groups, lr=0.5, initial_accumulator_value=0.25)
    optimizer.state[matrix]["sum"] = torch.arange(6.0).view(2, 3)
    piece = OptimizerPart(nn.Parameter(matrix.detach().reshape(-1)[2:5]), 2, 5)
    replace_parameters(optimizer, {matrix: piece, vector: None})
    assert optimizer.param_groups[0]["params"] == [piece.parameter] and optimizer.param_groups[0]["lr"] == 1.0
    assert optimizer.param_groups[1]["params"] == [] and optimizer.param_groups[1]["param_names"] == []
    assert list(optimizer.state) == [piece.parameter]
    state = optimizer.state[piece.parameter]
    assert state["sum"].tolist() == [2, 3, 4] and state["step"] == 0
