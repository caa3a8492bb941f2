"""The examples: each is in the gallery of docs/tutorial/examples.md, has a command that exists, and runs.

Recipes are trained by tests/test_examples_plain.py, scripts under plans by tests/script/test_example_scripts.py, and
the tutorial's programs by its pages; here the notebook is executed.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer

from polylane.cli import app
from tests.docs.page_blocks import ROOT

EXAMPLES = ROOT / "examples"
GALLERY = ROOT / "docs" / "tutorial" / "examples.md"
FILES = sorted(path for kind in ("py", "ipynb", "yaml") for path in EXAMPLES.rglob(f"*.{kind}"))


def test_the_gallery_has_every_example_and_no_other() -> None:
    """The first columns of its tables have the files' paths."""
    named = re.findall(r"^(?:\| )?`(examples/[\w/.]+)`", GALLERY.read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(path.relative_to(ROOT)) for path in FILES)


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".py"], ids=lambda path: path.stem)
def test_an_example_begins_with_a_command_that_exists(path: Path) -> None:
    """Commands of its docstring name the file itself, and options that the command has."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    commands = re.findall(r"^(?:python|polylane|torchrun) .*$", docstring, re.MULTILINE)
    assert commands
    for command in commands:
        assert f" {path.relative_to(ROOT)}" in command
        if command.startswith("polylane "):
            name, *words = shlex.split(re.split(r"  +", command)[0])[1:]
            parameters = typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]
            options = {option for parameter in parameters for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options


def test_the_notebook_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executed anew in a kernel, all its cells have the outputs that are saved in it."""
    import nbclient
    import nbformat

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def read_outputs(notebook: nbformat.NotebookNode) -> list[str]:
        """Return what every cell of code prints and returns."""
        cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
        return ["".join(part.get("text") or part.data["text/plain"] for part in cell) for cell in cells]

    saved = nbformat.read(EXAMPLES / "digits.ipynb", as_version=4)
    executed = nbformat.from_dict(saved)
    nbclient.NotebookClient(executed, resources={"metadata": {"path": str(EXAMPLES)}}, timeout=240).execute()
    shown = read_outputs(nbformat.read(EXAMPLES / "digits.ipynb", as_version=4))
    assert read_outputs(executed) == shown
    assert shown[2].endswith(shown[3])  # two workers print what one prints
