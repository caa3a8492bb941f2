"""The blocks of code of a page of the documentation, and how each is held against the code.

What a block is follows from the language of its fence, its title, and a comment in the line above it:

* ``console``: every line that begins with ``$ `` is a command, which is run in the page's own folder (``examples`` is
  there) and must end with exit code 0; the lines below it are what it prints, compared as doctest does, with ``...``
  for anything. A command without such lines is only run. What ``polylane lanes ... --svg NAME`` draws must be the
  picture NAME of docs/images/swimlanes (:mod:`tests.docs.pictures`).
* a block of any language with a title that is no path of the repository is a file of the page's folder: commands and
  programs after it find it. With a title that is a path of the repository, the block's lines must be in that file.
* ``diff`` with a title: the lines that remain or are added must be in that file, in this order; where the title is no
  path of the repository, they are a file of the page's folder.
* ``python`` without a title: a program, which is run. ``<!-- continues -->`` above it: it goes on where the last one
  ended. ``<!-- setup: NAME -->``: what tests/docs/setups/NAME.py defines is there. ``<!-- prints -->`` above a block of
  ``text``: what the last program printed.
* ``<!-- part of: PATH -->``: its lines are in that file, in this order.
* ``<!-- slow -->``: it is run by ``make test-all`` alone. ``<!-- exit: 2 -->``: the command's exit code.
* ``<!-- not run: REASON -->``: for what needs other machines. The options of its commands must exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*) *(?P<rest>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_SNIPPET = re.compile(r'^ *--8<-- "([^":]+)(?::(\w+))?"$', re.MULTILINE)
_COMMENTS = re.compile(r"<!-- ([^\n]*?) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
        language: word behind the fence, "" for none.
        title: the block's title, which is the name of a file; "" for none.
        text: its lines, with files that it includes in place of the directives.
        marks: texts of the comments in the lines directly above the fence.
        line: number of the fence's line in the page, from 1.
    """

    language: str
    title: str
    text: str
    marks: tuple[str, ...]
    line: int

    def find_mark(self, name: str) -> str | None:
        """Return what a mark says: "REASON" of ``not run: REASON``, "" of a bare one; None where there is none."""
        for mark in self.marks:
            head, _, rest = mark.partition(":")
            if head == name:
                return rest.strip()
        return None


@dataclass(frozen=True)
class Command:
    """A command of a console block, and what the page shows of its output ("" where it shows none)."""

    line: str
    output: str


def read_blocks(text: str) -> list[Block]:
    """Return the blocks of a page's text, in order."""
    blocks = []
    for match in _FENCE.finditer(text):
        above = text[: match.start()].rstrip(" \n").rsplit("\n", 1)[-1] if match.start() else ""
        title = re.search(r'title="([^"]*)"', match["rest"])
        indent = match["indent"]
        lines = [line.removeprefix(indent) for line in match["text"].splitlines()]
        body = _SNIPPET.sub(_include, "".join(f"{line}\n" for line in lines))
        marks = tuple(_COMMENTS.findall(above)) if above.strip().startswith("<!--") else ()
        blocks.append(
            Block(match["language"], title[1] if title else "", body, marks, text[: match.start()].count("\n") + 1)
        )
    return blocks


def _include(match: re.Match[str]) -> str:
    """Return the included file's text, or the lines between the marks of a section, as pymdownx.snippets does."""
    text, section = (ROOT / match[1]).read_text(), match[2]
    if section:
        text = text.partition(f"--8<-- [start:{section}]")[2].partition("\n")[2]
        text = text.partition(f"--8<-- [end:{section}]")[0].rpartition("\n")[0]
    return text.rstrip("\n")


def read_commands(block: Block) -> list[Command]:
    """Return the commands of a console block; a command that ends with a backslash goes on in the next line."""
    commands: list[Command] = []
    is_open = False
    for line in block.text.splitlines():
        if is_open or line.startswith("$ "):
            words = line.removeprefix("$ ") if not is_open else " " + line.strip()
            before = commands.pop().line if is_open else ""
            is_open = words.endswith("\\")
            commands.append(Command(before + words.removesuffix("\\").rstrip(), ""))
        elif commands:
            commands[-1] = Command(commands[-1].line, commands[-1].output + line + "\n")
    return commands


def read_new_side(diff: str) -> list[str]:
    """Return the lines that a diff leaves or adds."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@", "-"))]
    return [line[1:] for line in lines]
