"""The promise for buffers that a forward writes: a counter of batches counts them by every plan as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from tests.support.workers.training import assert_same, batch_of, plainly, trained


class Warming(nn.Module):
    """Counts its calls in place and anew, and scales its values by both, and by the scale before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("times", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * self.scale
        self.calls += 1
        self.times = self.times + 2
        self.scale = self.scale * 0.75
        return torch.where(self.times > 3, 1.5 * y, y) * torch.clamp(self.calls / 4.0, max=1.0)


def warming() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Warming(), nn.Tanh(), nn.Linear(8, 4)).double()


# A batch of fewer samples than microbatches, or than replicas, moves a counter like any other.
BATCHES = [batch_of(samples, seed) for seed, samples in enumerate((7, 2, 1, 6))]
PLANS = ["data=2", "data=3", "pipeline=2,microbatches=3", "tensor=2", "data=2,shard=parameters"]
FURTHER = [
    "data=2,pipeline=2,microbatches=2",
    "pipeline=2,microbatches=3,recompute=full",
    "[data=2 | 1],microbatches=2",
    "pipeline=2,microbatches=3,schedule=zb-h1",
    "microbatches=3",
    "servers=1,data=2",
]


@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.slow) for plan in FURTHER)])
def test_counters_count_batches(plan: str) -> None:
    reference = plainly(warming(), BATCHES)
    assert reference.state["2.calls"] == 4
    for worker in trained(warming(), plan, BATCHES):
        assert_same(worker, reference)


class Histogram(nn.Module):
    """Counts the classes that it has found, which nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 4).double()
        self.register_buffer("found", torch.zeros(4, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        self.found.add_(torch.bincount(y.argmax(1), minlength=4))
        return y


def test_a_count_over_the_batch_is_that_of_one_device_and_is_named_where_it_cannot_be() -> None:
    batches = [batch for batch in BATCHES if len(batch[0]) > 1]
    reference = plainly(Histogram(), batches)
    assert int(reference.state["found"].sum()) == sum(len(batch[0]) for batch in batches)
    for worker in trained(Histogram(), "data=2", batches):
        assert_same(worker, reference)
    with pytest.raises(PolylaneError, match=r"the buffer found .* add_ writes it .*; use microbatches=1$"):
        trained(Histogram(), "pipeline=2,microbatches=2", batches)


class Averages(nn.Module):
    """Beside a network the moving averages of its weights, as buffers, which teach it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.register_buffer("weight", torch.zeros(4, 6))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9).add_(self.fc.weight, alpha=0.1)
            self.bias.lerp_(self.fc.bias, 0.1)
            taught = nn.functional.linear(x, self.weight, self.bias)
        y: Tensor = self.fc(x)
        return y + taught


@pytest.mark.parametrize("plan", ["data=2,microbatches=2", "pipeline=2,microbatches=3"])
def test_averages_of_weights_move_once_for_a_batch(plan: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Averages().double()

    reference = plainly(model(), BATCHES)
    for worker in trained(model(), plan, BATCHES):
        assert_same(worker, reference)


class Teacher(nn.Module):
    """Averages of weights in a frozen copy of the layer, as of a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.taught = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for average, weight in zip(self.taught.parameters(), self.fc.parameters(), strict=True):
                average.mul_(0.9).add_(weight, alpha=0.1)
        y: Tensor = self.fc(x) + self.taught(x)
        return y


def teacher() -> nn.Module:
    torch.manual_seed(0)
    return Teacher().double()


def test_averages_in_frozen_parameters() -> None:
    reference = plainly(teacher(), BATCHES)
    for worker in trained(teacher(), "data=2,shard=parameters", BATCHES):
        assert_same(worker, reference)


def test_frozen_parameters_that_each_microbatch_would_move_are_refused() -> None:
    said = "microbatches=2 would not compute what one device computes: mul_ writes the parameter taught.weight once"
    with pytest.raises(PolylaneError, match=said):
        trained(teacher(), "microbatches=2", BATCHES)


class Bounded(nn.Module):
    """Bounds its weights in every forward, as the critic of a Wasserstein GAN does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.fc.parameters():
                parameter.clamp_(-0.1, 0.1)
        y: Tensor = self.fc(x)
        return y


@pytest.mark.filterwarnings("ignore:each replica computes")
def test_weights_that_a_forward_bounds() -> None:
    reference = plainly(Bounded(), BATCHES[:2])
    for worker in trained(Bounded(), "data=2,shard=gradients", BATCHES[:2]):
        assert_same(worker, reference)


@pytest.mark.filterwarnings("ignore:each replica computes")
@pytest.mark.parametrize("key", ["shard=parameters", "servers=1"])
def test_weights_that_a_forward_bounds_are_not_those_of_others(key: str) -> None:
    """A weight that was gathered, or that a server sent, is a copy, in which the bound would be lost."""
    who = key.replace("=1", "")
    with pytest.raises(PolylaneError, match=rf"{who}: the loss writes the parameter fc\.bias in place"):
        trained(Bounded(), f"data=2,{key}", BATCHES[:2])


class WithAverage(nn.Module):
    """Torch's own average of a model, whose weights its update writes in place; it runs as the user's own Python."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.average = torch.optim.swa_utils.AveragedModel(self.fc)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        self.average.update_parameters(self.fc)
        with torch.no_grad():
            taught = self.average(x)
        return y + taught


@pytest.mark.filterwarnings("ignore:each replica computes")
def test_weights_that_own_python_writes() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return WithAverage().double()

    reference = plainly(model(), BATCHES[:1])
    for worker in trained(model(), "data=2", BATCHES[:1]):
        assert_same(worker, reference)
