"""What is found of a model of the zoo: how it is captured, and by each plan whether it is equal to one device.

``python -m benchmarks.zoo.prove NAME STEPS PLAN...`` finds it in a process of its own, and prints a line of JSON for
the capture and one for each plan: a model that hangs or dies takes nothing else with it. With 0 STEPS, as many are
proven as the model's entry says.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.families import find_entry
from benchmarks.zoo.packages import load_torchvision
from polylane.compile.objectives import Objective
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.runtime.workers.threads import limit_to_one_thread
from polylane.verify.verdict import Verdict
from polylane.verify.verify import verify

PLANS = (
    "data=2",
    "data=3",
    "pipeline=2,microbatches=3",
    "tensor=2",
    "sequence=2",
    "data=2,pipeline=2",
    "data=2,shard=parameters",
)
WHOLE, FUNCTIONS, LEAVES, OPAQUE = "whole", "functions", "leaves", "opaque"
EQUAL, UNEQUAL, REFUSED, FAILED = "equal", "NOT equal", "refused", "FAILED"


@dataclass(frozen=True)
class Captured:
    """How a model was captured.

    Attributes:
        name: of the model.
        how: WHOLE; FUNCTIONS: but for custom autograd functions, a node each; LEAVES: some modules run the user's own
            Python; OPAQUE: all of it is one such leaf; or FAILED.
        told: why, for what is not whole.
        parameters: numbers that are trained.
        nodes: operators of the graph.
        seconds: to capture it, in float32.
    """

    name: str
    how: str
    told: str
    parameters: int
    nodes: int
    seconds: float


@dataclass(frozen=True)
class Proven:
    """What was found of a model by a plan.

    Attributes:
        name: of the model.
        plan: in one line.
        verdict: EQUAL, UNEQUAL, REFUSED or FAILED: it ended otherwise than by a sentence for the user.
        told: the worst errors, or what was said.
        seconds: of the whole proof.
    """

    name: str
    plan: str
    verdict: str
    told: str
    seconds: float


def build_model(entry: Entry) -> nn.Module:
    """The entry's model, the same weights every time."""
    torch.manual_seed(0)
    return entry.make().train()


def capture_entry(entry: Entry) -> Captured:
    """Capture an entry's training as ``train`` does, in float32."""
    began = time.monotonic()
    model = build_model(entry)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        problem = TrainingProblem(model, {"loss": Objective("loss", entry.loss, entry.optimizer)}, entry.batches(1)[0])
        began = time.monotonic()
        graph = problem.capture()
    except Exception as error:  # to be shown beside the others
        return Captured(entry.name, FAILED, _sentence_of(error), parameters, 0, time.monotonic() - began)
    seconds = time.monotonic() - began
    told = " ".join((*graph.notes, *_tell_functions(graph)))
    return Captured(entry.name, _how_captured(graph), told, parameters, len(graph.nodes), seconds)


def _how_captured(graph: Graph) -> str:
    if graph.is_opaque:
        return OPAQUE
    own = {node.op for node in graph.nodes if node.is_own_python}
    if not own:
        return WHOLE
    return LEAVES if "leaf" in own else FUNCTIONS


def _tell_functions(graph: Graph) -> list[str]:
    """The custom autograd functions that are kept, each with the number of its nodes and the modules that call it."""
    calls = [node for node in graph.nodes if node.op == "function"]
    if not calls:
        return []
    where = sorted({f"{node.module or 'the model'} ({node.source})" for node in calls})
    more = f" and {len(where) - 1} more" if len(where) > 1 else ""
    return [f"custom autograd functions stay a node each, {len(calls)} of them, in {where[0]}{more}"]


def prove_entry(entry: Entry, plan: str, steps: int | None = None) -> Proven:
    """Hold an entry by one plan against one device, as ``polylane verify`` does."""
    began = time.monotonic()
    try:
        objective = Objective("loss", entry.loss, entry.optimizer)
        verdict = verify(build_model(entry), objective, entry.batches(steps or entry.steps), plan)
        said, told = EQUAL if verdict.passed else UNEQUAL, _describe_errors(verdict)
    except PolylaneError as refusal:
        said, told = REFUSED, str(refusal)
    except Exception as error:  # to be shown beside the others
        said, told = FAILED, _sentence_of(error)
    gc.collect()
    return Proven(entry.name, plan, said, told, time.monotonic() - began)


def _sentence_of(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'nothing said').splitlines()[0]}"


def _describe_errors(verdict: Verdict) -> str:
    """The largest errors: of a loss, of a gradient, of a value, and what the first difference is."""
    gradient = max(verdict.deviations, key=lambda d: d.gradient or 0.0)
    value = max(verdict.deviations, key=lambda d: d.value)
    told = f"loss {verdict.loss_error:.0e}, gradient {gradient.gradient or 0.0:.0e}, value {value.value:.0e}"
    if undetermined := verdict.undetermined:
        told += f"; {len(undetermined)} of {len(verdict.deviations)} tensors have what rounding alone makes"
    if verdict.passed:
        return told
    unequal = "" if verdict.replicas_equal else ", replicas disagree"
    return f"{told} ({value.name}){unequal}; {verdict.culprit}"


def findings(name: str, plans: Sequence[str], steps: int | None = None) -> Iterator[Captured | Proven]:
    """How a model is captured, and what was found of it by each plan."""
    entry = find_entry(name)
    yield capture_entry(entry)
    for plan in plans:
        yield prove_entry(entry, plan, steps)


def main(arguments: Sequence[str]) -> int:
    """Print what is found of a model, a line of JSON each."""
    limit_to_one_thread()
    warnings.simplefilter("ignore")
    load_torchvision()
    name, steps, *plans = arguments
    for found in findings(name, plans, int(steps)):
        line: dict[str, Any] = asdict(found)
        line["seconds"] = round(line["seconds"], 1)
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
