"""What every test needs: tests/ importable, and a test process that can be forked safely."""

import gc
import sys
from pathlib import Path

import torch

# Helpers are imported by their bare names, whatever drawer the tests that need them are in.
TESTS = Path(__file__).parent
for _folder in (TESTS, *(TESTS / name for name in ("equivalence", "graph", "optim", "placement", "plan"))):
    sys.path.insert(0, str(_folder))

# Workers are forked from this process. A process whose OpenMP pool has started hangs in its children: never start it.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What torch and thousands of tests are made of stays: spare the garbage collector from looking at it."""
    gc.collect()
    gc.freeze()
