"""Mistakes of polylane's own are one sentence and a file; what the user's code raises keeps its traceback."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import polylane
from polylane.cli import app
from polylane.commands import inspect as inspecting
from polylane.commands import planning, printing
from polylane.commands import verify as verifying
from polylane.errors import ActionFailed, PolylaneError, WorkerFailed
from polylane.faults import PolylaneFault, explain_fault, told_as_fault
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.training_role import TrainingRole
from polylane.runtime.workers.failure import Failure
from tests.support.workers.training import batch_of, classify, mlp, sgd, workers

RECIPE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def data(split):
    if split == "test":
        return None
    return [(torch.randn(4), i % 2) for i in range(8)]
"""

SENTENCE = (
    r"polylane itself failed in {doing}: {error} at polylane/{file} line \d+; this is a fault of polylane: please "
    r"report it with (/\S+\.txt), which has the traceback$"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, and of the recipe, where the test is."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(RECIPE)
    return tmp_path


def matched(text: str, doing: str, error: str, file: str) -> str:
    """The contents of the file that a sentence names."""
    found = re.search(SENTENCE.format(doing=doing, error=error, file=file), text, re.MULTILINE)
    assert found and "Traceback" not in text, text
    return Path(found[1]).read_text()


NOT_CALLABLE = r"TypeError: 'NoneType' object is not callable"

COMMANDS = [
    ("inspect", inspecting, "describe", NOT_CALLABLE, "commands/inspect.py"),
    ("inspect --plan data=2 --batch 4", inspecting, "parse_auto", NOT_CALLABLE, "commands/inspect.py"),
    ("verify --workers 1 --batch 4", verifying, "_sentence", NOT_CALLABLE, "commands/verify.py"),
    ("plan --cluster 1:v100", planning, "method_of", NOT_CALLABLE, "commands/plan.py"),
]


@pytest.mark.parametrize(("words", "module", "name", "error", "file"), COMMANDS, ids=[words for words, *_ in COMMANDS])
def test_a_command(words: str, module: Any, name: str, error: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(module, name)
    monkeypatch.setattr(module, name, None)
    command, *options = words.split()
    result = CliRunner().invoke(app, [command, "tiny.py", *options])
    assert result.exit_code == 1
    kept = matched(result.stderr, f"polylane {command}", error, file)
    assert kept.startswith(f"polylane: {polylane.__version__}\ntorch: {torch.__version__}\nPython: 3.")
    assert "Traceback (most recent call last)" in kept and f"polylane/{file}" in kept


def test_a_worker_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Executor, "_forward")
    line = "train tiny.py --workers 2 --steps 1 --batch 4 --audit off --run run"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 1 and "polylane: worker " in result.stderr
    kept = matched(
        result.stderr,
        r"job\.step\(.*\) at stage 0, microbatch 0",
        r"AttributeError: .*'_forward'",
        "runtime/pipeline/executor.py",
    )
    assert "in _run_action" in kept


def test_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(8)
    job = polylane.parallelize(mlp(6, 4), classify, sgd, example=batch, audit="off")
    monkeypatch.delattr(TrainingRole, "_run")
    with pytest.raises(PolylaneFault) as caught:
        job.step(batch)
    assert caught.value.__suppress_context__
    line = r"job\.step\(test_faults\.py line \d+\)"
    matched(str(caught.value), line, "AttributeError: .*", "runtime/training_role.py")
    monkeypatch.setattr("polylane.auto.parallelize.TrainingProblem", {}.__getitem__)
    with pytest.raises(PolylaneFault) as caught:
        polylane.parallelize(mlp(6, 4), classify, sgd, example=batch)
    matched(str(caught.value), r"polylane\.parallelize", "TypeError: .*", "auto/parallelize.py")


def test_what_users_raise_is_theirs() -> None:
    """Their own exceptions, of any kind, and those of calls that a function does not take."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return {}["their"] if model.training and broken else classify(model, batch)

    batch, broken = batch_of(8), False
    job = polylane.parallelize(mlp(6, 4), loss, sgd, example=batch, audit="off")
    for call in (lambda: job.step(), lambda: polylane.parallelize(mlp(6, 4), loss)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="missing"):
            call()
    broken = True
    with pytest.raises((KeyError, PolylaneError), match="their") as caught:
        job.step(batch)
    assert not isinstance(caught.value, PolylaneFault)

    def work(job: Any) -> None:
        {}["their"] if job.plan.data == 2 else job.step(batch=batch, nome="loss")

    for plan, said in (("data=2", "KeyError: 'their'"), ("data=1", "TypeError: .*'nome'")):
        with pytest.raises(WorkerFailed, match=rf"(?s)worker \d failed\n\nTraceback.*{said}"):
            workers(work, mlp(6, 4), plan)


def test_what_operators_raise_for_values_is_no_fault() -> None:
    """An index that an embedding does not have, under a plan that splits it: torch says so in polylane's kernel."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.out = nn.Embedding(8, 6), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(x))

    def work(job: Any) -> None:
        job.step((torch.full((8,), 9), torch.zeros(8, dtype=torch.long)))

    example = torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.long)
    for plan in ("data=2", "tensor=2"):
        with pytest.raises((WorkerFailed, PolylaneError)) as caught:
            workers(work, Words().double(), plan, example=example)
        assert "IndexError: index out of range in self" in str(caught.value)
        assert "a fault of polylane" not in str(caught.value)


def raised(call: Any) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing is raised")


def test_which_exceptions_are_faults(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    given = raised(lambda: printing.format_ranges([None] * 99))  # type: ignore[list-item]
    assert isinstance(given, TypeError) and explain_fault(given, "it") is not None
    assert explain_fault(raised(lambda: [][0]), "it") is None  # raised by this test
    assert explain_fault(raised(lambda: torch.zeros(2)[3]), "it") is None
    assert explain_fault(raised(lambda: polylane.load_recipe), "it") is None  # an attribute that there is not
    for other in (ValueError, RuntimeError, OSError, KeyboardInterrupt):
        assert explain_fault(other("x").with_traceback(given.__traceback__), "it") is None
    # Where an action of a worker has failed, in the words of the model; and what a worker reports to its launcher.
    failed = ActionFailed(1, 0, 2, "layers.3", "model.py:7: x = self.up(x)")
    failed.__cause__ = given
    words = r"at stage 0, microbatch 2, in layers\.3 \(model\.py:7: x = self\.up\(x\)\): TypeError: "
    assert re.search(words, str(explain_fault(failed, "it")))
    report = Failure.of_exception(1, failed)
    assert report.error_type == "TypeError" and report.bad_input is None and not report.traceback
    assert re.match(f"worker 1 failed: polylane itself failed in worker 1 {words}", str(report.to_exception()))
    # A folder that cannot be written takes nothing away from the sentence.
    monkeypatch.setattr("tempfile.tempdir", str(temporary / "gone"))
    assert "its traceback could not be written" in str(explain_fault(given, "it"))
    fault = raised(told_as_fault("it")(lambda: printing.format_ranges([None] * 99)))  # type: ignore[list-item]
    assert isinstance(fault, PolylaneFault)
