"""Traps of calls: what else than the model itself is called between a batch and its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.script.loops import Prepare, samples, sums_of
from tests.script.traps import Trap


def build(seed: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), batch_size=12)


def prepare_apart(prepare: Prepare) -> list[float]:
    """models of two calls of `prepare()` that train by turns, one on what the other returns"""
    model, optimizer, loader = prepare(*build())
    model2, optimizer2 = prepare(*build(seed=1)[:2])
    numbers = list[float]()
    for x, y in loader:
        output = model(x)
        optimizer.zero_grad()
        F.cross_entropy(output, y).backward()
        optimizer.step()
        output2 = model2(x)
        loss = F.cross_entropy(output2, y) + F.mse_loss(output2, output.detach())
        optimizer2.zero_grad()
        loss.backward()
        optimizer2.step()
        numbers.append(loss.item())
    return numbers + sums_of(model) + sums_of(model2)


def meet_apart(prepare: Prepare) -> list[float]:
    """one loss of models of two calls of `prepare()`"""
    model, _, loader = prepare(*build())
    model2, _ = prepare(*build(seed=1)[:2])
    x, y = next(iter(loader))
    loss = F.cross_entropy(model(x), y) + F.cross_entropy(model2(x), y)
    loss.backward()
    return [loss.item()]


class Writer(nn.Module):
    """A language model on sums of words, which goes on with a text by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.words(ids).cumsum(1))))

    @torch.no_grad()
    def generate(self, ids: Tensor) -> Tensor:
        for _ in range(2):
            ids = torch.cat([ids, self(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        return ids


def generate(prepare: Prepare) -> list[float]:
    """a method that calls the model again and again (`generate`), and a last batch of one sample"""
    torch.manual_seed(0)
    model: Any = Writer().double()
    optimizer: Any = torch.optim.Adam(model.parameters(), 0.02)
    texts = torch.randint(0, 7, (9, 5), generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = prepare(model, optimizer, DataLoader(texts, batch_size=4))
    numbers = list[float]()
    for ids in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), *model.generate(texts[:1, :2]).flatten().tolist()]
    with torch.no_grad():
        numbers.append(model(texts[:1]).sum().item())
    return numbers + sums_of(model)


class Activations:
    """Keeps what a module returns."""

    def __init__(self) -> None:
        self.kept = list[Tensor]()

    def look(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append(output)


def keep_activations(prepare: Prepare) -> list[float]:
    """forward hooks that keep activations, some for the loss; others that change what a module returns"""
    model, optimizer, loader = build()
    activations, means = Activations(), list[Tensor]()
    model[1].register_forward_hook(activations.look)
    model[0].register_forward_hook(lambda module, args, output: output * 1.5)
    model, optimizer, loader = prepare(model, optimizer, loader)
    handle = model[2].register_forward_hook(lambda module, args, output: means.append(output.detach().mean()))
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        activations.kept.clear()
        loss = F.cross_entropy(model(x), y) + F.mse_loss(model(x * 0.9), torch.zeros(len(x), 3).double())
        loss = loss + (activations.kept[0] - activations.kept[1]).pow(2).mean()
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), activations.kept[0].sum().item()]
    handle.remove()
    with torch.no_grad():
        model(x)
    assert len(means) == 2 * len(loader)
    return [*numbers, *(mean.item() for mean in means), *sums_of(model), activations.kept[-1].sum().item()]


def keep_before_writes(prepare: Prepare) -> list[float]:
    """a forward hook on a module whose output the next one writes in place (`ReLU(inplace=True)`)"""
    model, _, loader = build()
    model[1] = nn.ReLU(inplace=True)
    activations = Activations()
    model[0].register_forward_hook(activations.look)
    model, loader = prepare(model, loader)
    model(next(iter(loader))[0])
    return [activations.kept[0].sum().item()]


class Experts(nn.Module):
    """A mixture of experts: its forward leaves a further loss behind, the weights of the last batch, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(2)])
        self.balance: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        self.balance = weights.mean(0).pow(2).sum()
        self.weights = weights.detach()
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def leave_attributes(prepare: Prepare) -> list[float]:
    """tensors that a forward leaves in attributes, a further loss among them (`loss + model.moe.aux_loss`)"""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Experts()).double()
    model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2])
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 0.5 * model[2].balance
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), model[2].balance.item(), *model[2].weights[0].tolist()]
    with torch.no_grad():
        model(x)
    return [*numbers, *sums_of(model), float(model[2].balance), *model[2].weights[0].tolist()]


class Remembering(nn.Module):
    """Adds what it had the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x) if self.last is None else self.layer(x) + 0.1 * self.last
        self.last = output.mean(0).detach()
        return output


def remember(prepare: Prepare) -> list[float]:
    """a forward that keeps state in Python, also where it is called without gradients"""
    torch.manual_seed(0)
    model: Any = Remembering().double()
    model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2])
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            numbers += [loss.item(), model(x).sum().item()]
    return numbers + sums_of(model)


def call_with_weights(prepare: Prepare) -> list[float]:
    """`torch.func.functional_call` of the prepared model"""
    model, _, loader = prepare(*build())
    weights = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    return [torch.func.functional_call(model, weights, (next(iter(loader))[0],)).sum().item()]


class Straight(torch.autograd.Function):
    """Signs, with the gradient of a clamp times a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() <= 1) * ctx.scale, None


def apply_functions(prepare: Prepare) -> list[float]:
    """a `torch.autograd.Function` of what the model returns, and of weights"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        signs = Straight.apply(output, 0.5)
        loss = F.cross_entropy(output, y) + (signs * x[:, :3]).mean() + Straight.apply(model[2].weight, 0.1).sum()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


def compile_all(prepare: Prepare) -> list[float]:
    """`torch.compile` of the model before and after `prepare`, and of the loss"""
    model, optimizer, loader = build()
    model, optimizer, loader = prepare(torch.compile(model, backend="eager"), optimizer, loader)
    compiled: Any = torch.compile(model, backend="eager")

    @torch.compile(backend="eager")
    def measure(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(compiled(x), y)

    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        loss = measure(x, y)
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    state = model.state_dict()
    assert next(iter(state)) == "_orig_mod.0.weight"
    model.load_state_dict(state)
    return numbers + sums_of(model)


def make_alike(prepare: Prepare) -> list[float]:
    """tensors like an output, or of the number of a loss (`torch.full_like(output, loss.detach())`)"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        bound = loss.detach()
        masks = [
            torch.full_like(input=output, fill_value=bound),
            output.new_full((3,), bound),
            output.new_tensor(bound),
        ]
        masks += [
            torch.full_like(x[:, :3], bound),
            output.new_tensor([bound, 2, 3]),
            torch.rand_like(input=x[:, :3] + output.detach()),
        ]
        total = loss + torch.stack([(output * mask).mean() for mask in masks]).sum()
        total.backward()
        optimizer.step()
        numbers += [total.item(), float(torch.tensor(loss.detach())), len(torch.arange(loss.detach().ceil() + 3))]
    return numbers + sums_of(model)


CALL_TRAPS = {
    "make_alike": Trap(make_alike),
    "leave_attributes": Trap(leave_attributes),
    "remember": Trap(remember),
    "call_with_weights": Trap(call_with_weights, "call torch.func.functional_call with a copy"),
    "keep_activations": Trap(keep_activations),
    "keep_before_writes": Trap(keep_before_writes, "writes in place afterwards"),
    "apply_functions": Trap(apply_functions),
    "compile_all": Trap(compile_all),
    "generate": Trap(generate),
    "prepare_apart": Trap(prepare_apart),
    "meet_apart": Trap(meet_apart, "give all models that are trained together to one call"),
}
