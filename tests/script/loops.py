"""Training loops as people write them; each returns the numbers that it would print, and its models' states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Prepare = Callable[..., Any]


def samples(count: int = 36, width: int = 4, classes: int = 3) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=random).double()
    return TensorDataset(x, torch.randint(0, classes, (count,), generator=random))


def classify(prepare: Prepare) -> list[float]:
    """Batch statistics, a scheduler, running sums, accuracy, evaluation: the loop of most image classifiers."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader: Any = DataLoader(samples(), batch_size=12, shuffle=True)
    model, optimizer, loader, scheduler = prepare(model, optimizer, loader, scheduler)
    numbers = list[float]()
    for _ in range(2):
        model.train()
        running, right = 0.0, 0.0
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            loss = F.cross_entropy(output, y)
            loss.backward()
            optimizer.step()
            running += loss.item() * len(x)
            right += (output.argmax(dim=1) == y).sum().item()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            for x, y in loader:
                output = model(x)
                running += F.cross_entropy(output, y, reduction="sum").item()
                right += output.argmax(1).eq(y).sum().item()
        numbers += [running, right]
    return numbers + sums_of(model)


def measure_first(prepare: Prepare) -> list[float]:
    """Numbers that are printed before ``backward()``: losses, terms, the best two classes."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]
    optimizer: Any = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model, optimizer = prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    numbers = list[float]()
    for x, y in DataLoader(samples(), batch_size=12):
        output = model(x)
        entropy, size = F.cross_entropy(output, y), output.pow(2).mean()
        loss = entropy + 0.01 * size
        numbers += [float(loss), entropy.item(), size.item()]
        _, best = output.topk(2, dim=1)
        numbers.append(best.eq(y[:, None]).any(1).double().mean().item())
        if loss < 100:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    return numbers + sums_of(model)


def accumulate(prepare: Prepare) -> list[float]:
    """Several ``backward()`` for one ``step()``."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = prepare(model, optimizer)
    numbers, total = list[float](), 0.0
    for number, (x, y) in enumerate(DataLoader(samples(), batch_size=6)):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        total += loss.item()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(total)
    return numbers + sums_of(model)


def adversaries(prepare: Prepare) -> list[float]:
    """A generator and a discriminator that take turns; what the generator makes is used twice, once detached."""
    torch.manual_seed(0)
    generator: Any = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    critic: Any = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).double()
    for_generator: Any = torch.optim.Adam(generator.parameters(), lr=0.01)
    for_critic: Any = torch.optim.Adam(critic.parameters(), lr=0.01)
    generator, critic, for_generator, for_critic = prepare(generator, critic, for_generator, for_critic)
    random = torch.Generator().manual_seed(2)
    fixed = torch.randn(8, 3, generator=random).double()
    numbers, criterion = list[float](), nn.BCEWithLogitsLoss()
    for x, _ in DataLoader(samples(), batch_size=12):
        critic.zero_grad()
        output = critic(x).view(-1)
        loss_real = criterion(output, torch.ones(len(x)).double())
        loss_real.backward()
        noise = torch.randn(len(x), 3, generator=random).double()
        fake = generator(noise)
        output = critic(fake.detach()).view(-1)
        loss_fake = criterion(output, torch.zeros(len(x)).double())
        loss_fake.backward()
        numbers.append(output.mean().item())
        loss = loss_real + loss_fake
        for_critic.step()
        generator.zero_grad()
        output = critic(fake).view(-1)
        loss_generator = criterion(output, torch.ones(len(x)).double())
        loss_generator.backward()
        for_generator.step()
        numbers += [loss.item(), loss_generator.item(), output.mean().item()]
    with torch.no_grad():
        numbers.append(generator(fixed).sum().item())
    return numbers + sums_of(generator) + sums_of(critic)


def evaluate_closures(prepare: Prepare) -> list[float]:
    """Optimizers that are given a closure, which one of them evaluates as often as it likes."""
    torch.manual_seed(0)
    body: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double()
    head: Any = nn.Linear(6, 3).double()
    searching: Any = torch.optim.LBFGS(body.parameters(), lr=0.5, max_iter=3)
    stepping: Any = torch.optim.SGD(head.parameters(), lr=0.1)
    body, head, searching, stepping = prepare(body, head, searching, stepping)
    x, y = samples().tensors
    numbers = list[float]()

    def closure() -> Any:
        body.zero_grad()
        head.zero_grad()
        loss = F.cross_entropy(head(body(x)), y)
        numbers.append(loss.item())
        loss.backward()
        return loss

    for optimizer in (searching, stepping, searching):
        numbers.append(float(optimizer.step(closure)))
    return numbers + sums_of(body) + sums_of(head)


class GraphNetwork(nn.Module):
    """Two graph convolutions over a sparse matrix of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.scores = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        features = F.relu(torch.sparse.mm(edges, self.hidden(nodes)))
        return torch.sparse.mm(edges, self.scores(features))


def convolve_graph(prepare: Prepare) -> list[float]:
    """A graph network on a sparse tensor of edges, trained on some of the nodes, measured on others."""
    torch.manual_seed(0)
    model: Any = GraphNetwork().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = samples().tensors
    edges = (torch.rand(len(x), len(x), generator=torch.Generator().manual_seed(5)) < 0.3).double().to_sparse()
    trained, measured = torch.arange(7), torch.arange(7, len(x))
    model, optimizer = prepare(model, optimizer)
    numbers = list[float]()
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges)[trained], y[trained])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = (model(x, edges)[measured].argmax(1) == y[measured]).double().mean()
        numbers += [loss.item(), correct.item()]
    return numbers + sums_of(model)


def sums_of(model: Any) -> list[float]:
    return [float(value.double().abs().sum()) for value in model.state_dict().values() if isinstance(value, Tensor)]


LOOPS = {
    loop.__name__: loop
    for loop in (classify, measure_first, accumulate, adversaries, evaluate_closures, convolve_graph)
}
