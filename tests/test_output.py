"""Output that cannot be written is dropped: nothing raises, nobody waits for long, and it is said once."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from polylane import output
from polylane.output import find_loss, guard_streams, open_output, put_work_first


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_is_said", bytearray(1))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError as error:  # a test has closed it
            assert error.errno == errno.EBADF


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("take", "reason"),
    [
        (full, "No space left on device"),
        (without_reader, "Broken pipe"),
        (lambda: os.open(os.devnull, os.O_RDONLY), "Bad file descriptor"),
    ],
)
def test_what_cannot_be_written_is_said_once(
    take: Callable[[], int], reason: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", open_output(take(), "stdout"))
    for _ in range(3):
        print("a line", flush=True)
    # Where it is the result, an exit code and a sentence at the end say it; a reader that left has what it wanted.
    assert find_loss() == ("" if reason == "Broken pipe" else f"stdout cannot be written: {reason}")
    assert capfd.readouterr().err == ""
    put_work_first()
    for _ in range(3):
        print("a line", flush=True)
    said = f"polylane: stdout cannot be written: {reason}; training continues without it\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("speaks", [True, False])
def test_of_workers_that_share_no_memory_one_says_it(
    speaks: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_is_others_to_say", False)  # put back at the end
    monkeypatch.setattr(sys, "stdout", open_output(full(), "stdout"))
    put_work_first(speaks)
    print("a line", flush=True)
    assert capfd.readouterr().err.count("training continues without it") == speaks


def test_a_reader_that_does_not_read_is_not_waited_for(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0.1)
    monkeypatch.setattr(sys, "stdout", open_output(pipe[1], "stdout"))
    put_work_first()
    started = time.monotonic()
    for number in range(3000):
        print(f"line {number:80}", flush=True)
    assert 0.1 <= time.monotonic() - started < 5
    assert capfd.readouterr().err.count("nobody reads it; training continues without it") == 1
    assert os.read(pipe[0], 1 << 20).startswith(b"line ")
    print("read again", flush=True)
    assert os.read(pipe[0], 1 << 20).endswith(b"read again\n")


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_descriptor_that_does_not_block_loses_nothing(pipe: tuple[int, int], unbuffered: bool) -> None:
    """Another process of the terminal may have set it so: Python raises BlockingIOError, or drops the rest."""
    os.set_blocking(pipe[1], False)
    stream, read = open_output(pipe[1], "stdout", unbuffered=unbuffered), bytearray()

    def read_slowly() -> None:
        while len(read) < 300_000:
            time.sleep(0.001)
            read.extend(os.read(pipe[0], 1 << 14))

    reader = threading.Thread(target=read_slowly)
    reader.start()
    stream.write("x" * 300_000)
    stream.flush()
    reader.join(20)
    assert len(read) == 300_000


def in_a_child(work: Callable[[], object]) -> int | None:
    child = get_context("fork").Process(target=lambda: os._exit(int(bool(work()))))
    child.start()
    child.join(20)
    return child.exitcode


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_no_file_gets_the_number_of_a_closed_stream(closed: tuple[int, ...], tmp_path: Path) -> None:
    def work() -> bool:
        for number in closed:
            os.close(number)
        sys.stdout = sys.stdout if 1 not in closed else None  # type: ignore[assignment]  # as Python starts
        sys.stderr = sys.stderr if 2 not in closed else None  # type: ignore[assignment]
        guard_streams()
        with (tmp_path / "weights").open("wb", buffering=0) as file:
            file.write(b"weights")
            print("a line", flush=True)
            print("a line", file=sys.stderr, flush=True)
            output.say_at_once("a sentence")
            return file.fileno() <= 2

    assert in_a_child(work) == 0
    assert (tmp_path / "weights").read_bytes() == b"weights"


def test_a_recipe_that_closes_stdout_closes_it_for_nobody_else(pipe: tuple[int, int]) -> None:
    def work() -> bool:
        sys.stdout = os.fdopen(pipe[1], "w")
        guard_streams()
        sys.stdout.close()
        print("a line", flush=True)
        return False

    assert in_a_child(work) == 0
    os.close(pipe[1])
    assert os.read(pipe[0], 100) == b"a line\n"


def test_all_processes_say_it_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    monkeypatch.setattr(output, "_is_said", mmap.mmap(-1, 1))
    monkeypatch.setattr(sys, "stdout", open_output(full(), "stdout"))
    put_work_first()
    for _ in range(2):
        assert in_a_child(lambda: print("from a worker", flush=True)) == 0
    print("from the launcher", flush=True)
    assert capfd.readouterr().err.count("No space left") == 1
