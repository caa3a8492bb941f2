"""Run files: a run's folder, read as far as it goes: what an old, a failed or a running run lacks is said."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polylane.commands.logs.file_names import (
    GOODPUT,
    METRICS,
    MODEL,
    PLAN,
    PREDICTED,
    TIMELINE,
    TIMELINES,
    WHY,
    find_folder,
)
from polylane.diagnosis import report_file
from polylane.efficiency.noise_window import pick_deciding
from polylane.errors import PolylaneError
from polylane.observe.timeline import Timeline

LARGEST_BYTES = 512 << 20  # of one file that is read
# Of the steps that a run keeps, the order in which they are offered.
KEPT = ("typical", "slowest", "first", "last")

# Kinds of lines whose content is an object under their name.
_NESTED = ("audit", "batch")

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """What a run's folder says.

    Attributes:
        path: the folder that the user named.
        folder: where the files are: below ``path`` while an earlier run's files are there.
        steps: lines of steps, the latest of each number, in order of their numbers.
        epochs: lines of epochs, in order.
        attempts: of the run, in order: when each began, its plan and workers, and the step that it went on from.
        audits: verdicts of steps that were made again.
        batch_changes: of a batch that grows, see :class:`.BatchChange`, with the step before each.
        goodput: where the wall time went; with the run's verdict once it has ended.
        has_ended: whether it has ended well.
        is_running: whether a process has claimed the folder.
        timelines: of kept steps, by what each is: typical, slowest, first, last.
        predicted: what was predicted before it began; empty where nothing was.
        plan: text of plan.yaml; "" where there is none.
        failure: one sentence on why it stood still or failed; "" where it did not.
        missing: sentences on what the folder lacks.
    """

    path: Path
    folder: Path
    steps: Sequence[Line] = ()
    epochs: Sequence[Line] = ()
    attempts: Sequence[Line] = ()
    audits: Sequence[Line] = ()
    batch_changes: Sequence[Line] = ()
    goodput: Line = field(default_factory=dict)
    has_ended: bool = False
    is_running: bool = False
    timelines: Mapping[str, Timeline] = field(default_factory=dict)
    predicted: Line = field(default_factory=dict)
    plan: str = ""
    failure: str = ""
    missing: Sequence[str] = ()


def read_mapping(value: Any) -> Mapping[str, Any]:
    """Return a value of a file that should be an object; an empty one where it is none."""
    return value if isinstance(value, dict) else {}


def read_noise(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a step's line says of the noise of the gradients that its optimizer steps along; empty for nothing.

    Args:
        line: of metrics.jsonl; with Adam it has the noise of the gradients as Adam divides them, too.
    """
    return pick_deciding(read_mapping(line.get("noise")))


def read_list(value: Any) -> list[Any]:
    """Return a value of a file that should be a list; an empty one where it is none."""
    return value if isinstance(value, list) else []


def read_run(path: Path) -> RunFiles:
    """Return what a run's folder says.

    Raises:
        PolylaneError: there is no such folder, or no file of a run in it.
    """
    if not os.path.isdir(path):
        raise PolylaneError(f"{path} is no folder of a run")
    folder = find_folder(path)
    missing: list[str] = []
    lines = _read_metrics(folder / METRICS, missing)
    timelines = _read_timelines(folder, missing)
    predicted = _read_object(folder / PREDICTED, "what was predicted of the run", missing)
    goodput = _read_object(folder / GOODPUT, "", [])
    plan = _read_text(folder / PLAN) or str(predicted.get("plan_yaml", ""))
    if folder != path:
        missing.append(
            f"this is the run in {folder.name}/: it has not ended well, or not yet; the folder has an earlier one"
        )
    failure = _read_failure(folder / WHY)
    if not (lines["step"] or timelines or plan or failure):
        raise PolylaneError(f"{path} has no files of a run: neither metrics.jsonl, nor plan.yaml, nor a timeline")
    steps = {line["step"]: line for line in lines["step"]}
    return RunFiles(
        path,
        folder,
        [steps[number] for number in sorted(steps)],
        lines["epoch"],
        [read_mapping(attempt) for attempt in read_list(goodput.get("attempts"))],
        [line["audit"] for line in lines["audit"]],
        [line["batch"] for line in lines["batch"]],
        goodput,
        bool(goodput.get("verdict")) or os.path.isfile(folder / MODEL),
        is_claimed(path),
        timelines,
        predicted,
        plan,
        failure,
        missing,
    )


def is_claimed(path: Path) -> bool:
    """Return whether a process has claimed a run's folder; False where the system does not list locks.

    A lock is looked up and not tried: a trial would keep a run that starts at that moment from its folder.
    """
    try:
        inode = str(path.stat().st_ino)
        locks = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return False
    return any("FLOCK" in words and any(word.endswith(f":{inode}") for word in words) for words in locks)


def _read_metrics(path: Path, missing: list[str]) -> dict[str, list[Line]]:
    """Return the lines of metrics.jsonl by their kind; what cannot be read, such as half a last line, is left out."""
    lines: dict[str, list[Line]] = {kind: [] for kind in ("step", "epoch", *_NESTED)}
    text, unread = _read_text(path), 0
    if not text:
        missing.append("there is no metrics.jsonl, or nothing is in it: there are no curves")
    for row in text.splitlines():
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            unread += 1
            continue
        kind = _kind_of(line)
        if kind:
            lines[kind].append(line)
        else:
            unread += 1
    if unread:
        missing.append(f"{unread} of the lines of metrics.jsonl could not be read")
    return lines


def _kind_of(line: Any) -> str:
    """Return the kind of a line; "" for what is none."""
    if not isinstance(line, dict):
        return ""
    for kind in _NESTED:
        if isinstance(line.get(kind), dict):
            return kind
    if not isinstance(line.get("step"), int):
        return ""
    return "epoch" if "train_loss" in line or "test_loss" in line else "step"


def _read_timelines(folder: Path, missing: list[str]) -> dict[str, Timeline]:
    """Return the timelines of the steps that were kept; of an older run the one that there is."""
    data, sentence = _read_object(folder / TIMELINES, "", []), ""
    steps = data.get("steps")
    steps = steps if isinstance(steps, dict) else {}
    if not steps and (single := _read_object(folder / TIMELINE, "", [])):
        steps = {"typical": single}
    timelines: dict[str, Timeline] = {}
    for name in (*KEPT, *(name for name in steps if name not in KEPT)):
        try:
            if isinstance(steps.get(name), dict):
                timelines[name] = Timeline.from_dict(steps[name])
        except (ValueError, TypeError, KeyError) as error:
            sentence = f"the timeline of the {name} step cannot be read: {error}"
    if sentence or not timelines:
        missing.append(sentence or "no timeline was written: no step is drawn, and it is not told where its time went")
    return timelines


def _read_object(path: Path, subject: str, missing: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; empty where there is none, which is said if it has a subject."""
    try:
        data = json.loads(_read_text(path) or "{}")
    except (ValueError, RecursionError):
        data = {}
    if subject and not (isinstance(data, dict) and data):
        missing.append(f"there is no {path.name}: {subject} is not known")
    return data if isinstance(data, dict) else {}


def _read_failure(path: Path) -> str:
    try:
        return report_file.from_dict(json.loads(_read_text(path) or "{}")).sentence
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _read_text(path: Path) -> str:
    """Return the text of a file; "" where there is none, or none of a size that anybody writes."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_BYTES:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
