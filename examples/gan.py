"""A GAN on handwritten digits: two networks, two losses, two optimizers, in a loop that owns its steps.

python examples/gan.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import digits  # the recipe next to this one

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


def main(epochs: int = 20, batch_size: int = 64) -> None:
    torch.manual_seed(0)
    gan = model()
    discriminator_steps = discriminator_optimizer(gan.named_parameters())
    generator_steps = generator_optimizer(gan.named_parameters())
    for epoch in range(epochs):
        for images in DataLoader(data("train"), batch_size, shuffle=True):
            discriminator_steps.zero_grad()
            discriminator = discriminator_loss(gan, images)
            discriminator.backward()
            discriminator_steps.step()

            generator_steps.zero_grad()
            generator = generator_loss(gan, images)
            generator.backward()
            generator_steps.step()
        print(f"epoch {epoch + 1:2}  discriminator {discriminator.item():.3f}  generator {generator.item():.3f}")


if __name__ == "__main__":
    main()
