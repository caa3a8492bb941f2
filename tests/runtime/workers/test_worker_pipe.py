"""A worker's reports are taken when they are whole: nobody waits for one that stopped in the midst of it."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import threading
from typing import Any

import pytest
import torch

from polylane.runtime.plain_data.serialization import encode
from polylane.runtime.workers.failure import Failure
from polylane.runtime.workers.worker_pipe import FAILURE, MESSAGE, RESULT, WorkerPipe, write_report


def bytes_of(*reports: tuple[bytes, bytes]) -> bytes:
    reader, writer = multiprocessing.Pipe(duplex=False)
    for kind, content in reports:
        write_report(writer, kind, content)
    writer.close()
    return os.read(reader.fileno(), 1 << 16)


def result_of(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


@pytest.mark.parametrize("piece", [1, 3, 7, 1 << 16])
def test_reports_in_pieces(piece: int) -> None:
    failure = Failure(1, "ArithmeticError", "no number")
    messages = [(MESSAGE, encode({"step": step})) for step in range(3)]
    sent = bytes_of(*messages, (FAILURE, pickle.dumps(failure)), (RESULT, result_of(torch.arange(3))))
    reader, writer = os.pipe()
    line: WorkerPipe[Any] = WorkerPipe(1, multiprocessing.connection.Connection(reader, writable=False))
    taken = list[Any]()
    for at in range(0, len(sent), piece):
        os.write(writer, sent[at : at + piece])
        line.read_reports(lambda rank, content: taken.append((rank, content["step"])))
    assert taken == [(1, 0), (1, 1), (1, 2)]
    assert line.failure == failure and line.result[0].tolist() == [0, 1, 2] and line.has_ended
    os.close(writer)
    line.read_reports(None)
    assert line.reports.closed


def test_a_report_that_never_ends_is_no_report() -> None:
    reader, writer = os.pipe()
    line: WorkerPipe[Any] = WorkerPipe(0, multiprocessing.connection.Connection(reader, writable=False))
    os.write(writer, bytes_of((FAILURE, pickle.dumps(Failure(0, "X", ""))))[:-1])
    line.read_reports(None)  # returns
    assert not line.has_ended
    os.close(writer)
    line.read_reports(None)
    assert line.reports.closed and not line.has_ended


def test_a_report_that_is_larger_than_the_pipe_arrives_whole() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    line: WorkerPipe[Any] = WorkerPipe(0, reader)
    values = torch.arange(1 << 20)
    thread = threading.Thread(target=write_report, args=(writer, RESULT, memoryview(result_of(values))))
    thread.start()
    while not line.has_ended:
        line.read_reports(None)
    thread.join()
    assert line.result[0].equal(values)
    for pipe in (reader, writer):
        pipe.close()
