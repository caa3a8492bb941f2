"""Stacks of a process that does not write them itself are asked of py-spy, where that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polylane.diagnosis.stacks import CodePlace, find_main_stack, find_place
from polylane.runtime.progress import processes

# Answers with its arguments, as a call on a stack.
SPY = """#!{python}
import sys
print(f'Thread 4711 (idle): "MainThread"\\n    main ({{" ".join(sys.argv[1:])}}:3)')
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A file in which no process writes its stacks."""
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 0.05)
    with (tmp_path / "stacks").open("w+b", buffering=0) as file:
        yield file.fileno()


def test_py_spy_is_asked_for_whole_names_of_files(tmp_path: Path, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text(SPY.format(python=sys.executable))
    spy.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    (frame,) = find_main_stack(processes.read_stacks(4711, file, 0), 0, 4711)
    assert frame.file == "dump --nonblocking --full-filenames --pid 4711"


def test_without_py_spy_there_are_no_stacks(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert processes.read_stacks(4711, file, 0) == ""


def test_what_the_process_wrote_is_taken_first(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    os.write(file, b"before")
    os.write(file, b"Thread 0x10")
    assert processes.read_stacks(4711, file, len("before")) == "Thread 0x10"


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_the_real_py_spy_names_the_users_line(tmp_path: Path, file: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\n\ndef main():\n    sys.stdin.read()\n\nprint(flush=True)\nmain()\n")
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stacks = processes.read_stacks(process.pid, file, 0)
        process.kill()
    if not stacks:
        pytest.skip("py-spy may not look into processes here")
    assert find_place(find_main_stack(stacks, 0, process.pid), {}) == CodePlace("main", "train.py:4")
