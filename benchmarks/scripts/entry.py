"""A script of a checkout: where it lies, how it is made small, and the lines that prepare it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

IMPORT = "import polylane"


@dataclass(frozen=True)
class Edit:
    """Lines beside a line of the script.

    Attributes:
        anchor: how the line begins, without its indentation; the first such line is meant.
        lines: what is written, with the line's indentation.
        replaces: whether the line is replaced; else the lines follow it.
    """

    anchor: str
    lines: Sequence[str]
    replaces: bool = False


@dataclass(frozen=True)
class Entry:
    """A script.

    Attributes:
        name: of the row in the table.
        path: of the script in its checkout.
        edits: what prepares it, the import apart, which is written before the script's first import of torch.
        arguments: of its command line.
        data: writes data files into the folder where it runs.
        smaller: what is replaced in its text, plain and prepared, where no argument makes it smaller or exact: pattern
            and replacement.
        draws: whether its model draws random numbers: the prepared script on one worker is what others are compared to.
        checkout: which checkout it is of.
        folder: how many folders above the script its modules begin.
    """

    name: str
    path: str
    edits: Sequence[Edit]
    arguments: str = ""
    data: Callable[[Path], None] | None = None
    smaller: Sequence[tuple[str, str]] = ()
    draws: bool = False
    checkout: str = "examples"

    @property
    def lines_added(self) -> int:
        """Number of lines that prepare it, the import among them."""
        return 1 + sum(len(edit.lines) for edit in self.edits)

    @property
    def lines_removed(self) -> int:
        """Number of lines that are no longer there."""
        return sum(edit.replaces for edit in self.edits)


# All places of what is printed in fewer; the types of float64; no times.
_EVERYWHERE = (
    (r"(?<=[%:\d+])\.\d+([fe])\b(?![-+\d])", r".15\1"),
    (r"\.float\(\)", ".double()"),
    (r"\btorch\.float(32)?\b", "torch.float64"),
    (r"\btorch\.FloatTensor\b", "torch.DoubleTensor"),
    (r"\btime\.time\(\)", "0.0"),
    (r"\btime\.ctime\(\)", "''"),
)


def write_small(text: str, entry: Entry) -> str:
    """Return a file of a script's folder as it is run, plain and prepared."""
    for pattern, replacement in (*_EVERYWHERE, *entry.smaller):
        text = re.sub(pattern, replacement, text)
    return text


def write_prepared(text: str, entry: Entry) -> str:
    """Return the script with the lines that prepare it.

    Raises:
        ValueError: a line that is looked for is not there: the checkout is of another time.
    """
    lines = text.splitlines()
    for edit in entry.edits:
        at = _find_line(lines, edit.anchor)
        indentation = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        written = [indentation + line for line in edit.lines]
        lines[at : at + 1] = written if edit.replaces else [lines[at], *written]
    lines.insert(_find_line(lines, "import torch"), IMPORT)
    return "\n".join(lines) + "\n"


def _find_line(lines: Sequence[str], anchor: str) -> int:
    for number, line in enumerate(lines):
        if line.lstrip().startswith(anchor):
            return number
    raise ValueError(f"no line begins with {anchor!r}: the checkout is of another time than the table")
