"""What every test needs: tests/ importable, and a test process that can be forked safely."""

import gc
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

# Workers are forked from this process. A process whose OpenMP pool has started hangs in its children: never start it.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What torch and thousands of tests are made of stays: spare the garbage collector from looking at it."""
    gc.collect()
    gc.freeze()
