"""A siamese network that tells whether two handwritten digits are the same: one model, called twice in a loss.

python examples/scripts/siamese.py
polylane run examples/scripts/siamese.py --workers 2 --plan data=2
"""

import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

import polylane


class Pairs(Dataset):
    """An image, and another one: of the same digit for every second index."""

    def __init__(self, images, labels):
        self.images, self.labels = torch.Tensor(images / 16), labels.tolist()
        self.of_label = {c: [i for i, label in enumerate(self.labels) if label == c] for c in range(10)}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label, same = self.labels[index], index % 2
        other = label if same else random.choice([c for c in range(10) if c != label])
        return self.images[index], self.images[random.choice(self.of_label[other])], torch.tensor(float(same))


class Embedding(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=1.0):
        super().__init__()
        self.margin = margin

    def forward(self, first, second, same):
        distance = F.pairwise_distance(first, second)
        return (same * distance.pow(2) + (1 - same) * F.relu(self.margin - distance).pow(2)).mean()


def train(args, model, loader, criterion, optimizer, epoch):
    model.train()
    for batch_idx, (first, second, same) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(first), model(second), same)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train epoch {epoch} [{batch_idx * len(first)}/{len(loader.dataset)}]\tLoss: {loss.item():.6f}")


def test(model, loader, criterion):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for first, second, same in loader:
            a, b = model(first), model(second)
            test_loss += criterion(a, b, same).item() * len(same)
            predicted = torch.where(F.pairwise_distance(a, b) < 0.5, 1.0, 0.0)
            correct += predicted.eq(same).sum().item()
    size = len(loader.dataset)
    print(f"Test set: average loss {test_loss / size:.4f}, accuracy {correct}/{size} ({100.0 * correct / size:.1f}%)")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1797)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()

    random.seed(1)
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = images[: args.samples], labels[: args.samples]
    split = int(0.8 * len(images))
    train_loader = DataLoader(Pairs(images[:split], labels[:split]), batch_size=64, shuffle=True)
    test_loader = DataLoader(Pairs(images[split:], labels[split:]), batch_size=128)
    model = Embedding()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    criterion = ContrastiveLoss()
    model, optimizer, scheduler = polylane.prepare(model, optimizer, scheduler)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, criterion, optimizer, epoch)
        test(model, test_loader, criterion)
        scheduler.step()


if __name__ == "__main__":
    main()
