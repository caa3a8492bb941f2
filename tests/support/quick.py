"""python -m tests.support.quick [--seconds S] [BASE]: in a minute, what guards the files that differ from a branch.

First the laws of the house, then the tests that were changed, then those that are named after a changed file, then
those that import one, the most special ones first. What time has not sufficed for is said: ``make test`` runs it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = "tests/test_house.py"
SECONDS = 45.0


def list_changed_files(base: str) -> list[str]:
    """Return the files that differ from a branch, and those that git does not know yet, relative to the root."""
    fork = subprocess.run(["git", "merge-base", base, "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    since = fork.stdout.strip() or base
    commands = (["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout for line in commands]
    return sorted({name for output in outputs for name in output.split() if (ROOT / name).exists()})


def select_tests(changed: Sequence[str], sources: dict[str, str]) -> list[str]:
    """Return the files of tests that guard some files, those first that say most of them.

    Args:
        changed: files that differ, relative to the root.
        sources: text of every file of tests, by its path.
    """
    ranks = {HOUSE: 0.0}
    ranks |= {name: 1.0 for name in changed if name in sources}
    for name in changed:
        module = name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if not name.endswith(".py") or name in sources:
            if name.endswith(".md"):
                ranks.setdefault("tests/test_docs.py", 2.0)
            continue
        imports = re.compile(
            rf"\b{re.escape(module)}\b|from {re.escape(module.rpartition('.')[0])} import .*\b"
            rf"{re.escape(module.rpartition('.')[2])}\b"
        )
        importing = [test for test, text in sources.items() if imports.search(text)]
        # A file that few tests import is guarded by these few; one that all import is guarded by all.
        for test in importing:
            ranks[test] = min(ranks.get(test, 4.0), 3.0 + len(importing) / (1 + len(sources)))
        for test in sources:
            if Path(test).name == f"test_{Path(name).name}" and Path(name).parent.name in test:
                ranks[test] = min(ranks.get(test, 4.0), 2.0)
    return sorted(ranks, key=lambda test: (ranks[test], test))


class TimeLimit:
    """A plugin of pytest that ends the session when its time is over, and says what was not run."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._last = nodeid

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session, self._left = session, len(session.items)

    def pytest_runtest_teardown(self) -> None:
        self._left -= 1
        if self._left and time.monotonic() > self._end:
            self._session.shouldstop = f"time is over: {self._left} tests were not run, which make test does"


def main() -> int:
    """Run lint, types and tests; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.quick", description=__doc__)
    parser.add_argument("base", nargs="?", default="main", help="branch that files are compared with (default: main)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for tests (default: 45)")
    options = parser.parse_args()
    changed = list_changed_files(options.base)
    python_files = [name for name in changed if name.endswith(".py")]
    tools = Path(sys.executable).parent
    types = subprocess.Popen([tools / "mypy"], cwd=ROOT)
    for command in (["ruff", "check"], ["ruff", "format", "--check"]) if python_files else ():
        if subprocess.run([tools / command[0], *command[1:], *python_files], cwd=ROOT, check=False).returncode:
            types.terminate()
            return 1
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    tests = select_tests(changed, sources)
    print(f"{len(changed)} files differ from {options.base}: {len(tests)} files of tests", flush=True)
    status = pytest.main(["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests], [TimeLimit(options.seconds)])
    # An ended session (2) has not failed.
    failed = status not in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED)
    return 1 if types.wait() or failed else 0


if __name__ == "__main__":
    sys.exit(main())
