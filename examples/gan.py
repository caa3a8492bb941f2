"""A GAN on handwritten digits: two networks, two losses, two optimizers, in a loop that owns its steps.

python examples/gan.py                                                     one device
polylane run examples/gan.py --workers 4 --plan data=2,pipeline=2          the same loop under a plan
torchrun --nproc-per-node 2 examples/gan.py --objectives pipeline=2        no loop: each loss is an objective of a Job
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import digits  # the recipe next to this one
import polylane

LATENT = 16


class Generator(nn.Sequential):
    """Noise of shape (batch, 16) to images of shape (batch, 64), in [-1, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(LATENT, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, 64),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Images of shape (batch, 64) to the logit of each being real, of shape (batch, 1)."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(64, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )


class GAN(nn.Module):
    """Both networks, so that each loss can use both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = Generator(width)
        self.discriminator = Discriminator(width)


def model(width: int = 128) -> GAN:
    return GAN(width)


def noise(images: Tensor) -> Tensor:
    return torch.randn(images.shape[0], LATENT, dtype=images.dtype, device=images.device)


def discriminator_loss(model: GAN, images: Tensor) -> Tensor:
    """Tell real from generated. The generator is no party to it: its output is detached."""
    real = model.discriminator(images)
    generated = model.discriminator(model.generator(noise(images)).detach())
    return (
        F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        + F.binary_cross_entropy_with_logits(generated, torch.zeros_like(generated))
    ) / 2


def generator_loss(model: GAN, images: Tensor) -> Tensor:
    """Pass for real. Of the images only their number counts."""
    generated = model.discriminator(model.generator(noise(images)))
    return F.binary_cross_entropy_with_logits(generated, torch.ones_like(generated))


def discriminator_optimizer(parameters, lr: float = 1e-3):
    own = [(name, parameter) for name, parameter in parameters if name.startswith("discriminator.")]
    return torch.optim.AdamW(own, lr=lr, betas=(0.5, 0.99))


def generator_optimizer(parameters, lr: float = 1e-3):
    own = [(name, parameter) for name, parameter in parameters if name.startswith("generator.")]
    return torch.optim.AdamW(own, lr=lr, betas=(0.5, 0.99))


def data(split: str) -> list[Tensor]:
    """Images as 64 numbers in [-1, 1]."""
    images, _ = digits.data(split).tensors
    return list(images.flatten(start_dim=1) * 2 - 1)


def own_loop(gan: GAN, epochs: int, batch_size: int) -> None:
    """A plain training loop, under the plan of ``polylane run``."""
    discriminator_steps = discriminator_optimizer(gan.named_parameters())
    generator_steps = generator_optimizer(gan.named_parameters())
    loader = DataLoader(data("train"), batch_size, shuffle=True)
    gan, discriminator_steps, generator_steps, loader = polylane.prepare(
        gan, discriminator_steps, generator_steps, loader
    )
    for epoch in range(epochs):
        for images in loader:
            discriminator_steps.zero_grad()
            discriminator = discriminator_loss(gan, images)
            discriminator.backward()
            discriminator_steps.step()

            generator_steps.zero_grad()
            generator = generator_loss(gan, images)
            generator.backward()
            generator_steps.step()
        report(f"epoch {epoch + 1:2}", discriminator.item(), generator.item())


def planned(gan: GAN, epochs: int, batch_size: int, plan: str) -> None:
    """Two objectives over one model, each captured, split and stepped on its own."""
    losses = {"discriminator": discriminator_loss, "generator": generator_loss}
    optimizers = {"discriminator": discriminator_optimizer, "generator": generator_optimizer}
    images = data("train")
    with polylane.parallelize(gan, losses, optimizers, example=torch.stack(images[:batch_size]), plan=plan) as job:
        for number, batch in enumerate(job.batches(images, batch_size, epochs), start=1):
            discriminator = job.step(batch, "discriminator")
            generator = job.step(batch, "generator")
            if job.world.rank == 0 and number % 50 == 0:
                report(f"step {number:4}", discriminator.loss, generator.loss)


def report(label: str, discriminator: float, generator: float) -> None:
    print(f"{label}  discriminator {discriminator:.3f}  generator {generator:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", metavar="PLAN", help="the plan of a Job; default: a loop of our own")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.objectives is None:
        own_loop(model(), options.epochs, options.batch_size)
    else:
        planned(model(), options.epochs, options.batch_size, options.objectives)


if __name__ == "__main__":
    main()
