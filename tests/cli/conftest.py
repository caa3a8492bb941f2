"""A folder with the small recipe, for command lines in this process or in one of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polylane.compile import training_problem
from polylane.graph.batch import flatten
from polylane.graph.graph import Graph
from polylane.samples.counts import capture_with_counts
from tests.cli.tiny_recipe import RECIPE

CAPTURED = dict[str, Graph]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe, to run in."""
    path = tmp_path_factory.mktemp("cli")
    (path / "tiny.py").write_text(RECIPE)
    return path


@pytest.fixture(scope="module", autouse=True)
def _captured_once() -> Iterator[None]:
    """In this process, the recipe's model of each size is captured once for every form of a batch."""
    process = os.getpid()

    def capture_once(model: Any, loss: Any, batch: Any, **how: Any) -> Graph:
        if os.getpid() != process or type(model).__module__ != "tiny" or model.fault:
            return capture_with_counts(model, loss, batch, **how)
        tensors = [*model.parameters(), *flatten(batch)[0]]
        key = repr((model, model.training, [(each.shape, each.dtype, each.device) for each in tensors], how))
        if key not in CAPTURED:
            CAPTURED[key] = capture_with_counts(model, loss, batch, **how)
        return CAPTURED[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training_problem, "capture_with_counts", capture_once)
        yield


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same folder, for commands in this process: recipes are imported, and go when the test ends."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    sys.modules.pop("tiny", None)
