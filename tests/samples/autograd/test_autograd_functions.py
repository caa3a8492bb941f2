"""Custom autograd functions: those that treat each sample by itself are proven to, and no other is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.samples.counts import count_whole_batch
from polylane.samples.derivation import Derivation, derive_composition
from tests.support import autograd_functions as own
from tests.support import subsets
from tests.support.workers.training import assert_same, batch_of, classify, mlp, plainly, trained

Apply = Callable[["Around", Tensor], Tensor]


class Around(nn.Module):
    """A function of the user's between two layers, and a weight and a bias that it may use."""

    def __init__(self, apply: Apply) -> None:
        super().__init__()
        self.apply_it = apply
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(8, 8)), nn.Parameter(0.3 * torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.apply_it(self, self.first(x)))
        return logits


def of(function: Any, *rest: Any) -> Apply:
    return lambda model, x: function.apply(x, *rest)


def model(apply: Apply) -> nn.Module:
    torch.manual_seed(0)
    return Around(apply).double()


PROVEN: dict[str, Apply] = {
    "straight-through": of(own.Sign),
    "straight-through of a weight": lambda model, x: x @ own.Sign.apply(model.weight),
    "gradient clipped by element": of(own.Clipped),
    "gradient written in place": of(own.Masked),
    "gradient reversal": of(own.Reversed, 0.3),
    "linear": lambda model, x: own.Linear.apply(x, model.weight, model.bias),
    "linear without bias": lambda model, x: own.Linear.apply(x, model.weight, None),
    "linear of what needs no gradient": lambda model, x: x + own.Linear.apply(x.detach(), model.weight, model.bias),
    "linear of a weight that was computed": lambda model, x: own.Linear.apply(x, model.weight.tanh(), model.bias),
    "swish": of(own.Swish),
    "swish in a row of tokens": lambda model, x: own.Swish.apply(x[:, None].expand(-1, 3, 8)).sum(1),
    "swish along features": lambda model, x: own.Swish.apply(x.t()).t(),
    "two outputs": lambda model, x: sum(own.Both.apply(x)),
    "one of two outputs": lambda model, x: own.Both.apply(x)[1],
    "an output without gradient": lambda model, x: own.Largest.apply(x)[0] * x,
    "computed again": lambda model, x: own.Recomputed.apply(x, model.weight),
    "setup_context": of(own.Modern, 3),
    "decorated for mixed precision": lambda model, x: own.Mixed.apply(x, model.weight),
    "a learned step": lambda model, x: own.Quantized.apply(x, model.bias[:1].abs() + 0.1, -4, 3),
    "RMS norm": lambda model, x: own.Normalized.apply(x, model.bias),
    "RMS norm of tokens": lambda model, x: own.Normalized.apply(x[:, None].expand(-1, 3, 8), model.bias).sum(1),
}
UNPROVEN: dict[str, Apply] = {
    "less the mean": of(own.Centered),
    "the norm of all samples' gradients": of(own.Normed),
    "cumsum over samples": of(own.Summed),
    "gradients over the number of samples": of(own.Divided),
    "the mean of a weight's gradients": lambda model, x: own.MeanGradient.apply(x, model.weight),
    "a weight's gradient clipped": lambda model, x: own.ClippedWeight.apply(x, model.weight),
    "a computed weight's gradient clipped": lambda model, x: x @ own.Clipped.apply(model.weight),
    "otherwise on one sample": of(own.OnOne),
    "otherwise on many samples": of(own.OnMany),
    "otherwise on as many samples as features": of(own.Square),
    "what looks at values and catches the error": of(own.Hiding),
    "an object that may change": of(own.Configured, own.State()),
    "noise in the gradient": of(own.Noisy),
    "samples joined where an output has no gradient": lambda model, x: own.Unequal.apply(x)[0],
    "batch statistics": of(own.BatchNormalized),
    "its input written": lambda model, x: own.Written.apply(x * 1),
}
BATCHES = [batch_of(7, seed) for seed in range(3)]


def derived(apply: Apply) -> Derivation:
    graph = capture(model(apply), classify, BATCHES[0])
    assert any(node.op == "function" for node in graph.nodes)
    return derive_composition(count_whole_batch(graph))


@pytest.mark.parametrize("name", subsets.one_in(2, PROVEN))
def test_what_treats_each_sample_by_itself_is_proven_to(name: str) -> None:
    found = derived(PROVEN[name])
    assert found.is_proven
    assert not found.unproven


@pytest.mark.parametrize("name", subsets.one_in(2, UNPROVEN))
def test_what_looks_at_its_batch_is_not_proven(name: str) -> None:
    found = derived(UNPROVEN[name])
    assert found.culprit is not None
    assert [node.op for node in found.unproven] == ["function"]


# Every second function trains always, by both plans in turn: that each is proven is held above.
TRAINED = [
    pytest.param(name, plan, id=f"{name}-{plan}", marks=[] if i % 4 == 2 * j else pytest.mark.slow)
    for i, name in enumerate(PROVEN)
    for j, plan in enumerate(["data=2", "pipeline=2,microbatches=3"])
]


@pytest.mark.parametrize(("name", "plan"), subsets.one_in(2, TRAINED, several=True))
def test_what_is_proven_trains_as_on_one_device(name: str, plan: str) -> None:
    made = model(PROVEN[name])
    assert_same(trained(made, plan, BATCHES)[0], plainly(model(PROVEN[name]), BATCHES))


NOT_RANDOM = [name for name in UNPROVEN if name != "noise in the gradient"]


@pytest.mark.parametrize("name", subsets.one_in(3, NOT_RANDOM))
def test_what_is_not_proven_stays_whole_on_replicas(name: str) -> None:
    made = model(UNPROVEN[name])
    assert_same(trained(made, "data=2", BATCHES)[0], plainly(model(UNPROVEN[name]), BATCHES))


@pytest.mark.parametrize("name", subsets.one_in(3, UNPROVEN, first=1))
def test_what_is_not_proven_is_refused_under_microbatches(name: str) -> None:
    with pytest.raises(
        PolylaneError, match=r"function .* runs your own Python, (and nothing shows|in whose backward pass the samples)"
    ):
        trained(model(UNPROVEN[name]), "pipeline=2,microbatches=3", BATCHES)


def test_what_is_frozen_needs_no_gradient() -> None:
    """A clipped gradient of a weight that nobody trains stands in nobody's way."""
    made = model(UNPROVEN["a computed weight's gradient clipped"])
    made.get_parameter("weight").requires_grad_(False)
    graph = capture(made, classify, BATCHES[0])
    assert derive_composition(count_whole_batch(graph)).is_proven


class Net(nn.Module):
    """A network, and a factor for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.factor = mlp(6, 8, 4), nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.factor


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a mean": lambda y, factor: own.Squares.apply(y * factor),
    "a sum over a count": lambda y, factor: own.SumOverCount.apply(y, factor),
    "beside another": lambda y, factor: 2 * own.SumOverCount.apply(y, factor) + own.Squares.apply(y.exp()),
}


def loss_of(name: str) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    return lambda model, batch: LOSSES[name](*model(batch[0]))


@pytest.mark.parametrize(("name", "plan"), subsets.pairs(LOSSES, ["data=2", "pipeline=2,microbatches=3"]))
def test_a_loss_of_ones_own_is_a_mean(name: str, plan: str) -> None:
    loss = loss_of(name)
    found = derive_composition(capture(Net(), loss, BATCHES[0]))
    assert found.is_proven
    assert not found.unproven
    assert_same(trained(Net(), plan, BATCHES, loss=loss)[0], plainly(Net(), BATCHES, loss=loss))


def test_a_loss_whose_gradient_is_no_mean_is_not_proven() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value: Tensor = own.WrongCount.apply(model(batch[0])[0])
        return value

    assert [node.op for node in derive_composition(capture(Net(), loss, BATCHES[0])).unproven] == ["function"]


CHANGES = (
    "a list of its class",
    "a number of its class",
    "a list",
    "a dictionary",
    "an object",
    "a number that another function counts",
    "Python's random numbers",
    "numpy's random numbers",
)


@pytest.mark.parametrize("change", subsets.one_in(2, CHANGES))
def test_nothing_of_the_users_is_touched(change: str) -> None:
    """A trace leaves all as it was, and is no proof where it had changed anything."""
    graph = capture(model(of(own.Remembering, change)), classify, BATCHES[0])
    counted = count_whole_batch(graph)
    before = own.Remembering.remembered()
    assert [node.op for node in derive_composition(counted).unproven] == ["function"]
    assert own.Remembering.remembered() == before


def test_what_could_change_something_and_does_not_is_proven() -> None:
    assert not derived(of(own.Remembering, "nothing")).unproven


def test_it_is_proven_in_float64_and_under_autocast_too() -> None:
    def in_autocast(made: Around, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = own.Linear.apply(x, made.weight, made.bias)
        return y.to(x.dtype)

    for apply, in_float64 in ((PROVEN["linear"], True), (in_autocast, False), (in_autocast, True)):
        made = model(apply) if in_float64 else model(apply).float()
        batch = BATCHES[0] if in_float64 else (BATCHES[0][0].float(), BATCHES[0][1])
        graph = capture(made, classify, batch, in_float64=in_float64)
        assert any(node.op == "function" for node in graph.nodes)
        assert not derive_composition(count_whole_batch(graph)).unproven


def test_no_gradient_hangs_on_a_trace() -> None:
    """The captured call is as it was: what it holds is no tensor without data."""
    made = model(PROVEN["linear"])
    derive_composition(count_whole_batch(capture(made, classify, BATCHES[0])))
    classify(made, BATCHES[0]).backward()
    assert type(made.get_parameter("weight").grad) is Tensor
