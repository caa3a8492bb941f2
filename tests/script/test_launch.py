"""launch(): a function on several workers from a process that is none of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch

import polylane
from polylane.errors import PolylaneError, WorkerFailed
from polylane.script.session import current_session


def test_what_rank_0_returns_and_prints_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    def report(word: str, number: int) -> Any:
        session = current_session()
        assert session.world is not None
        print(f"{word} of rank {session.world.rank}")
        print("a warning", file=sys.stderr)
        return word * number, torch.ones(2), session.plan

    text, tensor, plan = polylane.launch(report, "ha", workers=2, number=3)
    assert (text, tensor.tolist(), plan) == ("hahaha", [1.0, 1.0], "data=2")
    printed = capsys.readouterr()
    assert printed.out == "ha of rank 0\n"
    assert printed.err == "a warning\n"


def test_a_result_that_is_still_to_be_computed_is_computed() -> None:
    def train() -> Any:
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(3, 2).double()
        model, _ = polylane.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return model(torch.ones(4, 3).double()).square().mean()

    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 2).double()(torch.ones(4, 3).double()).square().mean()
    assert polylane.launch(train, workers=2).item() == pytest.approx(expected.item(), rel=1e-12)


def test_an_exception_has_the_worker_s_traceback() -> None:
    def fail() -> None:
        raise ValueError("a value of mine")

    with pytest.raises(WorkerFailed, match=r"(?s)in fail.*ValueError: a value of mine") as caught:
        polylane.launch(fail, workers=2)
    assert len(caught.traceback) <= 3  # this line and polylane.launch


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda: lambda: 3, r"cannot be pickled .*: return numbers, tensors or a state_dict\(\)"),
        (lambda: polylane.launch(print), "was called by a worker"),
    ],
)
def test_what_cannot_be_is_refused(function: Any, sentence: str) -> None:
    with pytest.raises(PolylaneError, match=sentence):
        polylane.launch(function, workers=1)


def test_a_process_that_has_started_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PolylaneError, match="restart the kernel"):
        polylane.launch(print)


def test_an_interrupt_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def write(self, text: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        def flush(self) -> None:
            pass

    def wait() -> None:
        print("begun")
        time.sleep(600)

    monkeypatch.setattr(sys, "stdout", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        polylane.launch(wait, workers=2)
    assert multiprocessing.active_children() == []
