"""A small Transformer learns to read handwritten digits: plain PyTorch on one device.

python examples/tutorial/plain.py
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Reader(nn.Module):
    """Cuts an image of 8 x 8 pixels into 16 patches of 2 x 2 pixels, which attend to each other."""

    def __init__(self, width=32, layers=2):
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.1 * torch.randn(16, width))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(layers)]
        self.layers = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(16 * width, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(tokens)).flatten(1))


def load_images():
    """Return the images to train on, and those to test on: 1,437 and 360, with their labels."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def measure_accuracy(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = load_images()
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=360)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
        accuracy = measure_accuracy(model, test_loader)
        print(f"epoch {epoch}  loss {total / len(train_set):.3f}  accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
