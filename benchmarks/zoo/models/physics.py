"""Losses that take gradients inside: forces, equations of physics, penalties of critics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import SAMPLES, Family, images, numbers

PHYSICS = Family("physics", "Losses with gradients inside: forces, equations, penalties")


# Energies and forces --------------------------------------------------------------------------------------------------


def all_pairs(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Every pair of atoms of the same molecule, and their distances."""
    near = (batch[:, None] == batch[None, :]) & ~torch.eye(len(batch), dtype=torch.bool, device=pos.device)
    row, col = near.nonzero(as_tuple=True)
    return torch.stack([row, col]), (pos[row] - pos[col]).norm(dim=-1)


def schnet() -> nn.Module:
    from torch_geometric.nn.models import SchNet

    model: nn.Module = SchNet(16, 16, 2, 8, interaction_graph=all_pairs)
    return model


def atoms(steps: int) -> Sequence[dict[str, Tensor]]:
    """Batches of molecules: atomic numbers, positions, the molecule of every atom; energies and forces."""

    def batch(step: int) -> dict[str, Tensor]:
        draw = numbers(step)
        sizes = torch.randint(2, 5, (SAMPLES,), generator=draw)
        count = int(sizes.sum())
        return {
            "z": torch.randint(1, 10, (count,), generator=draw),
            "pos": torch.randn(count, 3, generator=draw),
            "batch": torch.repeat_interleave(torch.arange(SAMPLES), sizes),
            "energy": torch.randn(SAMPLES, 1, generator=draw),
            "forces": torch.randn(count, 3, generator=draw),
        }

    return [batch(step) for step in range(steps)]


def energy_and_forces(model: Any, batch: dict[str, Tensor]) -> Tensor:
    pos = batch["pos"].requires_grad_()
    energy = model(batch["z"], pos, batch["batch"])
    forces = -torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
    return F.mse_loss(energy, batch["energy"]) + F.mse_loss(forces, batch["forces"])


class Potential(nn.Module):
    """Behler-Parrinello's potential over molecules of one size: a perceptron on radial functions of each atom."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.5, 3.0, 8))
        self.embedding = nn.Embedding(10, 8)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, z: Tensor, pos: Tensor) -> Tensor:
        difference = pos[:, :, None] - pos[:, None]
        distance = (difference.square().sum(-1) + 1e-6).sqrt()
        radial = torch.exp(-((distance[..., None] - self.centers) ** 2)).sum(2)
        atomic = self.net(torch.cat([self.embedding(z), radial], dim=-1))
        energy: Tensor = atomic.sum(dim=(1, 2))
        return energy


def same_sized(steps: int) -> Sequence[dict[str, Tensor]]:
    """Batches of molecules of 5 atoms: numbers [samples, 5], positions [samples, 5, 3], energies, forces."""

    def batch(step: int) -> dict[str, Tensor]:
        draw = numbers(step)
        return {
            "z": torch.randint(1, 10, (SAMPLES, 5), generator=draw),
            "pos": torch.randn(SAMPLES, 5, 3, generator=draw),
            "energy": torch.randn(SAMPLES, generator=draw),
            "forces": torch.randn(SAMPLES, 5, 3, generator=draw),
        }

    return [batch(step) for step in range(steps)]


def potential_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    pos = batch["pos"].detach().clone().requires_grad_(True)
    energy = model(batch["z"], pos)
    (gradient,) = torch.autograd.grad(energy, pos, torch.ones_like(energy), create_graph=True)
    return F.mse_loss(energy, batch["energy"]) + 10 * F.mse_loss(-gradient, batch["forces"])


PHYSICS.add("SchNet (forces)", "torch-geometric", schnet, energy_and_forces, atoms)
PHYSICS.add("Behler-Parrinello (forces)", "torch", Potential, potential_loss, same_sized)


# Equations ------------------------------------------------------------------------------------------------------------


def perceptron() -> nn.Module:
    from torch_geometric.nn import MLP

    model: nn.Module = MLP([2, 16, 16, 1], act="tanh", norm=None)
    return model


def collocated(steps: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Batches of points (x, t) inside, and as many at the start."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        draw = numbers(step)
        return torch.rand(SAMPLES, 2, generator=draw) * 2 - 1, torch.rand(SAMPLES, 1, generator=draw) * 2 - 1

    return [batch(step) for step in range(steps)]


def burgers(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The residual of Burgers' equation, u_t + u u_x = 0.01 u_xx, and the start u = -sin(pi x)."""
    x = batch[0][:, :1].clone().requires_grad_(True)
    t = batch[0][:, 1:].clone().requires_grad_(True)
    u = model(torch.cat([x, t], dim=1))
    u_x, u_t = torch.autograd.grad(u, (x, t), torch.ones_like(u), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)
    residual = u_t + u * u_x - 0.01 * u_xx
    start = model(torch.cat([batch[1], torch.zeros_like(batch[1])], dim=1))
    return residual.square().mean() + F.mse_loss(start, -torch.sin(torch.pi * batch[1]))


PHYSICS.add("PINN (Burgers)", "torch-geometric", perceptron, burgers, collocated)


# Critics --------------------------------------------------------------------------------------------------------------


def critic() -> nn.Module:
    """The discriminator of pytorch/examples' dcgan, without batch normalization, as penalties ask for."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, 1, 0, bias=False),
    )


def pairs_of_images(steps: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Batches of real images and of generated ones, [samples, 3, 16, 16]."""
    return [(images(16)(step + 1)[step][0], images(16)(step + 51)[-1][0]) for step in range(steps)]


def wasserstein(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A Wasserstein critic's loss with a penalty of gradients between real and generated images."""
    real, fake = batch
    alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = model(between)
    gradients = torch.autograd.grad(
        outputs=scores, inputs=between, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
    )[0]
    penalty = ((gradients.view(gradients.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
    loss: Tensor = model(fake).mean() - model(real).mean() + 10 * penalty
    return loss


PHYSICS.add("WGAN-GP critic", "pytorch/examples", critic, wasserstein, pairs_of_images)
