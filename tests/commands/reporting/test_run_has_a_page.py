"""A run's folder gets the page of the run: when it ends well, when it does not, and never at the run's expense."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import pytest

from polylane.commands.reporting import report_page
from polylane.commands.reporting.page_data import describe_state
from polylane.commands.reporting.run_files import read_run
from polylane.commands.running.run_folder import RunFolder


def test_a_run_that_ends_well_has_a_page(tmp_path: Path) -> None:
    place = RunFolder(tmp_path / "x")
    with place.claimed(True):
        place.begin()
        place.metric({"step": 1, "epoch": 1, "loss": 2.0})
        place.close()
        place.finish()
        assert "report.html" in {Path(file).name for file in place.files().values()}
    assert "<title>x · polylane</title>" in (tmp_path / "x/report.html").read_text()


def test_a_run_that_fails_has_a_page_where_its_files_are(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    place = RunFolder(tmp_path / "x")
    with pytest.raises(RuntimeError), place.claimed(True):
        place.begin()
        place.metric({"step": 1, "epoch": 1, "loss": 2.0})
        raise RuntimeError("a worker died")
    assert (tmp_path / "x/unfinished/report.html").exists() and not (tmp_path / "x/report.html").exists()


@pytest.mark.parametrize(("end", "state"), [(RuntimeError, "failed"), (KeyboardInterrupt, "stopped")])
def test_a_run_is_running_as_long_as_its_process_has_the_folder(
    end: type[BaseException], state: str, tmp_path: Path
) -> None:
    place, states = RunFolder(tmp_path / "x"), []
    with pytest.raises(end), place.claimed(True):
        place.begin()
        place.metric({"step": 1, "epoch": 1, "loss": 2.0})
        states.append(describe_state(read_run(tmp_path / "x")))
        raise end("a worker died")
    states.append(describe_state(read_run(tmp_path / "x")))
    assert states == ["running", state]
    (data,) = re.findall(r'id="data">([^<]*)<', (tmp_path / "x/report.html").read_text())
    assert json.loads(gzip.decompress(base64.b64decode(data)))["runs"][0]["state"] == state


def test_a_process_that_does_not_write_writes_no_page(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "x").claimed(False):
        pass
    assert not (tmp_path / "x").exists()


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, is_over: bool) -> Path:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(report_page, "write_report", fail)
    warnings: list[str] = []
    place = RunFolder(tmp_path / "x", warn=warnings.append)
    with place.claimed(True):
        place.begin()
        place.metric({"step": 1, "epoch": 1, "loss": 2.0})
        place.close()
        place.finish()
    assert warnings == [f"{tmp_path / 'x/report.html'} was not written: a mistake"]
