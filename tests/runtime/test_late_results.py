"""Results that are compared late, as on an accelerator, are compared when all workers' numbers have arrived."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polylane.runtime.data import batch_checks
from polylane.runtime.data.batch_checks import SLOT, BatchChecks
from polylane.runtime.step_result import HEAD, StepResult


class Sum:
    """An all-reduce under way: this worker's numbers, and the sum once it is waited for."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def wait(self) -> Tensor:
        return self.total


def test_the_latest_result_of_an_accelerator_is_compared_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_checks, "UNCHECKED_STEPS", 4)
    programs: Any = [SimpleNamespace(replica=0, replicas=[0], takes_turns=False, stages=(0,))] * 2
    transport: Any = SimpleNamespace(rank=0, size=2)
    sync = SimpleNamespace(shard="none", has_servers=False)
    plan = SimpleNamespace(resplits_batch=False, sync=sync, axes=(), is_asynchronous=False)
    checks = BatchChecks(SimpleNamespace(plan=plan), transport, programs, torch.device("cuda"))  # type: ignore[arg-type]
    compared = list[list[float]]()
    total = torch.ones(HEAD + 2 * SLOT)
    alone = torch.cat([total[: HEAD + SLOT], torch.zeros(SLOT)])
    results = [StepResult(n, 1, alone, Sum(total), _digests=2 * SLOT, _compare=compared.append) for n in range(5)]
    for before, result in zip([None, *results], results, strict=False):
        if before is not None:
            before._vector, before._pending = before._pending.wait(), None  # as a later step waits for it
        checks.keep(result)
    assert compared == [[1.0] * (2 * SLOT)] * 4 and not results[-1].is_complete
    assert results[-1].loss == 1 and compared == [[1.0] * (2 * SLOT)] * 5
