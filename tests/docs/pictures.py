"""Pictures that commands of the documentation draw: ``python -m tests.docs.pictures`` writes those of ``lanes``.

A page that shows a picture shows the command that draws it, with ``--svg NAME.svg``; the picture is the file of that
name in docs/images/swimlanes. What ``lanes`` draws is the same on any machine, and the tests of pages compare it. What
``inspect`` draws has this machine's times, and what ``simulate`` draws changes with the models of cost:
``python -m tests.docs.pictures all`` draws these again too, and what is measured: the step of the front page, and the
steps with stragglers that the pages on synchronization show.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from polylane.observe.swimlane import render as swimlane
from polylane.observe.timeline import Timeline
from tests.docs.page_blocks import ROOT, Command, read_blocks, read_commands

PICTURES = ROOT / "docs" / "images" / "swimlanes"


def find_picture(command: Command) -> Path | None:
    """Return the picture of the documentation that a command draws; None where it draws none."""
    words = shlex.split(command.line)
    if words[:1] != ["polylane"] or "--svg" not in words:
        return None
    return PICTURES / words[words.index("--svg") + 1]


def is_same_everywhere(command: Command) -> bool:
    """Whether a command draws from durations that it is told, not from times that are measured or predicted."""
    return command.line.startswith("polylane lanes ")


def read_drawing_commands() -> Iterator[Command]:
    """Yield the commands of all pages that draw a picture of the documentation."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for block in read_blocks(page.read_text()):
            if block.language == "console":
                yield from (command for command in read_commands(block) if find_picture(command))


# The training of which the front page shows a step, beside the picture.
MEASURED = (
    "train examples/gpt.py --workers 2 --plan pipeline=2,microbatches=8 --batch 16 --steps 30 "
    "--set layers=6 --set hidden=256 --set seq_len=128"
)


def draw_measured_step(path: Path, environment: dict[str, str]) -> None:
    """Train on this machine, and draw the step whose timeline the run keeps, a typical one."""
    with tempfile.TemporaryDirectory() as run:
        line = [sys.executable, "-m", "polylane", *MEASURED.split(), "--run", f"{run}/gpt"]
        subprocess.run(line, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        timeline = Timeline.from_dict(json.loads(Path(run, "gpt", "timeline.json").read_text()))
    path.write_text(swimlane.svg(timeline))


if __name__ == "__main__":
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for command in read_drawing_commands():
        path = find_picture(command)
        if path is not None and (is_same_everywhere(command) or sys.argv[1:] == ["all"]):
            words = [str(path) if word == path.name else word for word in shlex.split(command.line)[1:]]
            line = [sys.executable, "-m", "polylane", *words]
            subprocess.run(line, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
            print(path.relative_to(ROOT))
    if sys.argv[1:] == ["all"]:
        draw_measured_step(ROOT / "docs" / "images" / "measured-pipeline.svg", environment)
        line = [sys.executable, "-m", "benchmarks.speed.sync", "--lanes", str(PICTURES)]
        subprocess.run(line, check=True, cwd=ROOT, env=environment)
