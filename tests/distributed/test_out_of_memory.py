"""A worker that asks for memory in vain ends the job with one sentence: which, where, how much, and what to do."""

from __future__ import annotations

import errno
import pickle
import resource

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.inspection.memory_prediction import predict_peak_bytes, with_predicted_memory
from polylane.runtime.job import Job
from polylane.runtime.workers import failure
from polylane.runtime.workers.failure import Failure
from polylane.runtime.workers.out_of_memory import MemoryNeed, OutOfMemory, out_of_memory
from tests.support.workers.training import batch_of, classify, compiled, mlp, sgd, workers

MORE = 1 << 28  # address space that a worker may take beyond what it has


def limit_address_space(more: int) -> None:
    """Let this process take so many bytes more than it has."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))


class Greedy(nn.Module):
    """The identity by way of far more memory than there is, where it is told to."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.repeat(1, 1 << 17).sum(1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.greedy, self.last = nn.Linear(6, 8), Greedy(), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.greedy(torch.tanh(self.first(x))))


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2,microbatches=2", "pipeline=2,microbatches=2,schedule=zb-h1"])
def test_a_worker_that_gets_no_memory_is_told_of_in_one_sentence(plan: str) -> None:
    def work(job: Job) -> None:
        limit_address_space(MORE)
        job.step(batch_of(256))

    with pytest.raises(OutOfMemory) as caught:
        workers(work, Model(), plan, example=batch_of(4))
    need = caught.value.need
    assert need.rank in (0, 1) and need.module == "greedy" and need.source is not None
    assert need.asked is not None and need.asked >= MORE
    assert need.stage == (need.rank if "pipeline" in plan else 0)
    text = str(caught.value)
    assert text.startswith(f"worker {need.rank} ran out of memory at stage {need.stage}, microbatch ")
    assert " asking for " in text and "iB more" in text and "polylane plan --memory" in text and "\n" not in text


def test_memory_that_is_lacking_outside_of_a_pass() -> None:
    def work(job: Job) -> None:
        limit_address_space(MORE)
        torch.empty(1 << 40)

    with pytest.raises(OutOfMemory, match=r"^worker [01] ran out of memory, asking for 4.00 TiB more: "):
        workers(work, mlp(6, 8, 4), "data=2")


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), None),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), None),
        (RuntimeError("std::bad_alloc"), None),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error"),
            4096,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total"), 3 << 29),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_says_that_memory_ran_out(error: Exception, asked: int | None) -> None:
    found = out_of_memory(error, 3)
    assert found is not None and found.need == MemoryNeed(3, asked)
    assert str(pickle.loads(pickle.dumps(found))) == str(found)


@pytest.mark.parametrize("error", [RuntimeError("shapes"), ValueError("out of memory"), OSError(errno.EPERM, "")])
def test_what_does_not(error: Exception) -> None:
    assert out_of_memory(error, 0) is None


def test_a_worker_that_the_system_killed_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "count_system_kills", lambda: 5)
    told = Failure.of_exit(1, -9, kills_before=4).to_exception()
    assert isinstance(told, OutOfMemory) and str(told).startswith(
        "worker 1 was killed by the system because memory ran out"
    )
    assert "killed by SIGKILL" in str(Failure.of_exit(1, -9, kills_before=5).to_exception())


def test_the_sentence_has_what_was_predicted() -> None:
    """As inspect predicts it for the worker's stage."""
    objectives = build_objectives(classify, sgd, None)
    training = compiled(mlp(6, 512, 8, 4), objectives, batch_of(8), "pipeline=2,microbatches=2")
    found = with_predicted_memory(OutOfMemory(MemoryNeed(1, 1 << 20)), training, 8)
    assert found.need.stage == 1 and found.need.predicted == predict_peak_bytes(training, 8, 1) > 0
    assert "asking for 1.00 MiB more; the plan was predicted to take " in str(found)
