"""The model, loss, optimizer and data of train.py as a recipe, which polylane trains without a loop of yours.

polylane train examples/tutorial/recipe.py --workers 2 --plan pipeline=2 --epochs 3
"""

import torch
import torch.nn.functional as F
from plain import Reader, load_images


def model(width: int = 32, layers: int = 2):
    return Reader(width, layers)


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model, batch):
    images, labels = batch
    return {"accuracy": model(images).argmax(dim=1) == labels}


def optimizer(parameters, lr: float = 2e-3):
    return torch.optim.AdamW(parameters, lr=lr)


def data(split):
    train_set, test_set = load_images()
    return train_set if split == "train" else test_set
