"""What the documentation shows is true: its commands exist, and its recipe and its plan file go together."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polylane.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
COMMAND = re.compile(r'polylane +(?:train|verify|inspect|lanes)\b(?:"[^"\n]*"|[^`\n|"])*')


def commands() -> list[str]:
    """Every command that is shown, each once."""
    found = [
        match.group().strip() for page in PAGES for match in COMMAND.finditer(page.read_text().replace("\\\n", ""))
    ]
    helped = [CliRunner().invoke(app, [name, "--help"]).stdout for name in ("train", "verify", "inspect", "lanes")]
    found += [match.group().strip() for text in helped for match in COMMAND.finditer(text)]
    return [line for line in dict.fromkeys(found) if " -" in line or "examples/" in line]


@pytest.mark.parametrize("line", commands())
def test_the_options_of_a_command_exist(line: str) -> None:
    _, command, *rest = shlex.split(line.replace("…", ""))
    known = CliRunner().invoke(app, [command, "--help"]).stdout
    for word in rest[: rest.index("--") if "--" in rest else None]:
        if word.startswith("--"):
            assert f" {word.partition('=')[0]} " in known, f"{line}: {word}"
        elif word.startswith("examples/"):
            assert (ROOT / word).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    """From the project's root, or inside the package."""
    named = set(re.findall(r"`([\w/.]+/(?:[\w.]+\.(?:py|md|yaml))?)(?:::[^`]*)?`", page.read_text()))
    assert not [name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "src/polylane"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_targets_and_modules_that_a_page_names_exist(page: Path) -> None:
    """``make NAME``, and ``python -m NAME`` of this repository."""
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make ([a-z][a-z-]*)", text)
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    modules = [name.replace(".", "/") for name in re.findall(r"python -m ((?:benchmarks|tests)\.[\w.]*\w)", text)]
    missing = [name for name in modules if not (ROOT / f"{name}.py").exists() and not (ROOT / name).is_dir()]
    assert not missing


TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def test_messages_name_pages_by_titles_that_exist() -> None:
    """Who has installed the package has no file of the documentation: a sentence says what to do, or names a page."""
    titles = {page.read_text().splitlines()[0].removeprefix("# ") for page in PAGES}
    for path in ROOT.glob("src/polylane/**/*.py"):
        tree = ast.parse(path.read_text())
        documented = [ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
        # The docstrings of commands are their help.
        hidden = set() if path.name.startswith("cli") else set(documented)
        texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str)
        for text in set(texts) - hidden:
            assert not re.search(r"docs/\S+\.md", text), f"{path}: {text}"
            for title in re.findall(r'the page "([^"]+)"', " ".join(text.split())):
                assert title in titles, f"{path}: {title}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    """``test_file.py``, and ``tests/folder/test_file.py::test_function``."""
    named = set(re.findall(r"\b(test_\w+\.py)(?:::(test_\w+))?", page.read_text()))
    texts = {file: [path.read_text() for path in TEST_FILES if path.name == file] for file, _ in named}
    assert not [file for file in texts if not texts[file]]
    assert not [pair for pair in named if not any(f"def {pair[1]}" in text for text in texts[pair[0]])]


PICTURE = re.compile(r"```\n\$ (polylane lanes [^\n]*)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize(
    ("line", "shown"),
    PICTURE.findall((ROOT / "docs/explanation/schedules.md").read_text()),
    ids=lambda text: text.split("\n")[0],
)
def test_pictures_of_schedules_are_those_of_the_command(line: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw them again after a change: COLUMNS=100, and the lines without blanks at their ends."""
    monkeypatch.setenv("COLUMNS", "100")
    drawn = CliRunner().invoke(app, shlex.split(line)[1:])
    assert "".join(f"{each.rstrip()}\n" for each in drawn.stdout.splitlines()) == shown
