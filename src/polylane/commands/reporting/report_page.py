"""Report page: report.html of a run, or of two: one file with all that it needs, which the network is forbidden to."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polylane.commands.logs.file_names import REPORT
from polylane.commands.printing import replace_text
from polylane.commands.reporting.page_data import collect_run
from polylane.commands.reporting.run_files import read_run
from polylane.errors import PolylaneError, describe_disk_error
from polylane.observe.swimlane.html import swimlane_script
from polylane.observe.swimlane.svg import escape

ASSETS = Path(__file__).with_name("assets")
POLL_SECONDS = 2.0  # between two questions of a live page


def write_report(folder: Path, is_over: bool = False) -> Path:
    """Write the page of a run into its folder, and return its path.

    Args:
        folder: of the run; what it lacks is said on the page.
        is_over: whether the run is over, though its process has not given up the folder yet.

    Raises:
        PolylaneError: there is no run in the folder, or the page cannot be written.
    """
    page, path = build_page([folder], is_over=is_over), folder / REPORT
    try:
        replace_text(path, page)
    except OSError as error:
        raise PolylaneError(f"{path} cannot be written: {describe_disk_error(error)}") from error
    return path


def build_page(folders: Sequence[Path], is_live: bool = False, is_over: bool = False) -> str:
    """Return the page of a run, or of two beside each other.

    Args:
        folders: of one run, or of two.
        is_live: whether the page asks its own server for what is new.
        is_over: whether the runs are over, whoever has claimed their folders.

    Raises:
        PolylaneError: there is no run in a folder.
    """
    data = collect_data(folders, is_live, is_over)
    scripts = {
        "uplot": (ASSETS / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        "swimlane": swimlane_script(),
        "script": (ASSETS / "report.js").read_text(encoding="utf-8"),
    }
    names = " and ".join(run["name"] for run in data["runs"])
    parts = {
        **scripts,
        "policy": _write_policy(list(scripts.values()), is_live),
        "title": escape(f"{names} · polylane"),
        "style": _read_style("uPlot.min.css") + _read_style("report.css"),
        "data": base64.b64encode(gzip.compress(dump(data).encode(), 9, mtime=0)).decode(),
    }
    template = (ASSETS / "report.html").read_text(encoding="utf-8")
    # One pass over the template: text that is inserted is not searched for places again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def collect_data(folders: Sequence[Path], is_live: bool = False, is_over: bool = False) -> dict[str, Any]:
    """Return what a page shows of its runs, as plain data; arguments as for :func:`build_page`."""
    runs = [read_run(folder) for folder in folders]
    runs = [replace(run, is_running=False) if is_over else run for run in runs]
    return {"runs": [collect_run(run) for run in runs], "poll": POLL_SECONDS if is_live else 0}


def dump(data: Any) -> str:
    """Return data as JSON of few bytes."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _read_style(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _write_policy(scripts: Sequence[str], is_live: bool) -> str:
    """Return a policy by which nothing is loaded, and no script runs but these, which are known by their hashes."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    connect = "'self'" if is_live else "'none'"
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
