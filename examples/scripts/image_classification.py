"""Handwritten digits by a small convolutional network: augmentation, a learning-rate schedule, the best weights kept.

python examples/scripts/image_classification.py
polylane run examples/scripts/image_classification.py --workers 2 --plan data=2
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Dataset

import polylane


class Digits(Dataset):
    def __init__(self, images, labels, augment=False):
        self.images, self.labels, self.augment = torch.Tensor(images / 16).unsqueeze(1), torch.tensor(labels), augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            shift = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, shift, dims=(1, 2)) + 0.05 * torch.randn(8, 8)
        return image, self.labels[index]


def conv(channels_in, channels):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    )


def evaluate(model, loader):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss += F.cross_entropy(output, labels, reduction="sum").item()
            correct += (output.argmax(dim=1) == labels).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1797)
    parser.add_argument("--checkpoint", default=Path(tempfile.gettempdir()) / "digits.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8)[: args.samples]
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels[: args.samples], test_size=0.2, random_state=0
    )
    train_loader = DataLoader(Digits(train_images, train_labels, augment=True), batch_size=64, shuffle=True)
    test_loader = DataLoader(Digits(test_images, test_labels), batch_size=256)

    model = nn.Sequential(
        conv(1, 16),
        conv(16, 16),
        nn.MaxPool2d(2),
        conv(16, 32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    model, optimizer, scheduler, train_loader, test_loader = polylane.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )

    best = 0.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        total, correct = 0.0, 0
        for images, labels in train_loader:
            optimizer.zero_grad()
            output = model(images)
            loss = F.cross_entropy(output, labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
            correct += (output.argmax(dim=1) == labels).sum().item()
        scheduler.step()
        count = len(train_loader.dataset)
        test_loss, accuracy = evaluate(model, test_loader)
        print(f"epoch {epoch}  lr {scheduler.get_last_lr()[0]:.4f}  train loss {total / count:.4f}", end="  ")
        print(f"accuracy {correct / count:.4f}  test loss {test_loss:.4f}  accuracy {accuracy:.4f}")
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), args.checkpoint)

    model.load_state_dict(torch.load(args.checkpoint))
    print(f"best test accuracy {evaluate(model, test_loader)[1]:.4f}")


if __name__ == "__main__":
    main()
