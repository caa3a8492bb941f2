"""Writer process: writes shard files from memory that a worker shares with it, while the worker continues to train.

``python -m polylane.checkpoint.writer DESCRIPTOR PARENT`` reads orders from its input and answers each, all as
lines of JSON:

    order     {"path": "...", "bytes": 4096, "entries": [["key", "F32", [8, 8], 0, 256], ...]}
    answer    {"size": 4488, "checksums": [1234, ...], "seconds": 0.02}
              or                                                {"error": [28, "No space left on device", null]}
    order     {"commit": [root, unfinished, step, manifest, keep]}
    answer    {"folder": "..."}                           or    {"error": [28, "No space left on device", "..."]}

DESCRIPTOR is an open file with the tensors' bytes. The process ends when its input does: with the worker, however that
ends, also in the middle of a file. PARENT is the worker's process id: the system ends this one with it, stopped or not.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import time

from polylane.checkpoint.commit import commit_folder
from polylane.checkpoint.shard_file import Entry, write_shard_file
from polylane.parent_death import die_with_parent

NICENESS = 5  # lower priority than the workers: a checkpoint may take longer, a step should not


def main(descriptor: int) -> None:
    """Serve orders until the input ends."""
    with_priority = getattr(os, "nice", None)
    if with_priority is not None:
        with_priority(NICENESS)
    for line in iter(sys.stdin.buffer.readline, b""):
        answer = _carry_out(json.loads(line), descriptor)
        try:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            os._exit(1)  # the worker is gone; an exit in order would try to write the answer again


def _carry_out(order: dict[str, object], descriptor: int) -> dict[str, object]:
    if "commit" in order:
        try:
            return {"folder": commit_folder(*order["commit"])}  # type: ignore[misc]
        except OSError as error:
            return _answer_error(error)
    entries = [Entry(key, dtype, tuple(shape), start, size) for key, dtype, shape, start, size in order["entries"]]  # type: ignore[attr-defined]
    began = time.perf_counter()
    try:
        memory = memoryview(b"")
        if order["bytes"]:
            memory = memoryview(mmap.mmap(descriptor, int(str(order["bytes"])), access=mmap.ACCESS_READ))
        # The memory is unmapped when the last view of it is gone: an exception's frames have some until it is handled.
        written = write_shard_file(str(order["path"]), entries, memory, _end_with_worker)
    except OSError as error:  # a full disk, a quota: an answer, after which the worker may give another order
        return _answer_error(error)
    return {"size": written.size, "checksums": written.checksums, "seconds": time.perf_counter() - began}


def _answer_error(error: OSError) -> dict[str, object]:
    return {"error": [error.errno, error.strerror or str(error), error.filename]}


def _end_with_worker() -> None:
    """End this process if the worker is gone: its end of the pipe is closed then. No order comes while one is open."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    if ready:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    main(int(sys.argv[1]))
