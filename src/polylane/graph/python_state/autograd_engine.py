"""Autograd engine: started while it still counts the devices that there are, so that processes can be forked."""

from __future__ import annotations

import functools

import torch


@functools.cache
def start_autograd_engine() -> None:
    """Run a first backward pass, in which autograd starts a thread for each accelerator.

    Must be called before the first use of fake tensors. They pretend a CUDA device where a torch that is built for CUDA
    sees none; an engine that starts afterwards makes a thread for it, and then no forked process can go backward.
    """
    torch.ones((), requires_grad=True).backward()
