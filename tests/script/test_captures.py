"""A loop is captured once: the steps behind the first find its tape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polylane
from polylane.script.prepared_model import PreparedModel
from polylane.script.tape import Tape


@pytest.mark.parametrize("holds_outputs", [False, True])
def test_steps_behind_the_first_have_its_tape(holds_outputs: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)))
    model, optimizer = polylane.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), plan="data=1")
    x, y, output, outputs = torch.randn(6, 4), torch.randint(0, 4, (12,)), None, list[tuple[Tape, int]]()
    for _ in range(3):
        output = model(x)
        loss = F.cross_entropy(output.flatten(0, 1), y)
        if not holds_outputs:
            del output
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert type(model) is PreparedModel
        tapes = list(dict.fromkeys(model._polylane_loop.runner.tapes.tapes.values()))
        outputs.append((tapes[-1], len(tapes)))
    assert len({count for _, count in outputs}) == 1
    assert len(outputs[0][0].outputs) == holds_outputs  # what the script does not hold is not kept


def test_losses_that_are_kept_keep_no_gradients_and_outputs() -> None:
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    model, optimizer = polylane.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), plan="data=1")
    x, y, losses = torch.randn(6, 4), torch.randint(0, 3, (6,)), list[torch.Tensor]()
    for _ in range(3):
        output = model(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        run, _ = loss.call.runs[loss.position]  # type: ignore[attr-defined]
        assert run.computed.gradients == {}
        assert all(outputs == {} for _, outputs in run.outputs.parts)
        assert loss.call.leaves == ()  # type: ignore[attr-defined]
    assert output.shape == (6, 3) and float(output.detach().sum()) != 0
