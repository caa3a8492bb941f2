"""Files that cannot be written, whatever the reason: each is said once, with what to do, and the run goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from polylane.commands.logs.file_names import GOODPUT, METRICS, PLAN, REPORT, TIMELINE
from polylane.commands.logs.metrics_file import MetricsFile
from polylane.commands.reporting import report_page
from polylane.commands.running import run_folder
from polylane.commands.running.run_folder import RunFolder
from polylane.errors import PolylaneError
from polylane.observe.timeline import Timeline

REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "choose a folder on a disk that can be written to",
    errno.EFBIG: "raise the limit",
    errno.EIO: "Input/output error",  # what to do about it is not known
}


def refuse_all(patch: pytest.MonkeyPatch, number: int) -> None:
    """Have the system write none of a run's files any more."""

    def refuse(path: Path, text: str) -> None:
        raise OSError(number, os.strerror(number), str(path))

    def refuse_line(self: Any, line: str) -> None:
        refuse(self._path, line)

    patch.setattr(run_folder, "replace_text", refuse)
    patch.setattr(report_page, "replace_text", refuse)
    patch.setattr(MetricsFile, "append", refuse_line)


@pytest.mark.parametrize("number", REMEDIES, ids=errno.errorcode.get)
def test_each_file_is_said_once(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    place = RunFolder(tmp_path / "x", warn=said.append)
    with place.claimed(True):
        place.begin()
        place.plan("data=2")
        place.metric({"step": 1})
        refuse_all(monkeypatch, number)
        for step in range(2, 5):
            place.metric({"step": step})
            place.write(GOODPUT, {"attempts": []})
            place.timelines(Timeline((), 1), {})
            place.plan("data=1")
        place.finish()
    names = [METRICS, GOODPUT, TIMELINE, PLAN, REPORT]
    assert [next(name for name in names if f"/{name} cannot be written" in sentence) for sentence in said] == names
    assert all(os.strerror(number) in sentence and REMEDIES[number] in sentence for sentence in said)
    assert place.page is None and sorted(place.files()) == ["metrics", "plan"]


def test_where_a_run_ends_for_it_the_first_one_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = RunFolder(tmp_path / "x")
    with place.claimed(True):
        place.begin()
        refuse_all(monkeypatch, errno.EDQUOT)
        for write in (
            lambda: place.metric({"step": 1}),
            lambda: place.write(GOODPUT, {}),
            lambda: place.timelines(Timeline((), 1), {}),
        ):
            with pytest.raises(PolylaneError, match=r"cannot be written: Disk quota exceeded \(free some space there"):
                write()
