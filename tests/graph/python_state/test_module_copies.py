"""Copies of modules that copy.deepcopy refuses, or copies without their hooks."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from polylane.graph.python_state.module_copies import copy_module


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()


@pytest.mark.filterwarnings("ignore")
def test_a_copy_has_values_and_hooks_of_its_own() -> None:
    model = nn.Sequential(Locked(), nn.utils.weight_norm(nn.Linear(2, 2)))
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    model(torch.ones(1, 2))  # weight norm keeps a tensor of autograd's
    copied = copy_module(model)
    loss: Tensor = copied(torch.ones(1, 2)).sum()
    loss.backward()
    assert not copied[0].weight.grad.any() and copied[0].bias.grad.all() and model[0].bias.grad is None
    assert all(own is not other for own, other in zip(model.parameters(), copied.parameters(), strict=True))
