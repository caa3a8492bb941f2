"""A U-Net that finds handwritten digits in noise, pixel by pixel.

Its skips run from every level on the way down to the same level on the way up; a pipeline sends each of them straight
to the stage that needs it:

polylane train examples/unet.py --workers 4 --plan pipeline=4
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import digits  # the recipe next to this one
import polylane

BACKGROUND, DIGIT, IGNORED = 0, 1, -100  # what a pixel may be


class Double(nn.Sequential):
    """Two convolutions, each normalized and rectified."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )


class UNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([1, *widths], widths[:-1], strict=False))
        self.bottom = Double(widths[-2], widths[-1])
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(Double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, up, skip in zip(self.widen, self.up, reversed(skips), strict=True):
            x = up(torch.cat([skip, widen(x)], dim=1))
        return self.head(x)


class PastedDigits(Dataset):
    """Digits, doubled in size, pasted at random places on 32 x 32 pixels of noise; sample i is always the same."""

    def __init__(self, images: Tensor, noise: float) -> None:
        self.images, self.noise = images, noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        picture = self.noise * torch.rand(32, 32, generator=random)
        mask = torch.full((32, 32), BACKGROUND)
        top, left = torch.randint(0, 17, (2,), generator=random).tolist()
        ink = self.images[index].repeat_interleave(2, 0).repeat_interleave(2, 1)
        picture[top : top + 16, left : left + 16] += ink
        # Faint pixels, where even a person could not say, belong to neither side and do not count.
        region = mask[top : top + 16, left : left + 16]
        region[ink > 0] = IGNORED
        region[ink >= 0.5] = DIGIT
        return picture.unsqueeze(0), mask


def model(width: int = 8, depth: int = 3) -> nn.Module:
    return UNet(width, depth)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> polylane.Mean:
    """Over the pixels that count: their number differs from image to image, so the mean is given as total and count."""
    pictures, masks = batch
    total = F.cross_entropy(model(pictures), masks, ignore_index=IGNORED, reduction="sum")
    return polylane.Mean(total, (masks != IGNORED).sum())


def optimizer(parameters, lr: float = 3e-3, weight_decay: float = 0.01):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)


def data(split: str, noise: float = 1.0) -> PastedDigits:
    images, _ = digits.data(split).tensors
    return PastedDigits(images.squeeze(1), noise)
