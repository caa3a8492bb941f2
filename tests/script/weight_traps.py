"""Traps of weights: what scripts do with parameters and gradients that workers may hold parts of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.script.loops import Prepare, samples, sums_of
from tests.script.traps import Trap


class Proxies(nn.Module):
    """Features, which a script compares with the model's own proxies of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.proxies = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.features(x), dim=-1)


def build(kind: Callable[[], nn.Module]) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = kind().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), batch_size=12)


def build_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def write_views(prepare: Prepare) -> list[float]:
    """weights and gradients that are written by views, by elements and by masks (`p.data.view(-1)`, `p[0] = 0`)"""
    model, optimizer, loader = prepare(*build(build_layers))
    numbers = list[float]()
    rows = model[0].weight.data.unbind(0)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model[0].weight.grad[0] = 0
        model[2].weight.grad[:, 1].zero_()
        gradient = model[2].weight.grad.view(-1)
        gradient.clamp_(-0.05, 0.05)
        for row in model[0].weight.grad.t():
            row /= row.norm() + 1
        numbers.append(torch.cat([p.grad.view(-1) for p in model.parameters()]).norm().item())
        optimizer.step()
        flat = model[2].weight.data.view(-1)
        flat[0] = 0.0
        flat.mul_(0.9)
        with torch.no_grad():
            largest = model[0].weight.norm(dim=1).argsort()[:2]
            model[0].weight[largest] = 0.1
            model[2].weight[model[2].weight.abs() < 0.05] = 0.0
            model[2].weight[:, 1] = rows[3].sum()
        numbers += [rows[3].norm().item(), gradient.norm().item(), *sums_of(model)]
    return numbers


def weigh_by_results(prepare: Prepare) -> list[float]:
    """weights on either side of what the model returns, in the loss, in metrics and in writes"""
    model, optimizer, loader = prepare(*build(Proxies))
    numbers, slow = list[float](), [p.clone().detach() for p in model.parameters()]
    pruned = (model.proxies.abs() > 0.3).to(torch.float64)
    for x, y in loader:
        optimizer.zero_grad()
        features = model(x)
        loss = F.cross_entropy(features @ model.proxies.t(), y) + 0.1 * (features - model.proxies[y]).pow(2).mean()
        loss.backward()
        optimizer.step()
        distances = torch.cdist(features.detach(), model.proxies.detach())
        numbers += [loss.item(), *distances.argmin(1).tolist(), *model.proxies.flatten().tolist()]
        with torch.no_grad():
            model.center.mul_(0.9).add_((features - model.center).mean(0), alpha=0.1)
            model.proxies.mul_(pruned)
        for average, parameter in zip(slow, model.parameters(), strict=True):
            average.add_(parameter.data - average, alpha=0.5)
            parameter.data.copy_(average)
    return numbers + sums_of(model) + [model.center.sum().item(), *(average.sum().item() for average in slow)]


class SharpnessAware(torch.optim.Optimizer):
    """Steps by the gradient at the worst place nearby; ``step`` needs a closure, whatever its signature says."""

    def __init__(self, parameters: Any, radius: float, **options: Any) -> None:
        super().__init__(parameters, {"radius": radius, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "this optimizer needs a closure"
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["radius"] / norm))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for parameter in parameters:
            parameter.data = self.state[parameter]["old"]
        self.base.step()


def look_around(prepare: Prepare) -> list[float]:
    """sharpness-aware minimization, whose `step()` evaluates the loss again where it has moved the weights"""
    model, _, loader = build(build_layers)
    optimizer: Any = SharpnessAware(model.parameters(), 0.1, lr=0.1, momentum=0.9)
    model, optimizer, loader = prepare(model, optimizer, loader)
    numbers = list[float]()
    for x, y in loader:

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        numbers.append(evaluate().item())
        optimizer.step(evaluate)
        optimizer.zero_grad()
    return numbers + sums_of(model)


def _step_first(model: Any, prepare: Prepare) -> list[float]:
    _, _, loader = build(build_layers)
    model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    numbers = list[float]()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        numbers.append(loss.item())
    return numbers + sums_of(model)


def step_before_backward(prepare: Prepare) -> list[float]:
    """`optimizer.step()` between the loss and its `backward()`, as where the lines of a step are in a wrong order"""
    return _step_first(build(build_layers)[0], prepare)


def step_linear_before_backward(prepare: Prepare) -> list[float]:
    """the same, of a model whose gradients are computed without its weights: a single linear layer"""
    torch.manual_seed(0)
    return _step_first(nn.Linear(4, 3).double(), prepare)


WEIGHT_TRAPS = {
    **{loop.__name__: Trap(loop) for loop in (write_views, weigh_by_results, look_around, step_linear_before_backward)},
    "step_before_backward": Trap(step_before_backward, "is differentiated after the optimizer's step()"),
}
