"""Python state: what is inside of values is seen and put back; and what a lone function reaches, through libraries."""

from __future__ import annotations

import collections
import enum
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.graph.python_state.state import find_python_names
from polylane.graph.python_state.state_snapshots import StateDigests, snapshot_names
from polylane.samples.autograd.autograd_functions import undo_side_effects


class Kept:
    """An object of the user's, with more than one attribute."""

    def __init__(self) -> None:
        self.first, self.second, self.third, self.fourth = 1, [2], {"three": 3}, torch.zeros(2)


class Frozen(collections.OrderedDict[str, Any]):
    """A configuration of a library, which refuses to be changed by its users."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")

    clear = setdefault = update  # type: ignore[assignment]


class Mode(enum.Enum):
    """An enumeration refuses every assignment to a member, of the same value too."""

    QUIET, LOUD = "quiet", "loud"

    def is_loud(self) -> bool:
        return self is Mode.LOUD


def counted(kept: Any) -> None:
    kept.third["three"] += 1


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the third attribute of an object": (Kept, counted),
    "the last attribute of an object": (Kept, lambda kept: kept.fourth.add_(1)),
    "a list in an object": (Kept, lambda kept: kept.second.append(3)),
    "an attribute that is new": (Kept, lambda kept: setattr(kept, "fifth", 5)),
    "a list in a dictionary": (lambda: {"a": [1]}, lambda kept: kept["a"].append(2)),
    "the end of a long list": (lambda: list(range(5_000)), lambda kept: kept.__setitem__(-1, 0)),
    "a frozen mapping": (lambda: Frozen(one=[1], two=2), lambda kept: kept["one"].append(3)),
    "a queue": (lambda: collections.deque([1, 2], maxlen=2), lambda kept: kept.append(3)),
    "bytes": (lambda: bytearray(b"ab"), lambda kept: kept.extend(b"c")),
    "a set": (lambda: {1, 2}, lambda kept: kept.add(3)),
    "what a partial holds": (lambda: functools.partial(print, [1]), lambda kept: kept.args[0].append(2)),
    "a generator of random numbers": (lambda: random.Random(3), lambda kept: kept.random()),
    "a module's own attribute": (lambda: nn.Linear(1, 1), lambda kept: setattr(kept, "calls", 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_put_back(name: str) -> None:
    made, change = CHANGES[name]
    owner = {"value": made()}

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = owner

    where = find_python_names([("", Holder())])
    (place,) = [each for each in where if each.name == "held"]
    before, put_back = StateDigests(()).of(place.get()), snapshot_names(where, ())
    assert StateDigests(()).of(place.get()) == before
    change(owner["value"])
    assert StateDigests(()).of(place.get()) != before
    put_back()
    assert StateDigests(()).of(place.get()) == before


MODEL = nn.Linear(2, 2)
CALLS = [0]


class Decorated(torch.autograd.Function):
    """Its backward pass is wrapped by torch, and counts."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        CALLS[0] += 1
        return gradients[0] * 2


class OfAModel(torch.autograd.Function):
    """Its forward pass keeps something on a module that is global."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        MODEL.last = x.shape  # type: ignore[assignment]
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


@pytest.mark.parametrize("function", [Decorated, OfAModel])
def test_what_a_function_changes_is_seen_through_decorators_and_modules(function: Any) -> None:
    MODEL.last = None  # type: ignore[assignment]
    with undo_side_effects(function.apply) as touched:
        function.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert touched()
    assert CALLS == [0] and MODEL.last is None
    with undo_side_effects(function.apply) as touched:
        pass
    assert not touched()


def test_enumerations_are_left_alone_when_state_is_put_back() -> None:
    where = find_python_names([], [Mode.is_loud])
    assert {each.name for each in where if each.owner is Mode} >= {"QUIET", "LOUD"}
    snapshot_names(where, ())()
    assert Mode.LOUD.is_loud()
