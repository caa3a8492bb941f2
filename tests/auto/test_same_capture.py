"""Workers that have captured other computations than rank 0 are told so, with the place where they part."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polylane.auto.same_capture import Described, RecordedProblem, find_difference
from polylane.compile.objectives import build_objectives
from tests.support.workers.training import batch_of, classify, mlp, sgd


class Tempered(nn.Module):
    """Divides by a plain number."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.inner, self.temperature = mlp(6, 8, 4), temperature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / self.temperature


def described(model: nn.Module, loss: Any = classify, samples: int = 8) -> Described:
    problem = RecordedProblem.of(RecordedProblem(model, build_objectives(loss, sgd, None), batch_of(samples)))
    problem.capture()
    return problem.described


def difference(*described: Described) -> str | None:
    """What each of two workers is told, which is the same."""
    barrier, sent = threading.Barrier(2), list[Any]([None, None])

    def gather(rank: int, own: Any) -> list[Any]:
        sent[rank] = own
        barrier.wait()
        every = list(sent)
        barrier.wait()
        return every

    worlds: list[Any] = [SimpleNamespace(rank=rank, all_gather_object=partial(gather, rank)) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(find_difference, worlds, described)
    assert one == other
    return one


FIRST = described(Tempered(2.0))


def test_equal_models_with_other_weights() -> None:
    other = Tempered(2.0)
    nn.init.zeros_(other.inner[0].weight)
    assert difference(FIRST, described(other)) is None


def test_files_may_be_in_other_places(tmp_path: Path) -> None:
    """Hosts have their files where they have them; the lines of a loss are only said, not compared."""
    captures = []
    for host in ("alice", "bob"):
        file = tmp_path / host / "train.py"
        file.parent.mkdir()
        file.write_text(
            "def loss(model, batch):\n    return (model(batch[0]).logsumexp(1) - batch[1]).square().mean()\n"
        )
        namespace: dict[str, Any] = {}
        exec(compile(file.read_text(), str(file), "exec"), namespace)
        captures.append(described(Tempered(2.0), namespace["loss"]))
    lines = [" ".join(name for name, _ in capture["loss"][1]) for capture in captures]
    assert "alice/train.py" in lines[0] and "bob/train.py" in lines[1]
    assert difference(*captures) is None


def test_other_sizes_are_not_compared() -> None:
    assert difference(FIRST, described(Tempered(1.0), samples=5)) is None


@pytest.mark.parametrize(
    ("model", "loss", "place"),
    [
        pytest.param(Tempered(1.0), classify, "they part at div", id="another number"),
        pytest.param(Tempered(2.0), lambda m, b: classify(m, b) * 3, "they part at loss/", id="another loss"),
        pytest.param(Tempered(2.0), lambda m, b: classify(m, b) * torch.tensor(2.0), "they part at", id="a constant"),
    ],
)
def test_the_place_where_they_part(model: nn.Module, loss: Any, place: str) -> None:
    told = difference(FIRST, described(model, loss))
    assert told is not None and told.startswith("rank 1 has another model or loss than rank 0: ") and place in told


def test_a_note_says_more_than_a_node() -> None:
    calls = [0]

    def counting(model: Any, batch: Any) -> torch.Tensor:
        calls[0] += 1
        return classify(model, batch)

    told = difference(FIRST, described(Tempered(2.0), counting))
    assert told is not None and "it writes" in told and "test_same_capture.py" in told
