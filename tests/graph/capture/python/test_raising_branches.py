"""Branches that only raise are captured: the graph checks every batch, and names the line that would raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.self_check import run_code, tensors_by_role
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.samples.derivation import derive_composition

CLASSES = 6


def in_range(x: Tensor, y: Tensor) -> None:
    if y is not None and y.max() >= CLASSES:
        raise ValueError(f"labels must be < {CLASSES}, but one is {y.max().item()} in {tuple(x.shape)}")


def finite(x: Tensor, y: Tensor) -> None:
    assert torch.isfinite(x).all(), "x must be finite"


def by_item(x: Tensor, y: Tensor) -> None:
    if bool((x.abs() > 100).any()) or (y < 0).any().item():
        message = "out of bounds"
        raise RuntimeError(message)


def alike(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        if not torch.allclose(x, x.clone()):
            raise KeyError


def spread(x: Tensor, y: Tensor) -> None:
    if x.std() > 50:
        raise ValueError("too wide")


def as_numbers(x: Tensor, y: Tensor) -> None:
    least, largest = y.min().item(), y.max().item()
    if least < 0 or largest >= CLASSES:
        raise ValueError(f"labels from {least} to {largest}")


def chained(x: Tensor, y: Tensor) -> None:
    assert -3e3 < x.min().item() < 3e3, "wide"


def by_the_mean(x: Tensor, y: Tensor) -> None:
    if abs(x.mean().item()) > 50:
        raise ValueError(
            f"far off: the mean of a batch of {tuple(x.shape)} is {x.mean()}, above what layers are made for"
        )


CHECKS: dict[str, Callable[[Tensor, Tensor], None]] = {
    f.__name__: f for f in (in_range, finite, by_item, alike, spread, as_numbers, chained, by_the_mean)
}


class Checked(nn.Module):
    def __init__(self, check: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.check = nn.Linear(4, CLASSES), check

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.check(x, y)
        return self.linear(x).square().mean()


def call(model: nn.Module, batch: Any) -> Any:
    return model(*batch)


def batch(samples: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4), torch.randint(0, CLASSES, (samples,))


def run(graph: Graph, model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    leaves, rebuild = flatten(given)
    table = tensors_by_role(ModelWithLoss(model, call, rebuild), graph.code.constants, leaves)
    code = fx.GraphModule(nn.Module(), graph.code.fx)
    result: Tensor = run_code(code, graph.code.fx, table, SampleSlice(len(given[0]), batch=len(given[0])))[0]
    return result


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("in_range", 1, CLASSES, r'reaches `raise ValueError\(f"labels must be < {CLASSES}, .*"\)` \(.*\.py:27\); cor'),
        ("finite", 0, torch.inf, r'`assert torch.isfinite\(x\).all\(\), "x must be finite"`'),
        ("by_item", 0, 101, r"`raise RuntimeError\(message\)`"),
        ("by_item", 1, -1, r"`raise RuntimeError\(message\)`"),
        ("alike", 0, torch.nan, "`raise KeyError`"),
        ("spread", 0, 1e4, r'`raise ValueError\("too wide"\)`'),
        ("as_numbers", 1, -2, r'`raise ValueError\(f"labels from {least} to {largest}"\)`'),
        ("as_numbers", 1, CLASSES, "`raise ValueError"),
        ("chained", 0, -1e4, r'`assert -3e3 < x.min\(\).item\(\) < 3e3, "wide"`'),
        ("by_the_mean", 0, 1e3, r'`raise ValueError\( f"far off: .* made for" \)`'),
    ],
)
def test_every_batch_is_checked(name: str, place: int, value: float, words: str) -> None:
    """Where the user's code raises, so does the graph, at any batch; where it does not, the loss is the same."""
    model = Checked(CHECKS[name])
    graph = capture(model, call, batch())
    assert not graph.is_opaque and not graph.notes
    assert sum(node.op == "check" for node in graph.nodes) == 1 + (name in ("by_item", "as_numbers", "chained"))
    assert not graph.code.readings
    given = batch(3)
    assert torch.equal(run(graph, model, given), call(model, given))
    given[place][2] = value
    with pytest.raises((ValueError, AssertionError, RuntimeError, KeyError)):
        call(model, given)
    with pytest.raises(PolylaneError, match=words) as caught:
        run(graph, model, given)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", CHECKS)
def test_parts_are_checked_as_the_whole(name: str) -> None:
    """An extreme, an "any" or "all" of rows holds for a batch as for its parts; a deviation from the mean does not.

    Nor does a least value that must not be large: a part may well be without the small ones.
    """
    derived = derive_composition(capture(Checked(CHECKS[name]), call, batch()))
    assert derived.is_proven == (name not in ("spread", "by_the_mean", "chained"))
    assert derived.is_proven or (derived.culprit is not None and derived.culprit.op == "check")


def test_what_a_batch_only_carries_is_not_told_of_another() -> None:
    """The loss reads the name of a file only to raise: every batch has its own, and the graph knows the first one's."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y, files = batch
        if y.max() >= CLASSES:
            raise ValueError(f"a label of {files[1]} is not below {CLASSES}")
        return nn.functional.cross_entropy(model(x), y)

    model = nn.Linear(4, CLASSES)
    given = (*batch(), ["first.png", "second.png"])
    graph = capture(model, loss, given)
    assert graph.code.carried == {2, 3}
    given[1][2] = CLASSES
    with pytest.raises(PolylaneError, match=r"`raise ValueError\(f\"a label of {files\[1\]} is ") as caught:
        run(graph, model, given)
    assert "second.png" not in str(caught.value)


def test_a_statement_without_source_is_named_by_its_line() -> None:
    """Code that was compiled from a string has no file to read."""
    scope: dict[str, Any] = {}
    source = "def check(x, y):\n    if x.max() > 9:\n        raise ValueError('far')\n"
    exec(compile(source, "<cell>", "exec"), scope)
    model, given = Checked(scope["check"]), batch(3)
    graph = capture(model, call, batch())
    given[0][1] = 10
    with pytest.raises(PolylaneError, match=r"it reaches a statement that raises \(<cell>:3\); correct"):
        run(graph, model, given)


class AsksFirst(nn.Module):
    """Asks its batch which way to go, and then checks a number of it, which is another one in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if (y == 0).all():
            x = x / 2
        if y.max().item() >= CLASSES:
            raise ValueError("label")
        return nn.functional.cross_entropy(self.linear(x), y)


def test_a_number_that_is_checked_is_no_question() -> None:
    """A graph that asks its batch something else does not hold for one largest label alone."""
    graph = capture(AsksFirst(), call, batch())
    assert len(graph.code.readings) == 1 and sum(node.op == "check" for node in graph.nodes) == 1


def test_numbers_are_compared_in_64_bits() -> None:
    """As Python does: 0.1 of 32 bits is above 0.1, though no number of 32 bits is between them."""

    def above(x: Tensor, y: Tensor) -> None:
        if x.max().item() > 0.1:
            raise ValueError("above")

    model = Checked(above)
    given = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)
    graph = capture(model, call, given)
    assert torch.equal(run(graph, model, given), call(model, given))
    given[0][1] = 0.1
    with pytest.raises(ValueError, match="above"):
        call(model, given)
    with pytest.raises(PolylaneError, match="`raise ValueError"):
        run(graph, model, given)


class Caught(nn.Module):
    """Raises into its own except: a way to go on, and no end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        try:
            if x.max() > 1:
                raise ValueError("large")
        except ValueError:
            x = x / 2
        return nn.functional.cross_entropy(self.linear(x), y)


class TwoWays(nn.Module):
    """Both ways of its branch go on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.max() > 1:
            if x.min() < -100:
                raise ValueError("wide")
            x = x / 2
        return nn.functional.cross_entropy(self.linear(x), y)


class Suppressed(nn.Module):
    """Raises where that is suppressed: what comes behind the ``with`` goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad(), contextlib.suppress(KeyError, ValueError):
            if x.max() > 1:
                raise ValueError("large")
        return nn.functional.cross_entropy(self.linear(x), y)


@pytest.mark.parametrize("make", [Caught, Suppressed, TwoWays])
def test_other_branches_are_questions_to_every_batch(make: type[nn.Module]) -> None:
    graph = capture(make(), call, batch())
    assert [reading.answer for reading in graph.code.readings] == [True]
    checks = sum(node.op == "check" for node in graph.nodes)
    assert checks == (make is TwoWays)  # on the way that this batch goes, there is a branch that only raises


@pytest.mark.parametrize("name", CHECKS)
def test_predictions_pass_over_checks(name: str) -> None:
    """On the meta device there is nothing to ask; what only raises is no way that a training goes."""
    graph = capture(Checked(CHECKS[name]).to("meta"), call, batch())
    assert sum(node.op == "check" for node in graph.nodes) == 1 + (name in ("by_item", "as_numbers", "chained"))


@pytest.mark.parametrize("make", [Caught, TwoWays])
def test_predictions_need_data_for_other_branches(make: type[nn.Module]) -> None:
    with pytest.raises(PolylaneError, match=r"depends on a value of a tensor \(.*\.py:\d+\), and predictions are made"):
        capture(make().to("meta"), call, batch())


class OnTheCpu(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(torch.where(torch.ones(4, dtype=torch.bool, device="cpu"), x, 2 * x)).square().mean()


def test_predictions_tell_of_tensors_on_two_devices() -> None:
    with pytest.raises(PolylaneError, match=r"joins tensors of two devices \(.*\.py:\d+\), .* as .to\(x.device\) does"):
        capture(OnTheCpu(4, CLASSES).to("meta"), call, batch())
