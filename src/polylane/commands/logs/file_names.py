"""File names: what the files of a run's folder are called and where they are, for who writes and who reads them."""

from __future__ import annotations

import os
from pathlib import Path

MODEL = "model.safetensors"
PLAN = "plan.yaml"
RUN = "run.json"  # the options of a recipe's run
METRICS = "metrics.jsonl"
GOODPUT = "goodput.json"
PREDICTED = "predicted.json"
TIMELINE = "timeline.json"  # of a typical step
TIMELINES = "timelines.json"  # of all steps that are kept
TRACE = "trace.json"  # the typical step, for ui.perfetto.dev
SWIMLANE = "swimlane.html"
REPORT = "report.html"
WHY = "why.json"  # of a run that did not end well

UNFINISHED = "unfinished"  # name of the folder in which a run writes while an earlier run's files are there

# All files of a run, in the order in which they are renamed: the weights first, since they are worth the most.
NAMES = (MODEL, PLAN, RUN, METRICS, GOODPUT, PREDICTED, TIMELINE, TIMELINES, TRACE, SWIMLANE, REPORT)
ALL_NAMES = (*NAMES, WHY)  # with that of a run that did not end well


def find_folder(path: Path) -> Path:
    """Return the folder that a run's files are in: where an earlier run's stay until this one has ended well, below."""
    return path / UNFINISHED if os.path.isfile(path / UNFINISHED / METRICS) else path
