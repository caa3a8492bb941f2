"""Data of the script that predicts sine waves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch


def waves(folder: Path) -> None:
    """Write sine waves of 9 samples each."""
    starts = np.random.default_rng(2).integers(-80, 80, (9, 1))
    torch.save(np.sin((np.arange(9) + starts) / 20.0), folder / "traindata.pt")
