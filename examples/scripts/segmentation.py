"""Strokes of handwritten digits, found in noisy pictures by a small U-Net, with Dice loss and intersection over union.

python examples/scripts/segmentation.py
polylane run examples/scripts/segmentation.py --workers 2 --plan pipeline=2
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import polylane


def double_conv(channels_in, channels):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1 = double_conv(1, width)
        self.down2 = double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.conv2 = double_conv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.conv1 = double_conv(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        skip1 = self.down1(x)
        skip2 = self.down2(F.max_pool2d(skip1, 2))
        x = self.bottom(F.max_pool2d(skip2, 2))
        x = self.conv2(torch.cat([self.up2(x), skip2], dim=1))
        x = self.conv1(torch.cat([self.up1(x), skip1], dim=1))
        return self.out(x).squeeze(1)


def dice_loss(logits, masks, smooth=1.0):
    probs = logits.sigmoid()
    intersection = (probs * masks).sum(dim=(1, 2))
    union = probs.sum(dim=(1, 2)) + masks.sum(dim=(1, 2))
    return 1 - ((2 * intersection + smooth) / (union + smooth)).mean()


def pictures(count):
    """A digit somewhere in a picture of 16 x 16 noisy pixels, and the mask of its strokes."""
    digits = torch.Tensor(load_digits().images[:count] / 16)
    images, masks = torch.zeros(len(digits), 16, 16), torch.zeros(len(digits), 16, 16)
    for i, (top, left) in enumerate(torch.randint(0, 9, (len(digits), 2)).tolist()):
        images[i, top : top + 8, left : left + 8] = digits[i]
        masks[i, top : top + 8, left : left + 8] = digits[i] > 0.4
    return TensorDataset((images + 0.3 * torch.randn(images.shape)).unsqueeze(1), masks)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--samples", type=int, default=1000)
args = parser.parse_args()

torch.manual_seed(0)
train_set, val_set = random_split(pictures(args.samples), [0.8, 0.2])
train_loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
val_loader = DataLoader(val_set, batch_size=32)
model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
bce = nn.BCEWithLogitsLoss()
model, optimizer, train_loader, val_loader = polylane.prepare(model, optimizer, train_loader, val_loader)

for epoch in range(args.epochs):
    model.train()
    running_loss = 0.0
    for images, masks in train_loader:
        logits = model(images)
        loss = bce(logits, masks) + dice_loss(logits, masks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()

    model.eval()
    intersection = union = 0
    dice = []
    with torch.no_grad():
        for images, masks in val_loader:
            logits = model(images)
            dice.append(1 - dice_loss(logits, masks).item())
            predicted, expected = logits > 0, masks > 0
            intersection += (predicted & expected).sum().item()
            union += (predicted | expected).sum().item()
    print(
        f"epoch {epoch + 1}: loss {running_loss / len(train_loader):.4f}, "
        f"dice {sum(dice) / len(dice):.4f}, IoU {intersection / union:.4f}"
    )
