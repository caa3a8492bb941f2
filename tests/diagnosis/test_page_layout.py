"""Pages: what is read is a whole record, whenever it is read and wherever its writer stopped."""

from __future__ import annotations

import struct
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.diagnosis.page_layout import (
    COPY_BYTES,
    NOTES_START,
    PAGE_BYTES,
    RECORD_BYTES,
    RING,
    RING_ENTRIES,
    RING_START,
    STATE_WORD,
    Phase,
    Record,
    append_note,
    pack_record,
    pack_state,
    pack_wait,
    read_notes,
    read_record,
    read_ring,
    read_verdict,
    unpack_wait,
    write_verdict,
)
from tests.support import subsets

RECORDS = st.builds(
    Record,
    version=st.just(0),
    changed=st.integers(0, 2**63),
    phase=st.sampled_from(list(Phase)),
    step=st.integers(0, 2**40),
    round=st.integers(0, 2**40),
    program=st.integers(0, 1000),
    action=st.integers(-1, 10_000),
    is_new=st.booleans(),
    usual=st.integers(0, 2**40),
)


@given(st.lists(RECORDS, min_size=1, max_size=5), st.data())
@settings(max_examples=subsets.examples(200), deadline=None)
def test_a_record_that_is_torn_anywhere_is_never_read(records: list[Record], data: st.DataObject) -> None:
    """Bytes are written in any order and the writer stops after some of them: the record before is read."""
    page = memoryview(bytearray(4096))
    written = [replace(each, version=number) for number, each in enumerate(records, start=1)]
    packed = [pack_record(*each.__dict__.values()) for each in written]
    for number, content in enumerate(packed[:-1], start=1):
        start = number % 2 * COPY_BYTES
        page[start : start + len(content)] = content
    start = len(packed) % 2 * COPY_BYTES
    places = data.draw(st.permutations(range(len(packed[-1]))))
    for place in places[: data.draw(st.integers(0, len(places)))]:
        page[start + place] = packed[-1][place]
    # What lay there before may share the bytes that are missing.
    is_whole = bytes(page[start : start + len(packed[-1])]) == packed[-1]
    before = written[-2] if len(written) > 1 else Record()
    assert read_record(page) == (written[-1] if is_whole else before)


def test_an_action_is_one_of_the_step_that_the_record_tells_of() -> None:
    page = memoryview(bytearray(4096))
    record = Record(1, round=7, phase=Phase.STARTING)
    page[COPY_BYTES : COPY_BYTES + RECORD_BYTES] = pack_record(*record.__dict__.values())
    for round_number, action in ((7, 3), (8, -1), (6, -1)):
        struct.pack_into("<Q", page, 8 * STATE_WORD, pack_state(round_number, Phase.TRAINING, 3))
        assert read_record(page) == replace(record, phase=Phase.TRAINING, action=action)


def test_nothing_was_written_yet() -> None:
    page = memoryview(bytearray(PAGE_BYTES))
    assert read_record(page) == Record() and read_ring(page) == [] and list(read_notes(page)) == []


@given(st.integers(1, 2**16 - 1), st.integers(1, 2**48 - 1))
def test_a_wait_is_one_word(line: int, number: int) -> None:
    assert unpack_wait(pack_wait(line, number)) == (line, number)
    assert pack_wait(line, number) < 2**64
    assert unpack_wait(0) is None


def test_the_ring_keeps_the_last_actions_in_order() -> None:
    page = memoryview(bytearray(PAGE_BYTES))
    for number in range(RING_ENTRIES + 10):
        RING.pack_into(page, RING_START + number % RING_ENTRIES * RING.size, number, 1, 0, 3, number + 1, number + 2)
    assert [each.number for each in read_ring(page)] == list(range(10, RING_ENTRIES + 10))
    assert RING_START + RING_ENTRIES * RING.size <= NOTES_START


def test_notes_that_have_no_room_are_left_out_whole() -> None:
    page = memoryview(bytearray(NOTES_START + 64))
    assert append_note(page, {"kind": "a"})
    assert not append_note(page, {"kind": "b" * 100})
    assert append_note(page, {"kind": "c"})
    assert [note["kind"] for note in read_notes(page)] == ["a", "c"]


def test_a_verdict_is_read_whole_beside_a_page_full_of_notes() -> None:
    page = memoryview(bytearray(PAGE_BYTES))
    assert read_verdict(page) is None
    write_verdict(page, "x" * PAGE_BYTES)  # no room: as if there were none
    assert read_verdict(page) is None
    write_verdict(page, [[1], "rank 1 hangs", "stack"])
    while append_note(page, {"kind": "x" * 5000}):
        pass
    assert read_verdict(page) == [[1], "rank 1 hangs", "stack"]
    assert all(note["kind"].startswith("x") for note in read_notes(page))
