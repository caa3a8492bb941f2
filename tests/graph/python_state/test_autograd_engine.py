"""Autograd engine: forked processes go backward after a capture, also with a torch that is built for CUDA."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os
import torch
from torch import nn
from polylane.graph.capture.capture import capture

def loss(model, batch):
    return model(batch).square().mean()

model = nn.Linear(4, 2)
capture(model, loss, torch.randn(6, 4))
if (child := os.fork()) == 0:
    model(torch.randn(6, 4)).sum().backward()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_after_a_capture_goes_backward():
    """Fake tensors pretend a CUDA device to such a torch, for which autograd would start a thread in the parent."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert ended.stdout == "7\n", ended.stderr[-2000:]
