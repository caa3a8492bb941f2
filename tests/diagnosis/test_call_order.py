"""Calls of scripts: ranks that make the same ones never differ, however far each has come; others are named."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.diagnosis.call_order import Call, CallRecord, choose_first_to_leave, find_parting
from polylane.diagnosis.page_layout import CALL_ENTRIES, PAGE_BYTES, read_calls, write_call
from polylane.diagnosis.stacks import CodePlace, Frame, find_own_collective
from polylane.runtime.progress.script_calls import is_in_collective
from tests.support import subsets

METHODS = st.lists(st.sampled_from(["job.step", "job.evaluate", "job.save"]), max_size=12)


def record(*calls: str, inside: bool = True, left: bool = False) -> CallRecord:
    """Calls written as ``method line``."""
    made = (call.split() for call in calls)
    return CallRecord(
        tuple(Call(number, method, f"train.py line {line}") for number, (method, line) in enumerate(made, 1)),
        inside,
        left,
    )


@given(METHODS, st.data())
@settings(max_examples=subsets.examples(100), deadline=None)
def test_ranks_with_the_same_calls_never_differ(methods: Sequence[str], data: st.DataObject) -> None:
    """A rank that loads, computes or saves for long has only come less far."""
    calls = tuple(Call(number, method) for number, method in enumerate(methods, 1))
    reached = data.draw(st.lists(st.integers(0, len(calls)), min_size=2, max_size=4))
    known = data.draw(st.integers(1, CALL_ENTRIES))
    assert find_parting({rank: CallRecord(calls[:end][-known:], True) for rank, end in enumerate(reached)}) is None


@given(METHODS, st.integers(0, 12), METHODS)
@settings(max_examples=subsets.examples(100), deadline=None)
def test_a_call_too_many_is_found_once_ranks_come_to_different_methods(
    before: list[str], place: int, after: list[str]
) -> None:
    here, there = [*before, "job.extra", *after], [*before, *after]
    both = [tuple(Call(number, method) for number, method in enumerate(each, 1)) for each in (here, there)]
    found = find_parting(dict(enumerate(CallRecord(calls, True) for calls in both)))
    assert (found is not None) == bool(after)
    if found is not None:
        assert found.number == len(before) + 1


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        (
            [record("job.step 9", "job.save 12"), record("job.step 9", "job.close 14")],
            "rank 0 is in job.save (train.py line 12), rank 1 in job.close (train.py line 14): every rank must call "
            "job.save",
        ),
        (
            [record("job.step 9"), *[record("job.evaluate 7")] * 3],
            "rank 0 is in job.step (train.py line 9), ranks 1 to 3 in job.evaluate (train.py line 7): every rank must "
            "call job.evaluate",
        ),
        (
            [record("job.step 9", left=True, inside=False), record("job.step 9", "job.step 9")],
            "rank 0 left the script after job.step (train.py line 9), rank 1 is in job.step (train.py line 9): every "
            "rank must call job.step as often as the others",
        ),
        (
            [record("job.save 3"), record("job.state_dict 4", "job.step 5")],
            "rank 0 is in job.save (train.py line 3), rank 1 went on with job.state_dict (train.py line 4): every rank "
            "must call the same methods in the same order",
        ),
        (
            [record("job.step 9", "job.step 20", "job.step 9"), record("job.step 9", "job.step 9", "job.evaluate 11")],
            "rank 0 is in job.step (train.py line 9), rank 1 in job.evaluate (train.py line 11): every rank must call "
            "job.evaluate; they parted where rank 0 came to train.py line 20 and rank 1 came to train.py line 9",
        ),
        (
            [record(left=True, inside=False), record("job.save 3")],
            "rank 0 left the script, rank 1 is in job.save (train.py line 3): every rank must call job.save",
        ),
    ],
)
def test_every_rank_is_named_with_its_method_and_line(records: list[CallRecord], sentence: str) -> None:
    found = find_parting(dict(enumerate(records)))
    assert found is not None and found.describe() == sentence


def test_the_ranks_that_few_agree_with_leave_first() -> None:
    found = find_parting({0: record("job.save 3"), 1: record("job.step 4"), 2: record("job.step 4")})
    assert found is not None and choose_first_to_leave(found) == [0]


def test_a_page_has_the_last_calls() -> None:
    page = memoryview(bytearray(PAGE_BYTES))
    assert read_calls(page) == CallRecord()
    for number in range(1, 3 * CALL_ENTRIES):
        write_call(page, number, f"job.step\n{'é' * number} line {number}".encode())
    found = read_calls(page)
    assert found.is_inside and found.last == 3 * CALL_ENTRIES - 1
    assert [call.number for call in found.calls] == list(range(2 * CALL_ENTRIES + 1, 3 * CALL_ENTRIES))
    assert {call.method for call in found.calls} == {"job.step"}


def test_a_collective_of_the_users_own_is_seen_on_the_stack() -> None:
    torch = "/venv/lib/python3.11/site-packages/torch/distributed"
    script = Frame("/home/me/train.py", 14, "<module>")
    inside = [
        Frame(f"{torch}/distributed_c10d.py", 5000, "barrier"),
        Frame(f"{torch}/c10d_logger.py", 83, "wrapper"),
        script,
    ]
    assert find_own_collective(inside) == CodePlace("barrier", "train.py:14")
    assert find_own_collective([script, *inside]) is None
    for function in ("recv", "send", "new_group", "init_process_group"):  # which no other rank need be called by
        called = Frame(f"{torch}/distributed_c10d.py", 6000, function)
        assert find_own_collective([*inside[:2], called, script]) is None


# Calls that block, as torch's own do, from a file of its name.
CALLS = """
def barrier(group=None): BLOCK()
def all_reduce(tensor, op=None, group=None, async_op=False):
    group = group or WORLD
    BLOCK()
def recv(tensor, src=None, group=None): BLOCK()
def new_group(ranks=None):
    barrier()
"""


@pytest.mark.parametrize(
    ("call", "is_one"),
    [
        ("barrier()", True),
        ("barrier(WORLD)", True),
        ("barrier(group=PART)", False),
        ("all_reduce(None)", True),
        ("all_reduce(None, group=PART)", False),
        ("recv(None, 1)", False),
        ("new_group([0])", False),
    ],
)
def test_only_collectives_of_all_ranks_need_those_that_wait(call: str, is_one: bool) -> None:
    inside, goes_on = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        goes_on.wait(20)

    world = object()
    names: dict[str, Any] = {"BLOCK": block, "WORLD": world, "PART": object()}
    # Blocking belongs to the library, or it would be the user's own code in which the thread is.
    names["BLOCK"] = types.FunctionType(
        block.__code__.replace(co_filename="/-packages/b.py"), {}, closure=block.__closure__
    )
    exec(compile(CALLS, "/site-packages/torch/distributed/distributed_c10d.py", "exec"), names)
    thread = threading.Thread(target=lambda: eval(compile(call, "/home/me/train.py", "eval"), names))
    thread.start()
    try:
        assert inside.wait(20)
        assert is_in_collective(sys._current_frames()[thread.ident or 0], world) is is_one
    finally:
        goes_on.set()
        thread.join(20)
    assert not is_in_collective(sys._getframe(), world)
