"""The public interface is documented whole: every name of the page docs/reference/api.md has a docstring with its
sections, and an example that does what it shows.

The examples of a class's methods go on where that of the class ended, in the order of the page.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import polylane
from tests.docs.page_blocks import ROOT
from tests.support.workers import forked_commands

PAGE = ROOT / "docs" / "reference" / "api.md"
# Members of a job that commands alone use.
OF_COMMANDS = {"begin_checkpoint", "open_saver", "worker", "training_role"}
_DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)
RETURNS = re.compile(r"^(?:Returns|Yields):$|^(?:Return|Yield)\b", re.MULTILINE)
ROLES = re.compile(r":(?:class|meth|func|attr|data|mod|exc):`|[^:]::\n")


def read_page() -> dict[str, dict[str, Any]]:
    """Return the options of each object of the page, by its path."""
    directives = _DIRECTIVE.findall(PAGE.read_text())
    return {path: (yaml.safe_load(options) or {}).get("options", {}) for path, options in directives}


OBJECTS = read_page()


def resolve(path: str) -> Any:
    """Return the object at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def list_documented(path: str) -> Iterator[tuple[str, Any]]:
    """Yield an object of the page, and what the page shows of a class: its public methods and properties."""
    yield path, (record := resolve(path))
    if not inspect.isclass(record):
        return
    members: dict[str, Any] = {}
    owners = [record, *record.__mro__[1:]] if OBJECTS[path].get("inherited_members") else [record]
    for owner in owners:
        if owner.__module__.startswith("polylane."):
            members |= {name: member for name, member in vars(owner).items() if name not in members}
    chosen = OBJECTS[path].get("members")
    hidden = [text[1:] for text in OBJECTS[path].get("filters", ["!^_"])]
    names = [name for name in members if not any(re.search(pattern, name) for pattern in hidden)]
    names = names if chosen is None else [name for name in chosen or [] if name in members]
    for name in names:
        if inspect.isfunction(inspect.unwrap(members[name])) or isinstance(members[name], property | staticmethod):
            yield f"{path}.{name}", members[name]


def read_docstring(member: Any) -> str:
    return inspect.cleandoc((member.fget if isinstance(member, property) else member).__doc__ or "")


DOCUMENTED = [(path, name, member) for path in OBJECTS for name, member in list_documented(path)]


def test_every_public_name_is_on_the_page() -> None:
    public = {f"polylane.{name}" for name in polylane.__all__ if not name.startswith("__")}
    optim = {f"polylane.optim.{name}" for name in sys.modules["polylane.optim"].__all__}
    assert public | optim - {"polylane.optim.apart", "polylane.optim.SumOverHolders"} <= {*OBJECTS}


def test_every_method_of_a_job_is_on_the_page() -> None:
    public = {name for owner in polylane.Job.__mro__[:-1] for name in vars(owner) if not name.startswith("_")}
    assert public - OF_COMMANDS - {"plan", "world"} == {*OBJECTS["polylane.Job"]["members"]}


@pytest.mark.parametrize(("name", "member"), [row[1:] for row in DOCUMENTED], ids=lambda part: str(part)[:60])
def test_a_public_docstring_has_its_sections(name: str, member: Any) -> None:
    """What it takes, what it returns, and an example; in Markdown, for the page."""
    text = read_docstring(member)
    assert not ROLES.search(text), f"{name}: {ROLES.findall(text)}"
    assert "Examples:\n" in text, name
    if not isinstance(member, property) and not inspect.isclass(member):
        call = inspect.signature(member.__func__ if isinstance(member, staticmethod) else member)
        taken = [parameter for parameter in call.parameters if parameter != "self"]
        assert not taken or "Args:\n" in text, name
        missing = [
            parameter for parameter in taken if not re.search(rf"^    .*\b{parameter}\b.*: ", text, re.MULTILINE)
        ]
        assert not missing, f"{name}: {missing}"
        is_silent = call.return_annotation in (None, "None", inspect.Signature.empty)
        assert is_silent or RETURNS.search(text), f"{name}: what does it return?"


def run_examples(path: str) -> int:
    """Run the examples of an object and of what belongs to it, one after the other; return how many failed."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    names: dict[str, Any] = {"__name__": "__main__"}
    for name, member in list_documented(path):
        test = doctest.DocTestParser().get_doctest(read_docstring(member), {}, name, None, None)
        test.globs = names
        runner.run(test, clear_globs=False)
    return runner.summarize(verbose=False).failed


@pytest.mark.parametrize("path", OBJECTS)
def test_the_examples_of_docstrings_do_what_they_show(path: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", f"from tests.docs.test_docstrings import run_examples as r; exit(r({path!r}))"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    environment["POLYLANE_CACHE"] = str(tmp_path / "cache")
    done = forked_commands.run(words, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
