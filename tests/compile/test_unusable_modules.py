"""Models that no plan can train are refused in a sentence that says what to give in their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from polylane.compile.unusable_modules import refuse_uninitialised, refuse_unusable_modules
from polylane.errors import PolylaneError

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), "1 is a lazy module"),
    "scripted": (lambda: torch.jit.script(nn.Linear(2, 2)), "the model was made by torch.jit"),
    "traced inside": (
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))),
        "0 was made by torch.jit",
    ),
    "without its own __init__": (
        lambda: nn.Sequential(type("Net", (nn.Module,), {"__init__": lambda self: None})()),
        r"cannot be listed \('Net' object has no attribute '_modules'\): an __init__",
    ),
    "wrapped": (lambda: nn.DataParallel(nn.Linear(2, 2)), "the model is wrapped in DataParallel"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(PolylaneError, match=said) as caught:
        refuse_uninitialised(model := make())
        refuse_unusable_modules(model)
    assert len(str(caught.value).splitlines()) == 1


def test_ordinary_models_pass() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    model(torch.zeros(1, 3))
    refuse_unusable_modules(model)
