"""A training in float64 with steps of a given length, as a recipe and as a script: faults strike it from outside."""

RECIPE = """
import time
import torch
from torch import nn

class Slow(torch.optim.AdamW):
    pause = 0.0

    def step(self, closure=None):
        time.sleep(Slow.pause)
        super().step(closure)

def model():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()

def data(split):
    random = torch.Generator().manual_seed(0)
    points = [(torch.randn(6, generator=random, dtype=torch.float64), i % 4) for i in range(64)]
    return points if split == "train" else None

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def optimizer(parameters, pause=0.0):
    Slow.pause = pause
    return Slow([p for _, p in parameters], lr=0.01)
"""

# The same under polylane run: its losses and weights go to a file.
SCRIPT = """
import json, os, sys, time
import torch, polylane
from recipe import data, loss, model as build, optimizer as make

steps, pause, out = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
model = build()
optimizer = make(list(model.named_parameters()), pause)
loader = torch.utils.data.DataLoader(data("train"), 16)
model, optimizer, loader = polylane.prepare(model, optimizer, loader)
for epoch in range(steps // 4):
    for batch in loader:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
weights = {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}
if os.environ.get("POLYLANE_RANK", "0") == "0":
    with open(out, "w") as file:
        json.dump(weights, file)
"""
