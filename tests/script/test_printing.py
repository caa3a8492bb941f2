"""What a prepared script prints of tensors is what the plain script prints, but for numbers that round otherwise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import polylane


def print_tensors(*prepared: Any) -> list[str]:
    model, optimizer = prepared
    x, y = torch.linspace(-1, 1, 24).view(6, 4), torch.arange(6) % 3
    texts = list[str]()
    for _ in range(2):
        output = model(x)
        loss = F.cross_entropy(output, y)
        texts += [
            str(loss),
            f"{loss} {loss:.2f}",
            repr([output, output[0]]),
            str(output.detach()),
            str(output.argmax(1)),
        ]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        texts += [repr({"loss": loss}), str(model[0].weight), str(model[0].bias.grad), str(model[0].weight.norm())]
    return texts


def build() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_tensors_are_printed_with_what_torch_says_of_their_gradients() -> None:
    assert print_tensors(*polylane.prepare(*build(), plan="data=1")) == print_tensors(*build())
