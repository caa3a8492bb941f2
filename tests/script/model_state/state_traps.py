"""Traps of state: what scripts read and write of models and optimizers between a call, its backward pass and a step."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.script.loops import Prepare, samples, sums_of
from tests.script.traps import Trap


class Shifted(nn.Module):
    """A network with batch statistics, a buffer, an attribute, and a queue that a method fills."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.scale = 1.0
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("queue", torch.zeros(24, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).tanh()) * self.scale + self.shift

    @torch.no_grad()
    def enqueue(self, outputs: Tensor, at: int) -> None:
        self.queue[at : at + len(outputs)] = outputs


def build(optimizer: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Shifted().double()
    return model, optimizer(model.parameters(), **{"lr": 0.1, **options}), DataLoader(samples(), batch_size=12)


def train(model: Any, optimizer: Any, loader: Any, touch: Any, epochs: int = 1) -> list[float]:
    numbers = list[float]()
    for number, (x, y) in enumerate(pair for _ in range(epochs) for pair in loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
        touch(number)
    return numbers + sums_of(model)


def read_before_backward(prepare: Prepare) -> list[float]:
    """running statistics, a state dict and a copy that are read between the model's call and `backward()`"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        numbers += model.norm.running_mean.tolist()
        numbers += [*sums_of(model), *sums_of(copy.deepcopy(model))]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return numbers + sums_of(model)


def drop_calls(prepare: Prepare) -> list[float]:
    """calls of the model whose results are dropped, to move its running statistics"""
    model, optimizer, loader = prepare(*build())
    for x, _ in loader:
        model(x + 1)
    numbers = train(model, optimizer, loader, lambda number: model(samples().tensors[0] * 2))
    return numbers + model.norm.running_mean.tolist()


def write_state_before_backward(prepare: Prepare) -> list[float]:
    """buffers and attributes that are written between the model's call and `backward()`, also by assignment"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for number, (x, y) in enumerate(loader):
        model.shift = torch.full((3,), 0.1 * number, dtype=torch.float64)
        model.scale = 1.0 + number
        output = model(x)
        loss = F.cross_entropy(output, y)
        model.scale = 3.0
        with torch.no_grad():
            model.shift.mul_(0.5).add_(output.mean(0), alpha=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.enqueue(output.detach(), 12 * (number % 2))
        numbers += [loss.item(), *model.shift.tolist()]
    return numbers + sums_of(model)


def write_between_calls(prepare: Prepare) -> list[float]:
    """an attribute that is another one for each of two calls in one loss"""
    model, _, loader = prepare(*build())
    x, y = next(iter(loader))
    output = model(x)
    model.scale = 2.0
    F.cross_entropy(output + model(x), y).backward()
    return sums_of(model)


def thaw_before_backward(prepare: Prepare) -> list[float]:
    """layers that are frozen while the model is called, and thawed before `backward()`"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        model.body.requires_grad_(False)
        loss = F.cross_entropy(model(x), y)
        model.body.requires_grad_(True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


class Counting(nn.Module):
    """Counts its calls, keeps a mean that it also computes with, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.sizes = nn.Linear(4, 3), 0, list[int]()
        self.mean = torch.zeros(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        self.calls += 1
        self.sizes.append(len(x))
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
        return output - self.mean


def read_counters(prepare: Prepare) -> list[float]:
    """counters, lists and means that a forward moves, read before and behind `backward()`"""
    torch.manual_seed(0)
    model: Any = Counting().double()
    model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2])
    numbers = list[float]()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        numbers += [model.calls, len(model.sizes), model.sizes[-1], *model.mean.tolist()]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), model.calls]
    return numbers + sums_of(model)


def ask_before_state(prepare: Prepare) -> list[float]:
    """a value of an output that is asked for before there is a loss, of a forward that keeps state in Python"""
    torch.manual_seed(0)
    model: Any = Counting().double()
    model, loader = prepare(model, build()[2])
    x, y = next(iter(loader))
    output = model(x)
    numbers = [output.sum().item()]
    F.cross_entropy(output, y).backward()
    return numbers


def edit_optimizer_state(prepare: Prepare) -> list[float]:
    """`optimizer.state` that is read, scaled, and reset for some parameters, or for all"""
    model, optimizer, loader = prepare(*build(torch.optim.Adam))
    numbers = list[float]()

    def touch(number: int) -> None:
        numbers.extend(optimizer.state[p]["exp_avg"].sum().item() for p in model.parameters())
        for parameter in model.body.parameters():
            optimizer.state[parameter] = {}
        if number == 2:
            for state in optimizer.state.values():
                if "exp_avg" in state:
                    state["exp_avg"].mul_(0.5)
        if number == 4:
            optimizer.state = defaultdict(dict)

    return train(model, optimizer, loader, touch, 2) + numbers


def hook_steps(prepare: Prepare) -> list[float]:
    """hooks on `optimizer.step()` that clip gradients, and look at weights"""
    model, optimizer, loader = build(torch.optim.Adam)
    numbers = list[float]()

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        numbers.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())

    optimizer.register_step_pre_hook(clip)
    model, optimizer, loader = prepare(model, optimizer, loader)
    optimizer.register_step_post_hook(lambda *_: numbers.append(model.body.weight.norm().item()))
    return train(model, optimizer, loader, lambda number: None) + numbers


def swap_weights(prepare: Prepare) -> list[float]:
    """averaged weights that take the place of others for an evaluation (`old = p.data; p.data = average`)"""
    model, optimizer, loader = prepare(*build())
    average = {name: p.data.clone() for name, p in model.named_parameters()}
    numbers = list[float]()

    def touch(number: int) -> None:
        old_values = dict[str, Tensor]()
        for name, parameter in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * parameter.data
            old_values[name] = parameter.data
            parameter.data = average[name]
        with torch.no_grad():
            numbers.append(model(samples().tensors[0]).abs().sum().item())
        for name, parameter in model.named_parameters():
            parameter.data = old_values[name]

    return train(model, optimizer, loader, touch) + numbers


def step_another_optimizer(prepare: Prepare) -> list[float]:
    """an optimizer that is made after `prepare` and steps on the prepared model; layers that are initialized again"""
    model, optimizer, loader = prepare(*build())
    numbers = train(model, optimizer, loader, lambda number: None)
    torch.manual_seed(3)
    model.apply(lambda module: nn.init.orthogonal_(module.weight) if isinstance(module, nn.Linear) else None)
    nn.init.xavier_uniform_(tensor=model.head.weight)
    model.body.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    return numbers + train(model, optimizer, loader, lambda number: None)


def pickle_weights(prepare: Prepare) -> list[float]:
    """parameters that are saved as such (`torch.save(list(model.parameters()))`)"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()

    def touch(number: int) -> None:
        stream = io.BytesIO()
        torch.save([*model.parameters(), model.norm.running_mean, model.head.weight.data], stream)
        stream.seek(0)
        numbers.extend(tensor.abs().sum().item() for tensor in torch.load(stream, weights_only=False))

    return train(model, optimizer, loader, touch) + numbers


def replace_layers(prepare: Prepare) -> list[float]:
    """a layer that is replaced by another one after `prepare` (`model.head = nn.Linear(...)`)"""
    model, _, _ = prepare(*build())
    model.head = nn.Linear(8, 3)
    return sums_of(model)


def take_gradients(prepare: Prepare) -> list[float]:
    """gradients of the loss by parameters (`torch.autograd.grad(loss, parameters)`), printed and written to `p.grad`"""
    model, optimizer, loader = prepare(*build(momentum=0.9))
    numbers, parameters = list[float](), list(model.parameters())
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        (first,) = torch.autograd.grad(loss, model.body.weight, retain_graph=True)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        numbers += [loss.item(), first.norm().item()]
    return numbers + sums_of(model)


def step_in_hooks(prepare: Prepare) -> list[float]:
    """an optimizer for each parameter, which steps in a hook on its gradient (`register_post_accumulate_grad_hook`)"""
    model, _, loader = build()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in model.parameters()}
    model, *_ = prepare(model, *optimizers.values())
    numbers, norms = list[float](), list[float]()

    def step(parameter: Any) -> None:
        norms.append(parameter.grad.norm().item())
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        numbers.append(loss.item())
    return [*numbers, *sorted(norms), *sums_of(model)]


STATE_TRAPS = {
    trap.loop.__name__: trap
    for trap in (
        Trap(read_before_backward),
        Trap(drop_calls),
        Trap(write_state_before_backward),
        Trap(write_between_calls, "or attributes, which are others by now"),
        Trap(thaw_before_backward),
        Trap(read_counters),
        Trap(ask_before_state, "and would run a second time"),
        Trap(edit_optimizer_state),
        Trap(hook_steps),
        Trap(swap_weights),
        Trap(take_gradients),
        Trap(step_in_hooks),
        Trap(step_another_optimizer),
        Trap(pickle_weights),
        Trap(replace_layers, "is replaced by a module with other parameters"),
    )
}
