"""What every test needs: a test process that can be forked safely."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Generator
from typing import Any

# Tests fork, and a forked process cannot use an accelerator that its parent has looked for.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Else every run rewrites the assertions of all tests anew, and every process that starts cold compiles all of polylane.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Torch's threads wait for their next operator by spinning, which takes the cores from all others. Read at its import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

gc.disable()  # before the imports: nothing of what they and the collection make is garbage, and looking takes a third

import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo.config  # noqa: E402
from hypothesis import settings  # noqa: E402

from polylane.profiling import machine_load  # noqa: E402
from tests.support.workers.fork_memory import keep_collapsed  # noqa: E402

# Tests run beside others, which disturb what they measure: it is not measured twice, and nothing is said of it.
machine_load.FOREIGN = machine_load.SLOWER = float("inf")

# Workers are forked from this process. A process whose OpenMP pool has started hangs in its children: never start it.
torch.set_num_threads(1)


# Torch keeps what it has inferred of operators, for models in which equal layers follow each other; in small models
# hardly any operator comes twice, and keeping takes longer than inferring.
torch._dynamo.config.fake_tensor_cache_enabled = False

# A sixth of the examples that laws are tried on, the same in every run; `make test-all` takes all, and new ones.
settings.register_profile("few", max_examples=16, derandomize=True)


# A shell lets what it starts in the background ignore Ctrl-C, and so would every process that a test starts and
# interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A worker that gets this signal prints where all its threads are.
STACKS_SIGNAL = signal.SIGRTMIN + 5  # which nothing else takes: of polylane's workers SIGUSR2 is a request to end


def pytest_configure(config: pytest.Config) -> None:
    faulthandler.register(STACKS_SIGNAL, file=os.dup(sys.stderr.fileno()), all_threads=True)
    if config.option.markexpr == "not slow" and not config.getoption("--hypothesis-profile"):
        settings.load_profile("few")


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let the workers of a test that takes too long say where they are, before they are ended with it."""
    done = yield
    fail = signal.getsignal(signal.SIGALRM)
    if callable(fail):

        def print_stacks_and_fail(*at: Any) -> None:
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)  # forked workers inherit what threads hold
            for worker in multiprocessing.active_children():
                print(f"\n{item.nodeid}: {worker.name}:", file=sys.__stderr__, flush=True)
                os.kill(worker.pid or 0, STACKS_SIGNAL)
                time.sleep(0.5)
            fail(*at)

        signal.signal(signal.SIGALRM, print_stacks_and_fail)
    return done


def pytest_collection_finish() -> None:
    """What torch and thousands of tests are made of stays: spare the garbage collector from looking at it."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # What tests keep for each other (graphs, by the thousand objects) stays too: look at it seldom.
    gc.set_threshold(10_000, 20, 50)
    keep_collapsed()  # workers are forked by the thousand
