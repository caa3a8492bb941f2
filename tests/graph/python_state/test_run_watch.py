"""A dry run is watched: the clocks, environment variables and files that the user's lines read, and backward passes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from polylane.graph.python_state.run_watch import RunWatch, watch_backward


class Reader(nn.Module):
    """Reads a clock, an environment variable, and a file by each of two ways, and runs backward inside."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.seen = file, ""

    def forward(self, x: Tensor) -> Tensor:
        assert time.time() and os.environ.get("POLYLANE_NO_SUCH_KEY") is None
        with open(self.file) as text:
            self.seen = text.read()
        self.file.with_suffix(".other").exists()
        torch.autograd.grad((x * x).sum(), x)
        return x


def test_what_the_users_lines_read_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "scale.txt"
    file.write_text("2.0")
    model = nn.Sequential(Reader(file))
    watch = RunWatch({id(module): path for path, module in model.named_modules()}, model)
    with watch.profiling(), watch_backward() as backwards:
        model(torch.ones(2, requires_grad=True))
    assert [(effect.path, effect.kind) for effect in watch.found] == [("0", "clock")]
    assert watch.environment == ["POLYLANE_NO_SUCH_KEY"]
    assert watch.files == [str(file), str(file.with_suffix(".other"))]
    assert Reader.forward.__code__ in watch.ran and backwards == [False]
