"""Ctrl-C from a command's first instruction on: one sentence and the signal's exit code, whatever is being imported."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# A command that gets Ctrl-C when it imports a module.
COMMAND = """
import os, signal, sys, time

class Interrupting:
    module = sys.argv.pop(1)

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

sys.meta_path.insert(0, Interrupting())
from polylane.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["polylane.parent_death", "polylane.cli", "typer", "rich", "torch"])
def test_ctrl_c_while_a_command_imports(module: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("import torch\n")
    words = ["train", "recipe.py", "--plan", "data=2"]
    command = [sys.executable, "-c", COMMAND, module, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "polylane: interrupted\n")


def test_the_installed_command_begins_there() -> None:
    """Of the module that pip's script imports, nothing but the package is imported before it heeds Ctrl-C."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["polylane"] == "polylane.__main__:main"
    look = (
        "import sys; from polylane.__main__ import main; print(*(n for n in sys.modules if n.startswith('polylane')))"
    )
    names = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.split()
    assert names == ["polylane", "polylane.__main__"]
