"""How few samples a graph takes in training, and into how many parts a short batch is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import count_parts, split_bounds
from polylane.graph.capture.capture import capture
from polylane.plan.spec import parse
from polylane.samples.microbatch_limit import MinSamples, captured_samples, min_samples, requested_microbatches


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Leaf(nn.Module):
    """What export cannot read: it asks for a value."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) if x.sum().item() > -1e9 else x


def frozen(module: nn.Module) -> nn.Module:
    module.train = lambda mode=True: module  # type: ignore[method-assign, assignment]
    module.training = False
    return module


def fewest(model: nn.Module, *shape: int, samples: int = 4) -> MinSamples:
    return min_samples([capture(model, loss, torch.randn(samples, *shape))])


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.Linear(3, 3), (3,), 1),
        (nn.LayerNorm(3), (3,), 1),
        (nn.BatchNorm1d(3), (3,), 2),
        (nn.BatchNorm1d(3), (3, 5), 1),
        (nn.BatchNorm2d(3), (3, 4, 4), 1),
        (nn.BatchNorm2d(3), (3, 1, 1), 2),
        (nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)), (3, 4, 4), 2),
        (nn.Sequential(frozen(nn.BatchNorm1d(3)), nn.Linear(3, 3)), (3,), 1),
        (nn.Sequential(nn.Linear(3, 3), Leaf(nn.BatchNorm1d(3))), (3,), 2),
        (nn.Sequential(nn.Linear(3, 3), Leaf(nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)))), (3,), 2),
        (nn.Sequential(nn.Conv2d(3, 3, 1), Leaf(nn.BatchNorm2d(3))), (3, 2, 2), 1),
        (nn.Sequential(nn.Linear(3, 3), Leaf(frozen(nn.BatchNorm1d(3)))), (3,), 1),
        (Leaf(nn.BatchNorm1d(3)), (3,), 2),
    ],
)
def test_two_values_for_each_channel(model: nn.Module, shape: Any, expected: int) -> None:
    assert fewest(model, *shape).samples == expected
    assert fewest(model, *shape, samples=1).samples == expected


def test_evaluation_takes_any() -> None:
    assert min_samples([capture(nn.BatchNorm1d(3), loss, torch.randn(4, 3), training=False)]) == MinSamples()
    assert min_samples([]) == MinSamples()


def test_samples_that_are_taken_in_groups() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x[::3])

    assert fewest(Pairs(), 3, samples=8).samples == 4


def test_what_is_said() -> None:
    need = fewest(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), 3)
    with pytest.raises(PolylaneError) as caught:
        need.check(1, "the last batch", "leave it out")
    said = str(caught.value)
    assert said.startswith("the last batch has 1 sample, but 1/batch_norm")
    assert said.endswith(", on one device too: leave it out") and "needs 2 samples" in said
    need.check(2, "the last batch", "leave it out")


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_as_many_parts_as_have_enough(total: int, most: int, fewest: int) -> None:
    def holds(parts: int) -> bool:
        return all(stop - start >= fewest for start, stop in split_bounds(total, parts) if start != stop)

    count = count_parts(total, most, fewest)
    assert 1 <= count <= most
    if total >= fewest:
        assert holds(count)
    if fewest == 1:
        assert count == most
    if count < most and total >= fewest:
        assert not any(holds(parts) for parts in range(count + 1, most + 1))


@pytest.mark.parametrize(
    ("plan", "samples"), [("microbatches=2", 4), ("data=3", 3), ("data=2,replicas=round-robin", 4)]
)
def test_a_graph_is_captured_with_the_samples_of_a_pass(plan: str, samples: int) -> None:
    assert captured_samples(parse(plan), 8) == samples


@pytest.mark.parametrize("plan", ["data=2", "microbatches=2"])
def test_one_sample_is_told_in_the_singular(plan: str) -> None:
    with pytest.raises(PolylaneError, match=f"{plan}: a batch of 1 sample cannot be divided "):
        requested_microbatches(parse(plan), 1)
