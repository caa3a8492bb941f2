"""What `make` runs exists: every target's recipe names modules, commands and files that are there."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.workers import forked_commands

ROOT = Path(__file__).parent.parent
BIN = "/bin-of-the-environment"  # a folder that is not there: recipes are read and not run
COMMANDS = {"python", "polylane", "ruff", "mypy"}  # what an installation puts there
TARGETS = sorted(
    set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)) - {"install"}  # needs a network
)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def run_make(*arguments: str, installed: Path, **options: str) -> subprocess.CompletedProcess[str]:
    """Run make in the project's root with this Python's environment as the one that is installed.

    Args:
        arguments: targets and options of make.
        installed: a folder for the stamp that an installation leaves.
        options: variables of the Makefile.
    """
    (installed / "stamp").touch()
    given = {"BIN": "/bin-of-the-environment", "INSTALLED": str(installed / "stamp"), **options}
    command = ["make", "--no-print-directory", *arguments, *(f"{name}={value}" for name, value in given.items())]
    return subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=False)


def plain_environment() -> dict[str, str]:
    """This process's environment without what a make around the tests would tell the one that they run."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}


def commands_of(target: str, installed: Path, **options: str) -> list[list[str]]:
    """The commands of a target's recipe, split into words; those of targets that it makes in turn too."""
    told = run_make("-n", target, installed=installed, **options)
    assert told.returncode == 0, told.stderr
    return [shlex.split(line) for line in told.stdout.splitlines()]


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_recipe_names_exists(target: str, tmp_path: Path) -> None:
    commands = commands_of(target, tmp_path)
    assert commands
    for words in commands:
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word.startswith(f"{BIN}/"):
                assert Path(word).name in COMMANDS, words
            elif word == "-m" and re.fullmatch(r"[\w.]+", following):
                assert importlib.util.find_spec(following) is not None, words
            elif re.match(r"(--ignore=)?(tests|examples|benchmarks)/", word):
                assert (ROOT / word.removeprefix("--ignore=")).exists(), words


def test_every_target_is_a_phony_one() -> None:
    """A file of the same name would keep make from running it."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    phony = re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)
    assert phony is not None
    assert sorted(phony.group(1).split()) == sorted([*TARGETS, "install"])


def test_benchmarks_are_handed_arguments(tmp_path: Path) -> None:
    """Two are only told what would run; the third runs, and ends at once by itself."""
    for target in ("bench", "bench-transport"):
        assert all(words[-1] == "--quick" for words in commands_of(target, tmp_path, ARGS="--quick"))
    ((python, *words),) = commands_of("bench-published", tmp_path, FILE="none.csv")
    assert python == f"{BIN}/python"
    done = forked_commands.run([sys.executable, *words], cwd=ROOT)
    assert done.returncode and "none.csv" in done.stderr


def test_clean_removes_what_is_made_and_nothing_else(tmp_path: Path) -> None:
    made = [".venv/bin/python", "run/digits/steps.jsonl", "src/polylane.egg-info/PKG-INFO", "src/a/__pycache__/a.pyc"]
    kept = ["src/a/a.py", "docs/run/page.md", "plan.yaml"]
    for name in (*made, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "-f", str(ROOT / "Makefile"), "clean"], cwd=tmp_path, env=plain_environment(), check=True)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(kept)
