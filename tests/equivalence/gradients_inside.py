"""Trainings whose losses take gradients inside: forces, residuals of equations, penalties, adversaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equivalence.trainings.training import BY_SAMPLE, RIGHT, SIZES, Training

ATOMS = 4


def _numbers(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def _seeded(model: type[nn.Module]) -> Any:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return model().double()

    return make


def _molecules() -> list[dict[str, Tensor]]:
    """Atomic numbers [samples, atoms], positions [samples, atoms, 3], energies [samples], forces."""
    found = []
    for step, n in enumerate(SIZES):
        draw = _numbers(step)
        found.append(
            {
                "z": torch.randint(1, 10, (n, ATOMS), generator=draw),
                "pos": torch.randn(n, ATOMS, 3, generator=draw, dtype=torch.float64),
                "energy": torch.randn(n, generator=draw, dtype=torch.float64),
                "forces": torch.randn(n, ATOMS, 3, generator=draw, dtype=torch.float64),
            }
        )
    return found


class Messages(nn.Module):
    """SchNet in small: filters of distances, messages added up at the atoms, a norm, an energy for each molecule."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(a, b) for a in range(ATOMS) for b in range(ATOMS) if a != b]
        self.register_buffer("row", torch.tensor([a for a, _ in pairs]))
        self.register_buffer("col", torch.tensor([b for _, b in pairs]))
        self.embedding, self.norm = nn.Embedding(10, 6), nn.LayerNorm(6)
        self.filters = nn.Sequential(nn.Linear(1, 6), nn.Softplus(), nn.Linear(6, 6))
        self.out = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, z: Tensor, pos: Tensor) -> Tensor:
        distance = (pos[:, self.row] - pos[:, self.col]).norm(dim=-1, keepdim=True)
        atoms = self.embedding(z)
        messages = atoms.index_select(1, self.col) * self.filters(distance)
        atoms = self.norm(atoms + torch.zeros_like(atoms).index_add(1, self.row, messages))
        energy: Tensor = self.out(atoms).sum(dim=(1, 2))
        return energy


def forces() -> Training:
    """Forces as the gradient of an energy to positions that the loss itself marks."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        pos = batch["pos"].requires_grad_()
        energy = model(batch["z"], pos)
        found = -torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
        return F.mse_loss(energy, batch["energy"]) + 10 * F.mse_loss(found, batch["forces"])

    return Training(_seeded(Messages), loss, _molecules, RIGHT)


class Solution(nn.Module):
    """A perceptron of a place and a time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        u: Tensor = self.net(torch.cat([x, t], dim=1))
        return u


def equation() -> Training:
    """First and second derivatives of a solution, and a weight of the residual that no gradient passes through."""

    def loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
        x, t = (each.clone().requires_grad_(True) for each in batch)
        u = model(x, t)
        u_x, u_t = torch.autograd.grad(u, (x, t), torch.ones_like(u), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        (steep,) = torch.autograd.grad(u_xx.sum(), x, retain_graph=True)
        residual = (u_t + u * u_x - 0.1 * u_xx) / (1 + steep.square())
        return residual.square().mean() + u.square().mean()

    def batches() -> list[tuple[Tensor, Tensor]]:
        points = [torch.rand(n, 2, generator=_numbers(step), dtype=torch.float64) for step, n in enumerate(SIZES)]
        return [(each[:, :1].clone(), each[:, 1:].clone()) for each in points]

    return Training(_seeded(Solution), loss, batches, RIGHT)


class Critic(nn.Module):
    """Convolutions of other strides and groups, a leaky activation in place, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.25),
            nn.Conv2d(4, 6, 3, 2, 1, groups=2), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(24, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores


def critic() -> Training:
    """A Wasserstein critic with dropout, and a penalty between real and generated images at random places."""

    def loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
        real, fake = batch
        at = torch.rand(real.size(0), 1, 1, 1, dtype=real.dtype)
        between = (at * real + (1 - at) * fake).requires_grad_(True)
        scores = model(between)
        (slopes,) = torch.autograd.grad(
            outputs=scores, inputs=between, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
        )
        penalty = ((slopes.view(slopes.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
        value: Tensor = model(fake).mean() - model(real).mean() + 10 * penalty
        return value

    def batches() -> list[tuple[Tensor, Tensor]]:
        images = [
            torch.randn(2, n, 2, 8, 8, generator=_numbers(step), dtype=torch.float64) for step, n in enumerate(SIZES)
        ]
        return [(real.clone(), fake.clone()) for real, fake in images]

    return Training(_seeded(Critic), loss, batches, RIGHT, draws=BY_SAMPLE)


class Reader(nn.Module):
    """An encoder layer with attention over a sequence of embedded words, and a class for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(self.layer(words).mean(1))
        return scores


def adversary() -> Training:
    """Adversarial training: words are moved along the gradient of the loss, which is not differentiated again."""

    def loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
        words = model.words(batch[0])
        clean = F.cross_entropy(model(words), batch[1])
        (slope,) = torch.autograd.grad(clean, words, retain_graph=True)
        moved = words + 0.5 * slope / slope.norm(dim=(1, 2), keepdim=True)
        return clean + F.cross_entropy(model(moved), batch[1])

    def batches() -> list[tuple[Tensor, Tensor]]:
        draws = [_numbers(step) for step in range(len(SIZES))]
        return [
            (torch.randint(0, 9, (n, 5), generator=draw), torch.randint(0, 3, (n,), generator=draw))
            for n, draw in zip(SIZES, draws, strict=True)
        ]

    return Training(_seeded(Reader), loss, batches, RIGHT, draws=BY_SAMPLE)


INSIDE = {"forces": forces, "equation": equation, "critic": critic, "adversary": adversary}
