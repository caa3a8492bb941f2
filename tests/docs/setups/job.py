"""A job on one worker, and data to predict for."""

import torch
from torch import nn
from torch.utils.data import default_collate

import polylane

test = [(torch.randn(8), torch.tensor(0)) for _ in range(4)]
network = nn.Linear(8, 3)
criterion, sgd = nn.CrossEntropyLoss(), torch.optim.SGD(network.parameters(), lr=0.1)
job = polylane.parallelize(network, criterion, sgd, example=default_collate(test), audit="off")
