"""The pages of docs/reference say what the code has: exit codes, variables, files, sentences of errors, plan keys."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from polylane import cli
from polylane.commands.logs import file_names
from polylane.plan import spec
from polylane.plan import sync as syncs
from polylane.runtime.workers.launch_environment import VARIABLES
from polylane.runtime.workers.stop_request import STOP_SIGNALS
from tests.docs.generated_pages import PLAN_EXAMPLES, REFERENCE
from tests.docs.page_blocks import ROOT, read_blocks
from tests.support.workers import forked_commands

SOURCES = [ast.parse(path.read_text()) for path in sorted((ROOT / "src" / "polylane").rglob("*.py"))]


def read_page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


def test_exit_codes_are_those_of_the_command_line() -> None:
    """Done, failed, wrong input, and 128 with the number of each signal that ends a run."""
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", read_page("exit-codes"), re.MULTILINE)}
    assert shown == {0, 1, 2, cli.INTERRUPTED, *(128 + number for number in STOP_SIGNALS)}


CALLS = ("os.environ.get", "os.environ.pop", "os.getenv")


def list_variables() -> Iterator[str]:
    """Yield the names by which the library reads or writes variables of the environment."""
    constants = {
        target.id: node.value.value
        for tree in SOURCES
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for tree in SOURCES:
        for node in ast.walk(tree):
            keys: list[ast.expr] = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "os.environ.get",
                "os.environ.pop",
                "os.getenv",
            ):
                keys = node.args[:1]
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                keys = [node.slice]
            elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
                keys = [node.left]
            for key in keys:
                name = key.value if isinstance(key, ast.Constant) else constants.get(ast.unparse(key))
                if isinstance(name, str):
                    yield name


def test_variables_of_the_environment_are_on_their_page() -> None:
    page = read_page("environment")
    names = {*list_variables()}
    assert {"POLYLANE_PLAN", "POLYLANE_CACHE", "POLYLANE_TRANSPORT", "POLYLANE_SECRET", "RANK"} <= names | {*VARIABLES}
    assert not [name for name in names if f"`{name}`" not in page]
    assert not [name for name in set(re.findall(r"`(POLYLANE_\w+)`", page)) if name not in names]


def test_files_of_a_run_are_on_their_page() -> None:
    page = read_page("run-folder")
    files = set(re.findall(r"^\| `(\w+\.\w+)` \|", page, re.MULTILINE))
    assert files == {*file_names.ALL_NAMES}
    assert f"| `{file_names.UNFINISHED}` |" in page


def test_columns_of_metrics_are_on_their_page() -> None:
    """Those that the loop writes of each step, those of observed steps, and those of an epoch."""
    logs = ROOT / "src" / "polylane" / "commands" / "logs"
    source = (logs / "step_columns.py").read_text() + (logs / "step_log.py").read_text().partition('"kind": "step"')[2]
    columns = {*re.findall(r'"(\w+)":', source), "train_loss", "test_loss", "evaluation_seconds", "metrics", "noise"}
    assert len(columns) > 20
    assert not [column for column in columns if f"`{column}`" not in read_page("metrics")]


RECIPE = next(block.text for block in read_blocks(read_page("plan-keys")) if block.title == "mymodel.py")
JSON_COMMANDS = {
    "train": "mymodel.py --plan data=1 --batch 32 --steps 1 --save-every 1 --audit off --run run",
    "export": "run weights.safetensors",
    "launch": "mymodel.py --on slurm --hosts 2 --plan data=8 --device gpu",
    "verify": "mymodel.py --plan data=2 --batch 8 --steps 1",
    "inspect": "mymodel.py --plan data=1 --batch 8",
    "plan": "mymodel.py --cluster 1:a100-80g",
    "simulate": "mymodel.py --cluster 2:a100-80g --plan data=2",
    "lanes": "1f1b --stages 2 --microbatches 2",
}


def test_keys_of_json_are_printed(tmp_path: Path) -> None:
    """Those in the first column of a command's table, but for those of a list."""
    (tmp_path / "mymodel.py").write_text(RECIPE)
    for command, options in JSON_COMMANDS.items():
        words = [sys.executable, "-m", "polylane", command, *options.split(), "--json"]
        printed = json.loads(forked_commands.run(words, cwd=tmp_path, check=True).stdout)
        table = read_page("json").partition(f"## `polylane {command} --json`")[2].partition("\n## ")[0]
        keys = {
            key
            for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
            for key in re.findall(r"`(\w+)`", cell)
            if key not in ("audit", "schedules")  # which are there with an audit, with --compare
        }
        assert len(keys) > 3 - (command == "plan") and keys <= {*printed}, (command, keys - {*printed})


def test_the_oldest_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    torch = next(name for name in project["dependencies"] if name.startswith("torch>")).partition(">=")[2]
    assert f"Python {python} and later, PyTorch {torch} and later" in read_page("stability")


def read_literals() -> str:
    """Return all texts of the library's source, those of formatted ones in pieces, one a line."""
    texts = (node.value for tree in SOURCES for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(" ".join(text.split()) for text in texts if isinstance(text, str))


LITERALS = read_literals()
SENTENCES = re.findall(r"^### `(.*)`$", read_page("errors"), re.MULTILINE)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentences_of_errors_are_those_of_the_code(sentence: str) -> None:
    """Each piece between names and numbers is in one text of the source."""
    assert len(SENTENCES) > 30
    pieces = [piece.strip(" `,;:(.") for piece in sentence.split("…")]
    assert not [piece for piece in pieces if piece and piece not in LITERALS]


@pytest.mark.parametrize("key", PLAN_EXAMPLES)
def test_the_example_of_a_key_is_a_plan_that_has_it(key: str) -> None:
    plan = spec.parse(PLAN_EXAMPLES[key])
    if key in syncs.KEYS:
        assert key in plan.sync.changed_keys()
    else:
        assert getattr(plan, key) != getattr(spec.Spec(), key)


def test_every_key_of_a_plan_has_an_example() -> None:
    assert {*PLAN_EXAMPLES} == {*spec.LINE_KEYS}
