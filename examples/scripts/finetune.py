"""A network that knows the digits 0 to 4 learns 5 to 9: its body is frozen, a new head is trained.

python examples/scripts/finetune.py
polylane run examples/scripts/finetune.py --workers 2 --plan data=2
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polylane


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.fc = nn.Linear(128, classes)

    def forward(self, x):
        return self.fc(self.body(x))


def pretrain(model, dataset, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for images, labels in DataLoader(dataset, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()


parser = argparse.ArgumentParser()
parser.add_argument("--pretrain-epochs", type=int, default=3)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--samples", type=int, default=1797)
args = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
images, labels = (
    torch.Tensor(digits.images / 16).unsqueeze(1)[: args.samples],
    torch.tensor(digits.target)[: args.samples],
)
known = labels < 5
model = Net(classes=5)
pretrain(model, TensorDataset(images[known], labels[known]), args.pretrain_epochs)

for param in model.parameters():
    param.requires_grad = False
model.fc = nn.Linear(model.fc.in_features, 5)
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"{trainable} of {sum(p.numel() for p in model.parameters())} parameters are trained")

new_images, new_labels = images[~known], labels[~known] - 5
split = int(0.8 * len(new_images))
train_loader = DataLoader(TensorDataset(new_images[:split], new_labels[:split]), batch_size=32, shuffle=True)
val_loader = DataLoader(TensorDataset(new_images[split:], new_labels[split:]), batch_size=64)
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=1)
model, optimizer, scheduler, train_loader, val_loader = polylane.prepare(
    model, optimizer, scheduler, train_loader, val_loader
)

for epoch in range(1, args.epochs + 1):
    for phase, loader in [("train", train_loader), ("val", val_loader)]:
        model.train(phase == "train")
        model.body.eval()  # the statistics of a frozen body stay as they are
        running_loss, running_corrects = 0.0, 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(inputs)
                _, preds = torch.max(outputs, 1)
                loss = F.cross_entropy(outputs, targets)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running_loss += loss.item() * inputs.size(0)
            running_corrects += torch.sum(preds == targets).item()
        accuracy = running_corrects / len(loader.dataset)
        print(f"epoch {epoch} {phase} loss: {running_loss / len(loader.dataset):.4f} acc: {accuracy:.4f}")
    scheduler.step(accuracy)
