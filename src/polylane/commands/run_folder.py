"""The folder of a run: its plan, its metrics as they come, and what is left of it at the end."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from polylane.commands.output import dumps
from polylane.errors import PolylaneError
from polylane.observe import swimlane
from polylane.observe.timeline import Timeline

MODEL = "model.safetensors"


def unused(path: Path) -> Path:
    """The path, or the first of ``path-2``, ``path-3``, ... that does not exist: no run replaces another unasked."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


class RunFolder:
    """Where the files of one run go. Nothing is made before the training begins.

    Raises:
        PolylaneError: from every method, where the folder or a file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: TextIO | None = None

    @property
    def model(self) -> Path:
        """Where the weights go."""
        return self.path / MODEL

    def check(self) -> None:
        """Refuse a place where nothing can be written, without making anything yet."""
        existing = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise PolylaneError(f"--run {self.path}: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PolylaneError(f"--run {self.path}: {existing} cannot be written to")

    def make(self) -> None:
        """Make the folder, and forget what an earlier run of this name left: a mixture of two runs is no run."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            for name in ("plan.yaml", "metrics.jsonl", "timeline.json", "swimlane.html", "trace.json", MODEL):
                (self.path / name).unlink(missing_ok=True)
            self._metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8", buffering=1)

    def plan(self, text: str) -> None:
        """Write plan.yaml."""
        with self._writing():
            (self.path / "plan.yaml").write_text(text, encoding="utf-8")

    def metric(self, line: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, at once."""
        with self._writing():
            assert self._metrics is not None
            self._metrics.write(dumps(line) + "\n")

    def timeline(self, timeline: Timeline) -> None:
        """Write the timeline of a step, as data and as pictures."""
        with self._writing():
            (self.path / "timeline.json").write_text(dumps(timeline.to_dict()), encoding="utf-8")
            (self.path / "trace.json").write_text(dumps(swimlane.perfetto(timeline)), encoding="utf-8")
            (self.path / "swimlane.html").write_text(swimlane.html(timeline), encoding="utf-8")

    def close(self) -> None:
        """No more metrics come."""
        if self._metrics is not None:
            self._metrics.close()

    def files(self) -> dict[str, str]:
        """What is there, by name without ending."""
        return {file.stem: str(file) for file in sorted(self.path.iterdir()) if file.is_file()}

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file = error.filename or self.path
            raise PolylaneError(f"--run {self.path}: {file} cannot be written: {error.strerror or error}") from error
