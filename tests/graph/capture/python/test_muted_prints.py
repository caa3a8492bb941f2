"""What a model prints is printed by steps: trials of it are silent, unless one of them fails."""

from __future__ import annotations

import code
import pprint
import sys
from typing import Any

import pytest
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.graph.capture.python.muted_prints import prints_muted
from polylane.runtime.job import Job
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, mlp, plainly, sgd, trained, workers


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.raises = mlp(6, 4), False

    def forward(self, x: Tensor) -> Tensor:
        print("forward of", len(x))
        if self.raises:
            raise ArithmeticError("no such number")
        return self.body(x)


def talking_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    print(f"loss {loss.item():.3f}")
    return loss


def test_a_capture_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    compile_training(Talking(), build_objectives(talking_loss, sgd, None), batch_of(8), "data=2")
    assert capfd.readouterr().out == ""


def test_steps_print_what_a_plain_loop_prints(capfd: pytest.CaptureFixture[str]) -> None:
    batches = [batch_of(8, seed) for seed in range(3)]
    plainly(Talking(), batches, loss=talking_loss)
    plain = [line for line in capfd.readouterr().out.splitlines() if line.startswith("loss")]
    trained(Talking(), "data=1", batches, loss=talking_loss)
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("loss")] == plain


def test_a_failing_trial_shows_what_was_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = Talking()
    model.raises = True
    with pytest.raises((PolylaneError, ArithmeticError)):
        compile_training(model, build_objectives(talking_loss, sgd, None), batch_of(8), "data=2")
    assert "forward of" in capsys.readouterr().out


def test_a_debugger_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    """Its prompt is written by Python's own library."""
    with prints_muted():
        print("held back")
        code.InteractiveConsole({}).push("print('of the prompt')")
    assert capsys.readouterr().out == "of the prompt\n"


class Tee:
    """What users put in the place of standard output: its write returns nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


def test_a_stream_of_the_users_own_is_written_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    sys.stdout, stream = Tee(sys.stdout), sys.stdout
    try:
        with prints_muted():
            pprint.pprint("of a library")
            kept = sys.stdout
            print("held back")
        print("afterwards", file=kept)
    finally:
        sys.stdout = stream
    assert capsys.readouterr().out == "'of a library'\nafterwards\n"


class Counting(Talking):
    """A counter makes the model run as the user's own Python, whose state is put back after an evaluation."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


def test_an_evaluation_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def evaluate(job: Job) -> None:
        print("before")
        job.evaluate(batch_of(8))
        print("after", flush=True)

    workers(evaluate, Counting(), "data=1", loss=talking_loss, evaluates=True)
    out = capfd.readouterr().out
    assert "forward of 8" in out[out.index("before") : out.index("after")]
