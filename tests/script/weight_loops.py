"""Training loops that read and write parameters and gradients; each returns the numbers that it would print."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.script.loops import Prepare, samples, sums_of


class Coder(nn.Module):
    """An encoder and a decoder, which scripts call one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.temperature = 2.0

    def decode(self, features: Tensor) -> Tensor:
        return self.head(features) / self.temperature

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encoder(x))

    def count_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def build() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Coder().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.02), DataLoader(samples(), batch_size=12)


def clip_norms(prepare: Prepare) -> list[float]:
    """The norm of all gradients, clipped and printed; then values, by another function."""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        numbers.append(norm.item())
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        numbers += [p.grad.abs().max().item() for p in model.parameters()]
        optimizer.step()
    return numbers + sums_of(model)


def clip_groups(prepare: Prepare) -> list[float]:
    """Gradients of the optimizer's groups, by the largest element."""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        for group in optimizer.param_groups:
            numbers.append(float(torch.nn.utils.clip_grad_norm_(group["params"], 0.03, norm_type=float("inf"))))
        optimizer.step()
    return numbers + sums_of(model)


def edit_gradients(prepare: Prepare) -> list[float]:
    """Gradients that are read, scaled, replaced and dropped."""
    model, optimizer, loader = prepare(*build())
    numbers = [float(all(p.grad is None for p in model.parameters()))]
    for x, y in loader:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        numbers += [p.grad.norm().item() for p in model.parameters()]
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.grad = parameter.grad * 0.5
            else:
                parameter.grad.mul_(2).add_(0.01)
        model.head.bias.grad = None
        numbers.append(float(model.head.bias.grad is None))
        numbers += [p.grad.sum().item() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return numbers + sums_of(model)


def update_by_hand(prepare: Prepare) -> list[float]:
    """No optimizer steps: the script writes the weights."""
    model, _, loader = build()
    model, loader = prepare(model, loader)
    numbers = list[float]()
    for x, y in loader:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        numbers.append(loss.item())
        with torch.no_grad():
            for parameter in model.encoder.parameters():
                parameter -= 0.1 * parameter.grad
        for parameter in model.head.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
        with torch.no_grad():
            model.head.weight.clamp_(-0.3, 0.3)
        numbers += [p.detach().norm().item() for p in model.parameters()]
    return numbers + sums_of(model)


def average_weights(prepare: Prepare) -> list[float]:
    """An exponential moving average of the weights, evaluated at the end."""
    model, optimizer, loader = prepare(*build())
    ema: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        ema.update_parameters(model)
    with torch.no_grad():
        numbers = [F.cross_entropy(ema(x), y).item() for x, y in loader]
    return numbers + sums_of(ema.module)


def penalize(prepare: Prepare) -> list[float]:
    """Penalties on the weights in the loss, one of which is also printed."""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        penalty = sum(parameter.abs().sum() for parameter in model.parameters())
        entropy = F.cross_entropy(model(x), y)
        loss = entropy + 0.01 * penalty + 0.1 * model.head.weight.pow(2).sum()
        loss.backward()
        size = model.head.weight.norm()
        optimizer.step()
        numbers += [loss.item(), penalty.item(), entropy.item(), size.item()]
    return numbers + sums_of(model)


def call_parts(prepare: Prepare) -> list[float]:
    """Submodules and methods of the model are called, with and without gradients."""
    model, optimizer, loader = prepare(*build())
    numbers = [float(model.count_parameters()), model.temperature]
    for x, y in loader:
        features = model.encoder(x)
        loss = F.cross_entropy(model.decode(features), y) + 0.1 * features.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
        with torch.no_grad():
            numbers += [model.decode(torch.ones(2, 8).double()).sum().item(), model.head(features).sum().item()]
    return numbers + sums_of(model)


def copy_models(prepare: Prepare) -> list[float]:
    """The best model is copied, saved and loaded again."""
    model, optimizer, loader = prepare(*build())
    losses, best, copies = list[float](), None, list[Any]()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if best is None:
            best = copy.deepcopy(model.state_dict())
        copies.append(copy.deepcopy(model))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    numbers = [*losses, *sums_of(loaded), *sums_of(copies[1])]
    model.load_state_dict(best)
    x, y = next(iter(loader))
    with torch.no_grad():
        numbers.append(F.cross_entropy(model(x), y).item())
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return numbers + sums_of(model)


WEIGHT_LOOPS = {
    loop.__name__: loop
    for loop in (
        clip_norms,
        clip_groups,
        edit_gradients,
        update_by_hand,
        average_weights,
        penalize,
        call_parts,
        copy_models,
    )
}
