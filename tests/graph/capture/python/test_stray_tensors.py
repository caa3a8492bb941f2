"""Weights that a module also keeps in lists, closures and objects are replaced there, however large the model is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.capture.python import stray_tensors
from polylane.graph.capture.python.stray_tensors import references_replaced


def in_closure(weight: Tensor) -> Callable[[], Tensor]:
    return lambda: weight


KEEPERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda weight: [weight], lambda kept: kept[0]),
    "dictionary of tuples": (lambda weight: {"l2": (weight, 0.1)}, lambda kept: kept["l2"][0]),
    "closure": (in_closure, lambda kept: kept()),
    "object": (lambda weight: SimpleNamespace(weight=weight), lambda kept: kept.weight),
}


class Keeping(nn.Module):
    """Computes with its weight by another way than its attribute."""

    def __init__(self, keeper: str) -> None:
        super().__init__()
        self.weight, (keep, self.read) = nn.Parameter(torch.ones(2)), KEEPERS[keeper]
        self.kept = keep(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.kept)


@pytest.mark.parametrize("keeper", KEEPERS)
def test_the_last_of_many_submodules_computes_with_the_tensor_that_is_passed(keeper: str) -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(200)], Keeping(keeper))
    name, weight = next(iter(model.named_parameters()))
    passed = torch.full((2,), 3.0, requires_grad=True)
    with references_replaced(model, {id(weight): passed}):
        torch.func.functional_call(model, {name: passed}, torch.ones(2)).sum().backward()
    assert weight.grad is None and torch.equal(passed.grad, torch.ones(2))  # type: ignore[arg-type]
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


def test_more_than_is_searched_is_an_error_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stray_tensors, "_MOST", 20)
    model = nn.Sequential(Keeping("list"), nn.Identity())
    model[1].table = [[i] for i in range(30)]
    weight = model[0].weight
    with (
        pytest.raises(PolylaneError, match=r"Identity\.table refers to more than 20 lists, dictionaries"),
        references_replaced(model, {id(weight): torch.zeros(2)}),
    ):
        pass
    assert model[0].kept[0] is weight
