"""A worker over NCCL that fails ends at once: to destroy a process group would wait for kernels that never end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

BLOCKED_SECONDS = 100.0

# The last worker of a pipeline raises in its second step, when receives of the first one are posted.
SCRIPT = f"""
import time
import torch
import torch.distributed as dist
import polylane
from benchmarks.gpu.trainings import batch_of, build, sgd, trainings
from polylane.runtime.workers import world
from tests.support.nccl import fake_nccl

torch.set_num_threads(1)
fake_nccl.use_fake_nccl()
world.backend_of_device = lambda device: fake_nccl.NAME
destroy = dist.destroy_process_group

def destroy_as_nccl(group=None):
    if fake_nccl.RECORDER.open:  # ProcessGroupNCCL.shutdown waits for its kernels to finish
        time.sleep({BLOCKED_SECONDS})
    destroy(group)

dist.destroy_process_group = destroy_as_nccl
name, dtype = "gpt, untied", torch.float64
plan, example = "pipeline=2,microbatches=4", batch_of(name, 0, dtype)
job = polylane.parallelize(build(name, dtype), trainings()[name][1], sgd, example=example, plan=plan, audit="off")
with job:
    job.step(example)
    if job.world.rank == 1:
        receive = job._role._connections.transport.receive((1,), torch.float64, 0)  # nobody sends this
        raise ValueError("the user's own mistake")
    time.sleep({BLOCKED_SECONDS})  # until torchrun's agent ends it
"""


def test_a_worker_that_fails_ends_at_once_with_its_error(tmp_path: Path) -> None:
    """Under torchrun, whose agent ends the others when one has ended."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]),
        "POLYLANE_TRANSPORT": "gloo",
        "OMP_NUM_THREADS": "1",
    }
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    start = time.monotonic()
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=3 * BLOCKED_SECONDS)
    assert "the user's own mistake" in done.stderr and done.returncode == 1
    assert time.monotonic() - start < BLOCKED_SECONDS
