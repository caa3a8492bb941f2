"""Traps of state between a call and its step: modes, frozen weights, attributes, sums and random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.script.loops import Prepare, samples, sums_of
from tests.script.traps import Trap


def build(dropout: float = 0.0) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
    model = nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), batch_size=12)


def accumulate_in_tensor(prepare: Prepare) -> list[float]:
    """a loss that is summed in a tensor of the script's (`total = torch.zeros(()); total += loss`)"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part, labels in zip(x.split(6), y.split(6), strict=True):
            total += F.cross_entropy(model(part), labels)
        loss = total + model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


class Totals:
    """Sums of losses, by name."""

    def __init__(self) -> None:
        self.all = torch.ones((), dtype=torch.float64)
        self.parts = {"first": torch.zeros((), dtype=torch.float64)}
        self.rows = [torch.ones((), dtype=torch.float64)]


def accumulate_in_containers(prepare: Prepare) -> list[float]:
    """losses that are summed, or multiplied, in attributes, dicts and lists (`totals["first"] += loss`)"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        totals, loss = Totals(), F.cross_entropy(model(x), y)
        totals.all -= loss
        totals.parts["first"] += loss
        totals.rows[0] *= loss
        optimizer.zero_grad()
        (totals.parts["first"] - 0.1 * totals.all + totals.rows[0]).backward()
        optimizer.step()
        numbers += [float(totals.all), float(totals.rows[0])]
    return numbers + sums_of(model)


def accumulate_under_two_names(prepare: Prepare) -> list[float]:
    """the same, of a tensor that another name refers to as well"""
    model, _, loader = prepare(*build())
    x, y = next(iter(loader))
    total = torch.zeros((), dtype=torch.float64)
    alias = total
    total += F.cross_entropy(model(x), y)
    total.backward()
    return [float(alias)]


def write_outputs_into(prepare: Prepare) -> list[float]:
    """outputs that are written into a tensor of the script's, and enter the loss there (`outputs[0] = model(x)`)"""
    model, _, loader = prepare(*build())
    x, y = next(iter(loader))
    outputs = torch.zeros(12, 3, dtype=torch.float64)
    outputs[:] = model(x)
    (F.cross_entropy(outputs, y) + model(x).mean()).backward()
    return sums_of(model)


def leave_evaluation(prepare: Prepare) -> list[float]:
    """outputs of an evaluation with gradients that are read after `train()`"""
    model, optimizer, loader = prepare(*build(dropout=0.5))
    numbers = list[float]()
    for x, y in loader:
        model.eval()
        outputs = [model(part) for part in x.split(6)]
        loss = F.cross_entropy(torch.cat(outputs), y)
        model.train()
        numbers.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return numbers + sums_of(model)


def mix_modes(prepare: Prepare) -> list[float]:
    """one model in training and in evaluation mode within one loss"""
    model, _, loader = prepare(*build())
    x, _ = next(iter(loader))
    output = model(x)
    model.eval()
    (output - model(x)).pow(2).mean().backward()
    return sums_of(model)


def thaw(prepare: Prepare) -> list[float]:
    """layers that are frozen when `prepare` is called, and trained later"""
    model, optimizer, loader = build()
    model[0].requires_grad_(False)
    model, optimizer, loader = prepare(model, optimizer, loader)
    numbers = list[float]()
    for epoch in range(2):
        if epoch:
            model[0].requires_grad_(True)
        for x, y in loader:
            optimizer.zero_grad()
            hidden = model[:2](x)
            numbers.append(hidden.abs().mean().item())
            loss = F.cross_entropy(model[2:](hidden), y)
            loss.backward()
            optimizer.step()
            numbers.append(loss.item())
    return numbers + sums_of(model)


def cast_later(prepare: Prepare) -> list[float]:
    """a model that is cast after `prepare` (`model.double()`)"""
    model, _, loader = build()
    model = model.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(model, optimizer, loader)
    model.double()
    x, y = next(iter(loader))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return [loss.item(), *sums_of(model)]


def activate_in_place(prepare: Prepare) -> list[float]:
    """a function or module of the script's that writes in place (`F.relu(output, inplace=True)`)"""
    model, optimizer, loader = prepare(*build())
    activation, numbers = nn.LeakyReLU(0.5, inplace=True), list[float]()
    for x, y in loader:
        output = model(x)
        F.relu(output, inplace=True)
        second = model(x) + 0.0
        activation(second)
        loss = F.cross_entropy(output, y) + F.cross_entropy(second, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


def assign_data(prepare: Prepare) -> list[float]:
    """an assignment to an output's data (`output.data = output.data.clamp(-1, 1)`)"""
    model, _, loader = prepare(*build())
    x, y = next(iter(loader))
    output = model(x)
    output.data = output.data.clamp(-1, 1)
    F.cross_entropy(output, y).backward()
    return sums_of(model)


def begin_gradients(prepare: Prepare) -> list[float]:
    """gradients that begin at an output (`hidden.detach().requires_grad_()`)"""
    model, _, loader = prepare(*build())
    x, y = next(iter(loader))
    hidden = model[:2](x).detach().requires_grad_()
    F.cross_entropy(model[2:](hidden), y).backward()
    return [float(hidden.grad.sum())]


def normalize_outside(prepare: Prepare) -> list[float]:
    """running statistics of the script's own that are moved by outputs (`nn.BatchNorm1d` that is not prepared)"""
    model, _, loader = prepare(*build())
    x, y = next(iter(loader))
    norm = nn.BatchNorm1d(3, affine=False).double()
    F.cross_entropy(norm(model(x)), y).backward()
    assert norm.running_mean is not None
    return norm.running_mean.tolist()


def draw_between(prepare: Prepare) -> list[float]:
    """random numbers that are drawn from outputs without a gradient, between others of the script's"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        output = model(x)
        action = torch.bernoulli(output.detach().sigmoid())
        noise = torch.randn(3, dtype=torch.float64)
        loss = F.cross_entropy(output * action + noise, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), float(action.sum()), float(noise.sum())]
    return numbers + sums_of(model)


class Switched(nn.Module):
    """A network that returns its features too, if an attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.gives_features = nn.Linear(4, 8), nn.Linear(8, 3), False

    def forward(self, x: Tensor) -> Any:
        features = self.body(x).tanh()
        return (self.head(features), features) if self.gives_features else self.head(features)


def switch_results(prepare: Prepare) -> list[float]:
    """an attribute of the model that decides how many results it returns"""
    torch.manual_seed(0)
    model: Any = Switched().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer)
    x, y = samples().tensors
    F.cross_entropy(model(x), y).backward()
    model.gives_features = True
    rows = model(x)
    loss = rows[0].mean()
    loss.backward()
    return [loss.item()]


MODE_TRAPS = {
    trap.loop.__name__: trap
    for trap in (
        Trap(accumulate_in_tensor),
        Trap(accumulate_in_containers),
        Trap(accumulate_under_two_names, "is also known by another name"),
        Trap(write_outputs_into, "writes what a gradient flows through into a tensor of the script's"),
        Trap(leave_evaluation),
        Trap(mix_modes, "in other modes of training"),
        Trap(thaw),
        Trap(cast_later),
        Trap(activate_in_place),
        Trap(assign_data, "an attribute of what the model returns is assigned"),
        Trap(begin_gradients, "becomes the beginning of gradients of its own"),
        Trap(normalize_outside, "writes into a tensor that it is given"),
        Trap(draw_between),
        Trap(switch_results, "the model returns something else than when it was called so before"),
    )
}
