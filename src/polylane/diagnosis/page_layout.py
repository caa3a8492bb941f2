"""Page layout: where a worker says what it does, in memory that others read at any time, without a lock.

    offset      content
    0           two copies of the record of a step, in turn: the record, then its checksum
    256         time of the last beat of the worker's heartbeat thread
    264         the operation that is waited for: line << 48 | number, 0 for none
    272         the phase and the action: round << 28 | phase << 24 | action + 1
    280         the last collective call of a script: number << 1 | whether it has not ended
    288         whether the script has come to its end, and whether a worker asks why its peer is lost
    296         whether the script is in a collective of torch.distributed's, of all ranks, as of the last beat
    304         the operation that the worker's device waits for, as of the last beat, in the form of the one at 264
    512         for each line, how many of its operations were begun
    8192        a ring of the last actions
    49152       a ring of the last calls: number, length, then method and line
    65536       notes: length, then JSON lines of what does not change (lines, programs, code)
    1032192     the verdict of the watch, written by that: length, then JSON

A record that was torn, since its writer was at it or stopped there, has another checksum; the copy before it is read
then. Words of 8 bytes are written in one go and cannot be torn. All times are of the monotonic clock in nanoseconds.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from polylane.diagnosis.call_order import Call, CallRecord

PAGE_BYTES = 1 << 20
BEAT_WORD, WAIT_WORD, STATE_WORD, CALL_WORD, COUNTERS_WORD = 32, 33, 34, 35, 64  # positions of 8-byte words
END_WORD, COLLECTIVE_WORD, DEVICE_WORD = 36, 37, 38
HAS_LEFT, ASKS = 1, 2  # bits of the word for a script's end
MOST_LINES = 900
RING_START, RING_ENTRIES = 8192, 1024
CALLS_START, CALL_ENTRIES, CALL_BYTES = 49152, 32, 256
NOTES_START = 1 << 16
VERDICT_START = PAGE_BYTES - (1 << 14)
_NUMBER_BITS = 48


class Phase(IntEnum):
    """What a worker is doing outside of its program, or that it runs it."""

    STARTING = 1  # building the model's part, opening connections
    LOADING = 2  # waiting for the user's data
    COMPILING = 3  # capturing and compiling a form of batch that is new
    TRAINING = 4  # a step
    EVALUATING = 5
    SAVING = 6
    ENDING = 7
    SERVING = 8  # a dedicated parameter server
    SCRIPT = 9  # the user's own code, in a script that calls the job's methods itself
    AUDITING = 10  # copying states for an audit, or waiting for the process that replays a step


@dataclass(frozen=True)
class Record:
    """Where a worker is.

    Attributes:
        version: number of the record, from 1.
        changed: when it was written.
        phase: what the worker is doing.
        step: number of the training step, from 1; 0 before the first one.
        round: number of programs that were begun, in training and evaluation, from 1.
        program: number of the running program among the worker's notes.
        action: position in that program; -1: none of its actions runs.
        is_new: whether the program runs for the first time.
        usual: longest time of a step, of late.
    """

    version: int = 0
    changed: int = 0
    phase: Phase = Phase.STARTING
    step: int = 0
    round: int = 0
    program: int = 0
    action: int = -1
    is_new: bool = False
    usual: int = 0


_RECORD = struct.Struct("<QQBQQIi?Q")
_CHECKSUM = struct.Struct("<I")
_WORD = struct.Struct("<Q")
_ROUNDS = (1 << 36) - 1
RECORD_BYTES = _RECORD.size + _CHECKSUM.size
COPY_BYTES = 128  # distance of the two copies


def pack_record(*fields: Any) -> bytes:
    """Return the bytes of a record with its checksum; the fields are those of :class:`Record`, in order."""
    content = _RECORD.pack(*fields)
    return content + _CHECKSUM.pack(zlib.crc32(content))


def read_record(page: memoryview) -> Record:
    """Return where the worker of a page is: its latest whole record, with its phase and action of now."""
    record = Record()
    for start in (0, COPY_BYTES):
        data = bytes(page[start : start + RECORD_BYTES])
        content, checksum = data[: _RECORD.size], data[_RECORD.size :]
        if _CHECKSUM.pack(zlib.crc32(content)) == checksum:
            version, changed, phase, *fields = _RECORD.unpack(content)
            if version > record.version:
                record = Record(version, changed, Phase(phase), *fields)
    (state,) = _WORD.unpack_from(page, STATE_WORD * _WORD.size)
    if state == 0:
        return record
    # The word may be a step ahead of the record, or behind it: an action is one of the record's step alone.
    is_same = state >> 28 == record.round & _ROUNDS
    return replace(record, phase=Phase(state >> 24 & 15), action=(state & 0xFFFFFF) - 1 if is_same else -1)


def pack_state(round_number: int, phase: int, action: int) -> int:
    """Return the word for a phase, and an action of a round; -1 for none."""
    return (round_number & _ROUNDS) << 28 | phase << 24 | action + 1


def pack_wait(line: int, number: int) -> int:
    """Return the word for an operation that is waited for."""
    return line << _NUMBER_BITS | number


def unpack_wait(word: int) -> tuple[int, int] | None:
    """Return (line, number) of the operation that is waited for; None where nothing is."""
    return None if word == 0 else (word >> _NUMBER_BITS, word & (1 << _NUMBER_BITS) - 1)


@dataclass(frozen=True)
class PastAction:
    """An action that a worker has finished.

    Attributes:
        number: which one, from 0.
        round: number of the program's run.
        program: number of the program among the worker's notes.
        action: position in the program.
        start: clock when it began.
        end: clock when it ended.
    """

    number: int
    round: int
    program: int
    action: int
    start: int
    end: int


RING = struct.Struct("<QQIIQQ")


def read_ring(page: memoryview) -> list[PastAction]:
    """Return the last actions of a page, in order; an entry that is being overwritten is left out."""
    entries = range(RING_START, RING_START + RING_ENTRIES * RING.size, RING.size)
    past = (PastAction(*RING.unpack(page[at : at + RING.size])) for at in entries)
    actions = sorted((action for action in past if 0 < action.start <= action.end), key=lambda action: action.number)
    return [action for action in actions if actions[-1].number - action.number < RING_ENTRIES]


_CALL = struct.Struct("<QH")


def write_call(page: memoryview, number: int, text: bytes) -> None:
    """Write a collective call of a script: its method and its line, with a line break between them."""
    start, text = CALLS_START + number % CALL_ENTRIES * CALL_BYTES, text[: CALL_BYTES - _CALL.size]
    page[start + _CALL.size : start + _CALL.size + len(text)] = text
    _CALL.pack_into(page, start, number, len(text))
    _WORD.pack_into(page, CALL_WORD * _WORD.size, number << 1 | 1)  # last: readers see whole entries only


def read_calls(page: memoryview) -> CallRecord:
    """Return the last collective calls of the worker of a page."""
    state, end = (_WORD.unpack_from(page, word * _WORD.size)[0] for word in (CALL_WORD, END_WORD))
    count, calls = state >> 1, list[Call]()
    for number in range(max(1, count - CALL_ENTRIES + 2), count + 1):  # the oldest may be overwritten at this moment
        start = CALLS_START + number % CALL_ENTRIES * CALL_BYTES
        written, length = _CALL.unpack_from(page, start)
        text = bytes(page[start + _CALL.size :][: min(length, CALL_BYTES - _CALL.size)]).decode(errors="replace")
        if written == number:
            calls.append(Call(number, *text.split("\n", 1)))
    return CallRecord(tuple(calls), bool(state & 1), bool(end & HAS_LEFT))


def append_note(page: memoryview, note: Any) -> bool:
    """Append a note to a page; return whether there was room."""
    (length,) = _WORD.unpack_from(page, NOTES_START)
    text = json.dumps(note, separators=(",", ":")).encode() + b"\n"
    start = NOTES_START + _WORD.size + length
    if start + len(text) > min(len(page), VERDICT_START):
        return False
    page[start : start + len(text)] = text
    _WORD.pack_into(page, NOTES_START, length + len(text))  # last: readers see whole notes only
    return True


def read_notes(page: memoryview) -> Iterator[Any]:
    """Yield the notes of a page, in order."""
    (length,) = _WORD.unpack_from(page, NOTES_START)
    start = NOTES_START + _WORD.size
    for line in bytes(page[start : min(start + length, len(page))]).splitlines():
        yield json.loads(line)


def write_verdict(page: memoryview, verdict: Any) -> None:
    """Write what the watch has found into the page of a worker, which may want to raise it."""
    text = json.dumps(verdict).encode()
    if len(text) <= len(page) - VERDICT_START - _WORD.size:
        start = VERDICT_START + _WORD.size
        _WORD.pack_into(page, VERDICT_START, 0)
        page[start : start + len(text)] = text
        _WORD.pack_into(page, VERDICT_START, len(text))  # last, as of notes


def read_verdict(page: memoryview) -> Any:
    """Return what the watch has found; None where it has found nothing."""
    (length,) = _WORD.unpack_from(page, VERDICT_START)
    start = VERDICT_START + _WORD.size
    return json.loads(bytes(page[start : start + length])) if length else None
