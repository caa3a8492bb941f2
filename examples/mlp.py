"""Ten layers of 1,024 units: many bytes of gradients for each of its FLOPs, so that the way of splitting it matters.

polylane plan examples/mlp.py --cluster 2:cpu --batch 128
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def model(width: int = 1024, layers: int = 10) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def optimizer(parameters, lr: float = 1e-3):
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def data(split: str, width: int = 1024, samples: int = 512) -> TensorDataset:
    """Random inputs; targets are what one random layer makes of them."""
    generator = torch.Generator().manual_seed(int(split == "test"))
    teacher = torch.randn(width, width, generator=torch.Generator().manual_seed(2)) / width**0.5
    inputs = torch.randn(samples, width, generator=generator)
    return TensorDataset(inputs, (inputs @ teacher).relu())
