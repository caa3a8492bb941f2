"""Trainings in which a worker hangs: a recipe for the command line, and a script that calls polylane itself."""

# The data set sends this process of rank 1 a signal at its 300th sample.
RECIPE = """
import multiprocessing, os, signal, torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def loss(model, batch):
    return model(batch).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)

class Data:
    def __init__(self, fault):
        self.fault, self.count = fault, 0

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        self.count += 1
        if self.count == 300 and "1" in (os.environ.get("RANK"), multiprocessing.current_process().name[-1]):
            os.kill(os.getpid(), getattr(signal, self.fault))
        return torch.full((4,), index / 1e5)

def data(split, fault="SIGSTOP"):
    return Data(fault) if split == "train" else None
"""

# Rank 1 takes its time between steps when rank 0 waits, and later it is stopped in a step; rank 0 says what it raises.
SCRIPT = """
import os, signal, sys, threading, time, torch
from torch import nn
import polylane
from polylane.errors import WorkerHung

torch.set_num_threads(1)

def loss(model, batch):
    return model(batch).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)

batch = torch.ones(8, 4)
job = polylane.parallelize(nn.Linear(4, 2), loss, optimizer, example=batch, plan=sys.argv[1], hang_after=1.0)
rank = job.world.rank
for step in range(5):
    job.step(batch)
time.sleep(1.5)  # everybody: nobody waits
if rank == 1:
    time.sleep(4)  # the line
try:
    for step in range(1_000_000):
        if rank == 1 and step == 5:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        job.step(batch)
except WorkerHung as hung:
    print(f"raised: {hung.ranks} {hung.error_message}", flush=True)
    os._exit(3)
"""
