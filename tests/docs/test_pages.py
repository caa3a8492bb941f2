"""Every block of code of the documentation does what the page says: :mod:`tests.docs.page_blocks` has the rules."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from polylane.cli import app
from tests.docs.page_blocks import ROOT, Block, Command, read_blocks, read_commands, read_new_side
from tests.docs.pictures import find_picture, is_same_everywhere
from tests.support.workers import forked_commands

SETUPS = Path(__file__).parent / "setups"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECONDS = 240
# What starts warm: the words of the interpreter in place of a command's first one.
STARTS = {"polylane": ["-m", "polylane"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def is_run(block: Block) -> bool:
    """Whether a block is a program, or has commands, that the tests run."""
    if block.find_mark("not run") is not None:
        return False
    return block.language == "console" or (block.language == "python" and not block.title)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT)).removesuffix(".md")


RUN = {name(page): read_blocks(page.read_text()) for page in PAGES}
RUN = {page: blocks for page, blocks in RUN.items() if any(map(is_run, blocks))}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN)
def test_blocks_do_what_the_page_says(
    page: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of a page but the slow ones, which follow in ``make test-all``."""
    # What the tests can import and a reader cannot.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in {str(ROOT), str(ROOT / "examples")}])
    is_quick = request.config.option.markexpr == "not slow"
    Reader(tmp_path, is_quick).read(RUN[page])


class Reader:
    """Someone who reads a page from its top to its end, in a folder of their own, and tries everything."""

    def __init__(self, folder: Path, is_quick: bool) -> None:
        self.folder, self.is_quick = folder, is_quick
        self.program = self.printed = ""
        (folder / "examples").symlink_to(ROOT / "examples")
        self.environment = {
            **os.environ,
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
            "POLYLANE_CACHE": str(folder / ".cache"),
            "PYTHONPATH": f"{ROOT / 'src'}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def read(self, blocks: list[Block]) -> None:
        """Try all blocks in order; stops at the first that is not true."""
        for block in blocks:
            if block.find_mark("not run") is not None or (self.is_quick and block.find_mark("slow") is not None):
                continue
            if block.language == "diff" and block.title:
                if (ROOT / block.title).exists():
                    assert_has_lines((ROOT / block.title).read_text(), read_new_side(block.text), block)
                else:
                    self.write(block.title, "".join(f"{line}\n" for line in read_new_side(block.text)))
            elif (whole := block.find_mark("part of") or block.title) and (ROOT / whole).exists():
                assert_has_lines((ROOT / whole).read_text(), block.text.splitlines(), block)
            elif block.title:
                self.write(block.title, block.text)
            elif block.language == "python":
                setup = block.find_mark("setup")
                start = (SETUPS / f"{setup}.py").read_text() if setup else ""
                self.program = (self.program if block.find_mark("continues") is not None else start) + block.text
                self.printed = self.run([sys.executable, "-c", self.program], block)
            elif block.find_mark("prints") is not None:
                assert_same(block.text, self.printed, block)
            elif block.language == "console":
                for command in read_commands(block):
                    self.try_command(command, block)

    def write(self, name: str, text: str) -> None:
        """Write a file of the page into the page's folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def try_command(self, command: Command, block: Block) -> None:
        """Run a command and compare what it prints."""
        scan = shlex.shlex(command.line, posix=True, punctuation_chars=True)
        scan.whitespace_split = True
        words = list(scan)
        is_plain = words[0] in STARTS and not any(set(word) <= set("();<>|&") for word in words)
        line = [sys.executable, *STARTS[words[0]], *words[1:]] if is_plain else ["bash", "-c", command.line]
        printed = self.run(line, block)
        if command.output.strip():
            assert_same(command.output, printed, block, command.line)
        if (picture := find_picture(command)) is not None and is_same_everywhere(command):
            drawn = (self.folder / picture.name).read_text()
            assert drawn == picture.read_text(), f"{picture.name}: make pictures draws it anew"

    def run(self, words: list[str], block: Block) -> str:
        """Return what a command prints on both streams, without terminal codes; it must end as the page says."""
        wanted = int(block.find_mark("exit") or 0)
        options = {"cwd": self.folder, "env": self.environment, "stderr": subprocess.STDOUT}
        run = forked_commands.run if words[0] == sys.executable else run_cold
        done = run(words, timeout=SECONDS, **options)
        assert done.returncode == wanted, f"line {block.line}: {words}: exit code {done.returncode}:\n{done.stdout}"
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)


def run_cold(words: list[str], timeout: float, **options: object) -> subprocess.CompletedProcess[str]:
    """A command line of a shell."""
    return subprocess.run(words, timeout=timeout, text=True, stdout=subprocess.PIPE, check=False, **options)  # type: ignore[call-overload, no-any-return]


def assert_same(shown: str, printed: str, block: Block, command: str = "the program") -> None:
    """What a page shows is what is printed; ``...`` stands for anything."""
    assert doctest.OutputChecker().check_output(shown, printed, _SAME), (
        f"line {block.line}: {command} printed\n{printed}\nwhere the page shows\n{shown}"
    )


def assert_has_lines(text: str, lines: list[str], block: Block) -> None:
    """A file has these lines in this order; ``...`` alone stands for others."""
    rest = iter(line.rstrip() for line in text.splitlines())
    for line in lines:
        if line.strip() not in ("", "..."):
            assert line.rstrip() in rest, f"line {block.line}: {block.title} has no line {line!r} there"


NEVER = [
    (name(page), block, command)
    for page in PAGES
    for block in read_blocks(page.read_text())
    if block.language == "console" and block.find_mark("not run") is not None
    for command in read_commands(block)
]


@pytest.mark.parametrize(("page", "block", "command"), NEVER, ids=lambda part: part if isinstance(part, str) else "")
def test_what_is_not_run_has_a_reason_and_known_options(page: str, block: Block, command: Command) -> None:
    assert block.find_mark("not run"), f"{page}, line {block.line}: say why it is not run"
    _, _, ours = command.line.partition("polylane ")
    if not (words := shlex.split(ours.replace("…", ""), comments=True)):
        return
    name, *words = words
    words = words[: words.index("--")] if "--" in words else words
    known = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = {option for parameter in known.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert not [word for word in words if word.startswith("--") and word.partition("=")[0] not in {*options, "--help"}]
