"""What every test needs: tests/ importable, and a test process that can be forked safely."""

import gc
import os
import sys
from pathlib import Path

# Tests fork, and a forked process cannot use an accelerator that its parent has looked for.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

gc.disable()  # before the imports: nothing of what they and the collection make is garbage, and looking takes a third

import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo.config  # noqa: E402
from hypothesis import settings  # noqa: E402

# Helpers are imported by their bare names, whatever drawer the tests that need them are in.
TESTS = Path(__file__).parent
for _folder in (TESTS, *(TESTS / name for name in ("equivalence", "graph", "optim", "placement", "plan"))):
    sys.path.insert(0, str(_folder))

# Workers are forked from this process. A process whose OpenMP pool has started hangs in its children: never start it.
torch.set_num_threads(1)


# Torch keeps what it has inferred of operators, for models in which equal layers follow each other; in small models
# hardly any operator comes twice, and keeping takes longer than inferring.
torch._dynamo.config.fake_tensor_cache_enabled = False

# A fourth of the examples that laws are tried on, the same in every run; `make test-all` takes all, and new ones.
settings.register_profile("few", max_examples=25, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow" and not config.getoption("--hypothesis-profile"):
        settings.load_profile("few")


def pytest_collection_finish() -> None:
    """What torch and thousands of tests are made of stays: spare the garbage collector from looking at it."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # What tests keep for each other (graphs, by the thousand objects) stays too: look at it seldom.
    gc.set_threshold(10_000, 20, 50)
