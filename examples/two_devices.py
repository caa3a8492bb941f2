"""The tutorials' model for two devices, four linear layers, written as plain one-device code.

Where a tutorial moves fc1 and fc2 to one device, fc3 and fc4 to another, and the activations between them by hand:

polylane train examples/two_devices.py --workers 2 --plan pipeline=2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import digits  # the recipe next to this one


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(1024, 512)
        self.fc2 = nn.Linear(512, 256)
        self.fc3 = nn.Linear(256, 128)
        self.fc4 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        return self.fc4(x)


def model() -> nn.Module:
    return Net()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def optimizer(parameters, lr: float = 1e-3):
    return torch.optim.AdamW(parameters, lr=lr)


def data(split: str) -> TensorDataset:
    """Handwritten digits, enlarged from 8 x 8 to 32 x 32 pixels and flattened: 1,024 numbers each."""
    images, labels = digits.data(split).tensors
    return TensorDataset(F.interpolate(images, scale_factor=4.0).flatten(start_dim=1), labels)
