"""Runs inputs through the command line's own entry, in a forked process that is watched for time and memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

SECONDS = 20.0  # that one input may take, on a busy machine
MEGABYTES = 600.0  # that one input may take on top of what the process has
ROOM = 6 * 2**30  # address space above what there is: a wild input must not take the machine's memory
LONGEST = 4300  # characters of a sentence
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
NOTES = ("note: ", "measuring ", "best plan", "searching")  # how other lines of stderr may begin


@dataclass(frozen=True)
class FuzzInput:
    """One command line, and the files that it needs.

    Attributes:
        name: what it is, and its number: enough to make it again.
        arguments: of the command line, without the program's name.
        files: contents by path inside the folder that the command runs in; None makes a folder.
        code: of the ends with an error, the exit code that is right.
    """

    name: str
    arguments: tuple[str, ...]
    files: dict[str, bytes | None] = field(default_factory=dict)
    code: int = 2


@dataclass(frozen=True)
class FuzzOutcome:
    """How an input ended.

    Attributes:
        name: that of the input.
        code: exit code of the command; None where it did not end by itself.
        wrong: what is wrong with the end; empty if nothing is.
        seconds: wall-clock time.
        megabytes: what the process's resident memory grew by at its peak.
        said: the last line of stderr.
        text: all that was printed on stdout and stderr; only of an input that ran in this process.
    """

    name: str
    code: int | None
    wrong: str
    seconds: float
    megabytes: float
    said: str = ""
    text: str = ""


def judge(code: object, out: str, err: str, allowed: int) -> str:
    """Return what is wrong with an end: its code, or what was said; empty if nothing is."""
    if code == 0:
        return "" if _is_clean(out + err) else "control characters"
    if "this is a fault of polylane" in err:
        return err
    if code != allowed:
        return f"exit code {code}, not {allowed}"
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith(NOTES)]
    if len(lines) != 1 or not lines[0].startswith("polylane: "):
        return f"{len(lines)} lines, not one sentence"
    if len(lines[0]) > LONGEST:
        return f"a sentence of {len(lines[0])} characters"
    return "" if _is_clean(out + err) else "control characters"


def _is_clean(text: str) -> bool:
    return not _CONTROLS.search(text)


def run_inputs(
    inputs: Sequence[FuzzInput], main: Callable[[Sequence[str]], object], seconds: float = SECONDS
) -> Iterator[FuzzOutcome]:
    """Run inputs one after another, in a forked process, and in another one where that did not survive one of them.

    Args:
        inputs: all of them; their files are written where they run.
        main: the command line's entry, which leaves with SystemExit.
        seconds: after which an input is given up, and its process killed.
    """
    done = 0
    while done < len(inputs):
        reader, writer = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run_all(inputs[done:], main, writer)
        os.close(writer)
        try:
            with os.fdopen(reader, "rb", buffering=0) as told:
                while done < len(inputs):
                    began = time.monotonic()
                    line = _read_line(told.fileno(), seconds)
                    if line is not None:
                        yield FuzzOutcome(**json.loads(line))
                        done += 1
                        continue
                    took = time.monotonic() - began
                    os.kill(pid, signal.SIGKILL)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    pid = 0
                    why = f"no end within {took:.0f} s" if took >= seconds else f"its process ended ({status})"
                    yield FuzzOutcome(inputs[done].name, None, why, took, 0.0)
                    done += 1
                    break
        finally:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _read_line(descriptor: int, seconds: float) -> bytes | None:
    """Return the next line of a pipe; None at its end, or when the time is over."""
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        piece = os.read(descriptor, 1)
        if not piece:
            return None
        line += piece
    return line


# ---- in the forked process -------------------------------------------------------------------------------------------


def _run_all(inputs: Sequence[FuzzInput], main: Callable[[Sequence[str]], object], writer: int) -> None:
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        warnings.simplefilter("ignore")
        for each in inputs:
            outcome = run_here(each, main)
            os.write(writer, json.dumps({**vars(outcome), "text": ""}).encode() + b"\n")
    finally:
        os._exit(0)


def run_here(given: FuzzInput, main: Callable[[Sequence[str]], object]) -> FuzzOutcome:
    """Run one input in this process, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="polylane-fuzz-"))
    before, modules, path = os.getcwd(), dict(sys.modules), list(sys.path)
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    broken = ""
    try:
        _write_files(folder, given)
        os.chdir(folder)
        base = _reset_peak()
        began = time.monotonic()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(list(given.arguments))
            except SystemExit as end:
                code = 0 if end.code is None else end.code
            except BaseException as error:
                code = None
                last = traceback.extract_tb(error.__traceback__)[-1]
                broken = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:200]}"
        took, megabytes = time.monotonic() - began, (_peak() - base) / 1024
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
        _forget(folder, modules, path)
    said = (err.getvalue().strip().splitlines() or [""])[-1]
    wrong = broken or judge(code, out.getvalue(), err.getvalue(), given.code)
    if not wrong and megabytes > MEGABYTES:
        wrong = f"{megabytes:.0f} MB"
    return FuzzOutcome(
        given.name,
        code if isinstance(code, int) else None,
        wrong,
        took,
        megabytes,
        said[:300],
        out.getvalue() + err.getvalue(),
    )


def _write_files(folder: Path, given: FuzzInput) -> None:
    for name, content in given.files.items():
        file = folder / name
        if content is None:
            file.mkdir(parents=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def _forget(folder: Path, modules: dict[str, ModuleType], path: list[str]) -> None:
    """Forget the modules that were imported from a folder."""
    sys.path[:] = path
    for name in [name for name in sys.modules if name not in modules]:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def _reset_peak() -> float:
    """Have the system measure the peak of resident memory anew; return what there is now, in kB."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> float:
    return _status("VmHWM")


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0.0)
