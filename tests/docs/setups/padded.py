"""A small language model, its optimizer, and two batches of texts of unequal lengths."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
sgd = torch.optim.SGD(net.parameters(), lr=0.5)
batches = []
for _ in range(2):
    tokens = torch.randint(0, 20, (8, 12))
    lengths = torch.tensor([12, 12, 11, 10, 3, 2, 2, 1])
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(12) >= lengths[:, None], -100)
    batches.append((tokens, labels))
