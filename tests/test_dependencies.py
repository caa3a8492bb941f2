"""Every package that the library imports is declared, and every one that is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Packages by the names that they are imported by, where these differ; pydantic_core is a part of pydantic.
PACKAGES = {"yaml": "pyyaml", "sklearn": "scikit-learn", "pydantic_core": "pydantic", "mlflow": "mlflow-skinny"}
# What nobody imports and the tests need all the same: programs, a plugin of pytest (timeout), a notebook's kernel, and
# types for mypy.
TOOLS = {"build", "ipykernel", "mypy", "ruff", "setuptools", "pytest-timeout", "types-pyyaml"}


BRIDGES = ROOT / "src" / "polylane" / "integrations"  # to packages that are extras


def imported(*folders: str) -> set[str]:
    """Packages of others that the Python files of some folders import, anywhere in them."""
    found = set[str]()
    for folder in folders:
        for file in (ROOT / folder).rglob("*.py"):
            if file.parent == BRIDGES and folder == "src":
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    own = {"polylane", "benchmarks", "tests", *(path.stem for path in (ROOT / "examples").rglob("*.py"))}
    own |= {"small_recipe"}  # which the test that imports it writes
    return {_normalize(PACKAGES.get(name, name)) for name in found - own - set(sys.stdlib_module_names)}


def declared(requirements: list[str]) -> set[str]:
    """Names of required packages, without versions and extras."""
    return {_normalize(re.split(r"[\[><=~ ]", requirement)[0]) for requirement in requirements} - {"polylane"}


def _normalize(name: str) -> str:
    """A package's name as indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_library_imports_what_it_depends_on() -> None:
    """And what its loggers write with, where they are used (TensorBoard's writer is torch's, which imports it); and
    Triton, where there is a GPU.
    """
    extras = PROJECT["optional-dependencies"]
    optional = declared([*extras["loggers"], *extras["kernels"]]) - {"tensorboard"}
    assert imported("src") == declared(PROJECT["dependencies"]) | optional


def test_bridges_import_their_extras() -> None:
    extras, own = PROJECT["optional-dependencies"], declared(PROJECT["dependencies"])
    assert imported(str(BRIDGES.relative_to(ROOT))) - own == declared([*extras["transformers"], *extras["lightning"]])


def test_extras_are_what_examples_benchmarks_and_tests_import() -> None:
    extras, own = PROJECT["optional-dependencies"], declared(PROJECT["dependencies"])
    assert imported("examples") - own == declared([*extras["examples"], *extras["ray"]])
    assert imported("benchmarks") - own == declared([*extras["zoo"], *extras["gpipe"]])
    bridged = declared([*extras["transformers"], *extras["lightning"], *extras["loggers"], *extras["kernels"]])
    found = imported("tests") - own - declared(extras["examples"]) - declared(extras["zoo"]) - bridged
    assert found == declared(extras["test"]) - TOOLS
