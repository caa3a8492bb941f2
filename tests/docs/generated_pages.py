"""Parts of the documentation that are written from the code: ``python -m tests.docs.generated_pages`` writes them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from polylane.plan.options import PlanOptions
from polylane.plan.spec import KEYS, Spec
from tests.docs.page_blocks import ROOT

REFERENCE = ROOT / "docs" / "reference"


def write_commands() -> str:
    """Return the page of all commands, from their own help."""
    line = [sys.executable, "-m", "typer", "polylane.cli", "utils", "docs", "--name", "polylane"]
    text = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    # What typer shows as a usage is no command that can be run, and its examples are lines of one paragraph.
    text = text.replace("```console\n$ ", "```text\n").replace("# `polylane`", "# Commands", 1)
    text = re.sub(r"\n+Examples?:\n((?:  .*\n)+)", lambda match: f"\n\n```text\n{_unindent(match[1])}```\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _unindent(lines: str) -> str:
    return re.sub(r"^  ", "", lines, flags=re.MULTILINE)


def write_plan_keys() -> str:
    """Return the table of the keys of a plan, from the docstrings of what a plan says."""
    meanings = {**read_meanings(PlanOptions), **read_meanings(Spec)}
    rows = [f"| `{key}` | {meanings[key]} |" for key, row in KEYS.items() if row.in_lines]
    return "\n".join(["| key | meaning |", "|---|---|", *rows]) + "\n"


def read_meanings(record: type) -> dict[str, str]:
    """Return what the docstring of a class says of its attributes, by name, in Markdown."""
    attributes = (inspect.getdoc(record) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "`").replace("](docs/", "](../") for name, text in found}


# What is written between the marks of a page; of a page without marks, all of it.
PAGES: dict[Path, Callable[[], str]] = {
    REFERENCE / "commands.md": write_commands,
    REFERENCE / "plan-keys.md": write_plan_keys,
}
BEGIN, END = "<!-- generated: python -m tests.docs.generated_pages -->\n", "<!-- end -->"


def update(page: str, text: str) -> str:
    """Return a page with what is generated in it replaced."""
    head, begin, rest = page.partition(BEGIN)
    return head + BEGIN + text + END + rest.partition(END)[2] if begin else BEGIN + text + END + "\n"


if __name__ == "__main__":
    for path, write in PAGES.items():
        path.write_text(update(path.read_text() if path.exists() else "", write()))
