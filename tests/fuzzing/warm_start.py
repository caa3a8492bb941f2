"""Imports what the commands import when they are called, so that each input's time is its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence


def warm_up() -> Callable[[Sequence[str]], object]:
    """Return the command line's entry, in a process that has imported all that it needs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)  # workers are forked from processes that are forked from this one
    from polylane.cli import main
    from polylane.commands import export, inspect, lanes, plan, simulate, train, verify  # noqa: F401
    from polylane.commands.running import worker  # noqa: F401
    from polylane.graph.capture.capture import capture

    model = torch.nn.Linear(2, 2)
    capture(model, lambda model, batch: model(batch).sum(), torch.zeros(2, 2), trainable=["weight", "bias"])
    return main
